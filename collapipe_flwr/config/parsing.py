"""From flat values to dataclasses and back, by the keys that their fields declare."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import Field, fields, replace
from typing import Any, TypeVar

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import Value, check, is_inline, is_key, name_of, rule_of

T = TypeVar("T")
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def parse_section(default: T, prefix: str, values: Mapping[str, Value]) -> T:
    """``default`` with the keys that start with ``prefix`` set; raises ConfigError."""
    found: dict[str, object] = {}
    for field_ in fields(default):  # type: ignore[arg-type]
        name = prefix + name_of(field_) if is_key(field_) else ""
        if is_inline(field_):
            found[field_.name] = parse_section(getattr(default, field_.name), prefix, values)
        elif name in values:
            found[field_.name] = _parsed(name, values[name], field_)
    try:
        return replace(default, **found)  # type: ignore[type-var]
    except ConfigError as error:  # of values that do not go together
        if str(error).startswith(prefix):
            raise
        raise ConfigError(f"{prefix}{error}") from error


def flatten_section(section: Any, prefix: str) -> dict[str, Value]:
    """The values that :func:`parse_section` reads as ``section``; they have all of its keys."""
    values = {}
    for name, field_, owner in _keys(section, prefix):
        rule, value = rule_of(field_), getattr(owner, field_.name)
        values[name] = value if rule is None or rule.text is None else rule.text.write(value)
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


def _keys(section: Any, prefix: str) -> Iterator[tuple[str, Field[Any], Any]]:
    """Name, field and owner of every key."""
    for field_ in fields(section):
        if is_inline(field_):
            yield from _keys(getattr(section, field_.name), prefix)
        elif is_key(field_):
            yield prefix + name_of(field_), field_, section


def _parsed(name: str, value: Value, field_: Field[Any]) -> object:
    rule = rule_of(field_)
    if rule is None or rule.text is None:
        typed = _typed(name, value, str(field_.type).removesuffix(" | None"))
        check(name, typed, rule)
        return typed
    text = str(_typed(name, value, "str"))
    try:
        parsed = rule.text.read(text)
        good = rule.holds(parsed)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{name} {rule.says}, got {text!r}")
    return parsed


def _typed(name: str, value: Value, wanted: str) -> Value:
    """Accept exactly the declared type; a whole number also serves where a float is asked."""
    if wanted == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value).__name__ != wanted:
        raise ConfigError(f"{name} must be {_WORDS.get(wanted, 'a string')}, got {value!r}")
    return value
