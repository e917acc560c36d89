"""What a user changes of an app's run-config: by the command line, and by files.

Overrides are merged into one flat file for Flower: ``flwr run --run-config a.b=1 --run-config
a.c=2`` keeps only ``a.c``, because each flag replaces the whole table ``a``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from collapipe_flwr.config.parsing import refuse_unknown
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import Value

_PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")  # Flower's

# The launcher sets these itself, to find the run again.
_OPTIONS = {"output-dir": "output-dir", "run-name": "output-dir", "resume": "resume"}


def read_overrides(
    sources: Sequence[str], declared: Mapping[str, Value] = MappingProxyType({})
) -> dict[str, Value]:
    """Merge ``KEY=VALUE`` pairs and ``.toml`` files, later ones first in rank.

    A value is TOML; what is none is taken as a string, so quotes are optional. A string may hold
    several pairs, as for `flwr run`, with keys that the app has ``declared``. Raises ConfigError.
    """
    merged: dict[str, Value] = {}
    for source in sources:
        if is_file(source):
            merged |= _flat(read_toml(Path(source), f"--run-config {source}"))
        else:
            for pair in _pairs(source, declared):
                merged |= _read_pair(pair)
    for key, option in _OPTIONS.items():
        if key in merged:
            raise ConfigError(f"--run-config {key} cannot be set here: use --{option}")
    return merged


def declared_config(project: Path) -> dict[str, Value]:
    """The flat run-config in an app's ``pyproject.toml``; raises ConfigError where it is no app."""
    path = project / "pyproject.toml"
    if not path.exists():
        raise ConfigError(
            f"{project} is no Flower app: it has no pyproject.toml; name the folder of the app"
        )
    tables = read_toml(path, str(path))
    return _flat(tables.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {}))


def overridden(declared: Mapping[str, Value], overrides: Mapping[str, Value]) -> dict[str, Value]:
    """The whole run-config; raises ConfigError for keys that the app does not declare.

    Flower would not say which.
    """
    refuse_unknown(overrides, set(declared))
    return {**declared, **overrides}


def write_overrides(overrides: Mapping[str, Value], path: Path) -> None:
    """A flat TOML file; JSON's strings, numbers and truth values are TOML's as well."""
    lines = [f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in overrides.items()]
    path.write_text("".join(lines), encoding="utf-8")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a file; raises ConfigError, which begins with ``what`` it is."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what} cannot be read ({error.strerror}): correct its path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} is not TOML: {error}; correct the file") from error


def is_file(source: str) -> bool:
    """Whether an override is the path of a file, not ``KEY=VALUE``."""
    return source.endswith(".toml") and "=" not in source


def _pairs(source: str, declared: Mapping[str, Value]) -> list[str]:
    """The pairs in a string; text with an equals sign may be the value of a single one.

    So there are several only if all keys are declared, or the first one's value is no text.
    """
    found = list(_PAIR.finditer(source))
    keys = [pair[1] for pair in found]
    if len(found) < 2 or _PAIR.sub("", source).strip():
        return [source]
    known = all(key in declared for key in keys)
    several = known or not isinstance(declared.get(keys[0], ""), str)
    return [pair[0] for pair in found] if several else [source]


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
