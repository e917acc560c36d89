"""One JSON file as a result: its folder is checked before the work, its content is whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

from collapipe_flwr.core.durable import write_text
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting.events import finite


def prepare(option: str, path: Path) -> None:
    """Make the folder of ``path``; raises ConfigError that names the option."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: its folder cannot be made ({error})") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written; choose another file")


def write_json(path: Path, values: object) -> None:
    """Replace ``path``; numbers that JSON does not know become null. Raises ConfigError."""
    text = json.dumps(finite(values), indent=2, allow_nan=False)
    try:
        write_text(path, text + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error})") from error
