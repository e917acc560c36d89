"""Import paths of the last release, which keep working for one more with a DeprecationWarning.

``renamed.json`` maps each old module to the names that left it, and each name to its new place,
``module:name``. An old module that is gone becomes a stand-in; one that still exists finds the
names that left it. Nothing of this costs anything before an old path is used.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

Names = Mapping[str, str]


def install() -> None:
    """Let this package's old import paths be found; doing it twice changes nothing."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPaths())


class OldPaths(MetaPathFinder):
    """Finds modules that are gone, and adds what left them to modules that are still there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder.find_spec`; None for all that has nothing to do with old paths."""
        if not fullname.startswith(f"{__package__}."):
            return None
        names, is_package = table().get(fullname), fullname in packages()
        if names is None and not is_package:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return ModuleSpec(fullname, StandIn(names or {}), is_package=is_package)
        if names and spec.loader is not None:
            spec.loader = StandIn(names, spec.loader)
        return spec


class StandIn(Loader):
    """Loads a module whose missing attributes are looked up at their new places."""

    def __init__(self, names: Names, loader: Loader | None = None) -> None:
        self._names, self._loader = names, loader

    def __getattr__(self, name: str) -> Any:
        """What the loader of a module that still exists can do besides, such as `get_source`."""
        return getattr(vars(self)["_loader"], name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if self._loader is None else self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._loader is not None:
            self._loader.exec_module(module)
        own = getattr(module, "__getattr__", None)
        vars(module)["__getattr__"] = _finding(module.__name__, self._names, own)


@cache
def table() -> Mapping[str, Names]:
    """Old modules, and for each name that left one its new place."""
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    found: Mapping[str, Names] = json.loads(text)
    return found


@cache
def packages() -> frozenset[str]:
    """The old modules that contain others."""
    return frozenset(name.rpartition(".")[0] for name in table())


def _finding(module: str, names: Names, own: Callable[[str], Any] | None) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        if name not in names:
            if own is not None:
                return own(name)
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, now = names[name].partition(":")
        warnings.warn(
            f"{module}.{name} is now {place}.{now}; the old path ends with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(place), now)

    return find
