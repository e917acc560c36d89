"""Run-config overrides from files and the command line, merged into the one file Flower gets.

``flwr run --run-config a.b=1 --run-config a.c=2`` keeps only ``a.c``: each flag replaces the whole
table ``a``. One flat file has no such trap.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collapipe_flwr.core.config import known_keys, parse
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.extras import require
from collapipe_flwr.core.parsing import Value, refuse_unknown


def read_overrides(sources: Sequence[str]) -> dict[str, Value]:
    """Merge ``KEY=VALUE`` pairs and ``.toml`` files, later ones first in rank.

    A value is TOML; what is none is taken as a string, so quotes are optional. Raises ConfigError.
    """
    merged: dict[str, Value] = {}
    for source in sources:
        merged |= _read_file(Path(source)) if source.endswith(".toml") else _read_pair(source)
    return merged


def check_overrides(project: Path, overrides: Mapping[str, Value]) -> None:
    """Raise ConfigError for keys that the app does not declare; Flower would not say which.

    For an app with exactly our keys, its values are checked as well, and that the extra ``data``
    is installed, before anything starts.
    """
    # The launcher sets these itself, to find the run again.
    for key, option in (("output-dir", "output-dir"), ("run-name", "output-dir"), ("resume",) * 2):
        if key in overrides:
            raise ConfigError(f"--run-config {key} cannot be set here: use --{option}")
    path = project / "pyproject.toml"
    if not path.exists():
        raise ConfigError(f"{project} is no Flower app: it has no pyproject.toml")
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    declared = _flat(table.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {}))
    refuse_unknown(overrides, set(declared))
    if set(declared) == known_keys():
        require("datasets", "data")
        parse({**declared, **overrides})


def write_overrides(overrides: Mapping[str, Value], path: Path) -> None:
    """A flat TOML file; JSON's strings, numbers and truth values are TOML's as well."""
    lines = [f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in overrides.items()]
    path.write_text("".join(lines), encoding="utf-8")


def _read_file(path: Path) -> dict[str, Value]:
    try:
        return _flat(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--run-config {path} cannot be read ({error.strerror})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--run-config {path} is not TOML: {error}") from error


def _read_pair(source: str) -> dict[str, Value]:
    key, equals, text = source.partition("=")
    if not key.strip() or not equals:
        raise ConfigError(f"--run-config {source!r} is neither KEY=VALUE nor a .toml file")
    try:
        value: Value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return {key.strip(): value}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    flat: dict[str, Value] = {}
    for key, value in table.items():
        name = prefix + key
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
