"""Configuration values: from files and the command line to dataclasses, and back.

The fields of the dataclasses declare the keys (`core.keys`). Overrides of an app's run-config are
merged into one flat file for Flower: ``flwr run --run-config a.b=1 --run-config a.c=2`` keeps only
``a.c``, because each flag replaces the whole table ``a``.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields, replace
from datetime import date, time
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import (
    Value,
    check,
    describe_type,
    find_name,
    find_prefix,
    find_rule,
    is_key,
)

T = TypeVar("T")
_PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")  # Flower's

# The launcher sets these itself, to find the run again.
_OPTIONS = {"output-dir": "output-dir", "run-name": "output-dir", "resume": "resume"}


def parse_section(default: T, prefix: str, values: Mapping[str, Value]) -> T:
    """Set the keys of ``default`` that start with ``prefix``; raises ConfigError."""
    found: dict[str, object] = {}
    for field_ in fields(default):  # type: ignore[arg-type]
        name = prefix + find_name(field_) if is_key(field_) else ""
        if (table := find_prefix(field_)) is not None:
            inner = getattr(default, field_.name)
            found[field_.name] = parse_section(inner, prefix + table, values)
        elif name in values:
            found[field_.name] = _parse_value(name, values[name], field_)
    try:
        return replace(default, **found)  # type: ignore[type-var]
    except ConfigError as error:  # of values that do not go together
        if str(error).startswith(prefix):
            raise
        raise ConfigError(f"{prefix}{error}") from error


def parse_table(default: T, name: str, table: object) -> T:
    """Parse one TOML table as a dataclass, by keys with the table's ``name`` in front.

    Defaults are checked as well. Raises ConfigError, also for a key that is unknown.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} must be a table, [{name}], got {table!r}")
    prefix = f"{name}." if name else ""
    known = flatten_section(default, prefix)
    named = {prefix + k: value for k, value in table.items()}
    refuse_unknown(named, known, "key")
    return parse_section(default, prefix, {**known, **named})


def flatten_section(section: Any, prefix: str) -> dict[str, Value]:
    """Return the values, of all keys, that :func:`parse_section` reads as ``section``."""
    values = {}
    for name, field_, owner in _list_keys(section, prefix):
        rule, value = find_rule(field_), getattr(owner, field_.name)
        values[name] = value if rule is None or rule.read is None else rule.write(value)
    return values


def refuse_unknown(
    values: Iterable[str], known: Collection[str], what: str = "run-config key"
) -> None:
    """Raise ConfigError for the first key that no section declares."""
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise ConfigError(f"{what} {name} is unknown; {hint}")


def _list_keys(section: Any, prefix: str) -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield name, field and owner of every key."""
    for field_ in fields(section):
        if (table := find_prefix(field_)) is not None:
            yield from _list_keys(getattr(section, field_.name), prefix + table)
        elif is_key(field_):
            yield prefix + find_name(field_), field_, section


def _parse_value(name: str, value: Value, field_: Field[Any]) -> object:
    rule = find_rule(field_)
    if rule is None or rule.read is None:
        typed = _check_type(name, value, str(field_.type).removesuffix(" | None"))
        check(name, typed, rule)
        return typed
    text = str(_check_type(name, _convert_to_text(value), "str"))
    try:
        parsed = rule.read(text)
        good = rule.holds(parsed)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{name} {rule.says}, got {text!r}")
    return parsed


def _convert_to_text(value: Any) -> Any:
    """Write a number, or a list of numbers and texts, as one text; keep anything else."""
    if isinstance(value, list) and all(type(part) in (int, float, str) for part in value):
        return ",".join(map(str, value))
    return str(value) if type(value) in (int, float) else value


def _check_type(name: str, value: Value, wanted: str) -> Value:
    """Accept exactly the declared type; a whole number also serves where a float is asked."""
    if wanted == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:
            raise ConfigError(f"{name} must be a finite number, got {value}")
        return float(value)
    if type(value).__name__ != wanted:
        raise ConfigError(f"{name} must be {describe_type(wanted)}, got {value!r}")
    return value


def read_overrides(
    sources: Sequence[str], declared: Mapping[str, Value] = MappingProxyType({})
) -> dict[str, Value]:
    """Merge ``KEY=VALUE`` pairs and ``.toml`` files; later ones win.

    A value that is not TOML is a string, so quotes are optional, and so is a date, or a number or
    list where the app has ``declared`` a string. A source may hold several pairs, as for
    `flwr run`, with declared keys. Raises ConfigError.
    """
    merged: dict[str, Value] = {}
    for source in sources:
        if is_file(source):
            values = _flatten(read_toml(Path(source), f"--run-config {source}"))
            texts = {
                k: _convert_to_text(v)
                for k, v in values.items()
                if isinstance(declared.get(k), str)
            }
            merged |= {**values, **texts}
        else:
            for pair in _split_pairs(source, declared):
                merged |= _read_pair(pair, declared)
    for key, option in _OPTIONS.items():
        if key in merged:
            raise ConfigError(f"--run-config {key} cannot be set here: use --{option}")
    for key, value in merged.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--run-config {key} must be a finite number, got {value}")
    return merged


def declared_config(project: Path) -> dict[str, Value]:
    """Read the flat run-config in an app's ``pyproject.toml``; raises ConfigError for no app."""
    path = project / "pyproject.toml"
    if not path.exists():
        raise ConfigError(
            f"{project} is not a Flower app, since it has no pyproject.toml: name the folder of one"
        )
    found: Any = read_toml(path, str(path))
    for name in ("tool", "flwr", "app", "config"):
        found = found.get(name, {})
        if not isinstance(found, dict):
            raise ConfigError(
                f"{path}: {name} of [tool.flwr.app.config] must be a table, got {found!r}"
            )
    return _flatten(found)


def override(declared: Mapping[str, Value], overrides: Mapping[str, Value]) -> dict[str, Value]:
    """Merge the run-config; raises ConfigError naming a key that the app does not declare."""
    refuse_unknown(overrides, set(declared))
    return {**declared, **overrides}


def write_overrides(overrides: Mapping[str, Value], path: Path) -> None:
    """Write a flat TOML file; JSON's strings, finite numbers and booleans are TOML's, too."""

    def plain(value: Value) -> str:
        return json.dumps(value, ensure_ascii=False)  # TOML has no surrogates

    lines = [f"{plain(key)} = {plain(value)}\n" for key, value in overrides.items()]
    path.write_text("".join(lines), encoding="utf-8")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read the tables of a file; raises ConfigError, which begins with ``what``."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{what} is a pipe or a device: name a file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows editors add a mark
    except OSError as error:
        raise ConfigError(f"{what} cannot be read ({error.strerror}): correct its path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} is not in UTF-8: save it so, as TOML asks") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{what} is not TOML: {error}; correct the file") from error


def is_file(source: str) -> bool:
    """Return whether an override is the path of a file, not ``KEY=VALUE``."""
    return source.endswith(".toml") and "=" not in source


def _split_pairs(source: str, declared: Mapping[str, Value]) -> list[str]:
    """Split a string into its pairs.

    Text with an equals sign may be the value of a single pair, so there are several only if all
    keys are declared, or the value of the first one is not text.
    """
    found = list(_PAIR.finditer(source))
    keys = [pair[1] for pair in found]
    if len(found) < 2 or _PAIR.sub("", source).strip():
        return [source]
    known = all(key in declared for key in keys)
    several = known or not isinstance(declared.get(keys[0], ""), str)
    return [pair[0] for pair in found] if several else [source]


def _read_pair(source: str, declared: Mapping[str, Value]) -> dict[str, Value]:
    key, equals, text = source.partition("=")
    if not key.strip() or not equals:
        raise ConfigError(f"--run-config {source!r} is neither KEY=VALUE nor a .toml file")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    key, text = key.strip(), text.strip()
    if isinstance(value, list):
        return {key: _convert_to_text(value)}
    wants_text = isinstance(declared.get(key), str) and not isinstance(value, str)
    return {key: text if wants_text or isinstance(value, date | time) else value}


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    flat: dict[str, Value] = {}
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, date | time):  # such as the name of a folder
            value = value.isoformat()
        if isinstance(value, list) and any(isinstance(part, dict) for part in value):
            raise ConfigError(f"{name} must be a table, [{name}], and not several, [[{name}]]")
        flat |= _flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
