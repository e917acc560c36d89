"""The code of an app, as files: which run it belongs to, where it lies, what it consists of."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from collapipe_flwr.core.errors import ConfigError, RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class AppCode:
    """The app ``module:attribute``, imported from ``folder`` for a run.

    ``digest`` covers all Python files there: in a deployment, those of the FAB.
    """

    app: str
    folder: str
    digest: str
    run_id: int

    @staticmethod
    def here(app: str, run_id: int) -> AppCode:
        """The code that this process would import; raises ConfigError for an unknown module."""
        folder = _folder(app)
        return AppCode(app=app, folder=str(folder), digest=_digest(folder), run_id=run_id)

    @staticmethod
    def of_json(told: Mapping[str, Any]) -> AppCode:
        return AppCode(**{name: told[name] for name in AppCode.__slots__})

    def load(self) -> Any:
        """Import the app; raises RunError if it came from other files than these."""
        found = load_app(self.app)
        if AppCode.here(self.app, self.run_id) != self:
            raise RunError(f"{self.app} is not as in {self.folder}, but from {_folder(self.app)}")
        return found


def load_app(app: str) -> Any:
    """Import what ``module:attribute`` names; raises ConfigError if it names nothing."""
    module, _, name = app.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise ConfigError(f"{app!r} must name an app as 'module:attribute'") from error


def _folder(app: str) -> Path:
    """The folder that holds the package of the app."""
    package = app.partition(":")[0].partition(".")[0]
    found = find_spec(package)
    places = [] if found is None else [*(found.submodule_search_locations or ()), found.origin]
    if not places or places[0] is None:
        raise ConfigError(f"{app!r}: there is no module {package}")
    return Path(places[0]).resolve().parent


def _digest(folder: Path) -> str:
    digest = sha256()
    for path in sorted(_sources(folder)):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        yield from (Path(place, name) for name in files if name.endswith(".py"))
