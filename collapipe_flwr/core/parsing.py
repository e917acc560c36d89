"""One parser from Flower's flat run-config to frozen dataclasses, and the rules it checks.

A section is a dataclass; a key is its field with dashes for underscores. The type of the field
decides what is accepted, the rule beside it which values. Every refusal is one
:class:`ConfigError` that names the key as the user wrote it, the value and the way out.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from collapipe_flwr.core.errors import ConfigError

Value = bool | int | float | str
T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A test of one value and the words for what it accepts."""

    holds: Callable[[Any], bool]
    says: str


def at_least(low: float) -> Rule:
    """Accept numbers from ``low`` on."""
    return Rule(lambda v: v >= low, f"must be at least {low:g}")


def above(low: float) -> Rule:
    """Accept numbers greater than ``low``."""
    return Rule(lambda v: v > low, f"must be > {low:g}")


def between(low: float, high: float) -> Rule:
    """Accept numbers from ``low`` to ``high``, both included."""
    return Rule(lambda v: low <= v <= high, f"must lie between {low:g} and {high:g}")


def off_or_at_least(limit: float) -> Rule:
    """Accept 0, or numbers that are not below ``limit``."""
    return Rule(lambda v: v == 0 or v >= limit, f"must be 0 or >= {limit:g}")


def one_of(*names: str | int) -> Rule:
    """Accept one of a few names or numbers."""
    return Rule(lambda v: v in names, "must be one of " + ", ".join(map(str, names)))


def some_of(*names: str) -> Rule:
    """Accept a comma-separated choice of a few names."""

    def holds(text: str) -> bool:
        return all(part.strip() in names for part in text.split(","))

    return Rule(holds, "must list some of " + ", ".join(names))


def matches(pattern: str, says: str) -> Rule:
    """Accept text that a regular expression covers from end to end."""
    return Rule(lambda v: re.fullmatch(pattern, v) is not None, says)


def counts() -> Rule:
    """Accept comma-separated whole numbers, each at least 1."""

    def holds(text: str) -> bool:
        return all(part.strip().isdigit() and int(part) >= 1 for part in text.split(","))

    return Rule(holds, 'must list whole numbers >= 1, for example "4,8"')


def numbers() -> Rule:
    """Accept comma-separated numbers."""

    def holds(text: str) -> bool:
        try:
            return all(math.isfinite(float(part)) for part in text.split(","))
        except ValueError:
            return False

    return Rule(holds, 'must list numbers, for example "0.5,0.5,0.5"')


def assignments() -> Rule:
    """Accept what :func:`read_assignments` reads."""

    def holds(text: str) -> bool:
        return all(name and equals for name, equals, _ in _parts(text))

    return Rule(holds, 'must read like "d_model=64 dropout=0.0"')


def read_assignments(text: str) -> dict[str, object]:
    """``"d_model=64 act=gelu"`` as a mapping; a value is JSON where it can be, else a string."""
    return {name: _json_or_text(value) for name, _, value in _parts(text)}


def _parts(text: str) -> list[tuple[str, str, str]]:
    return [word.partition("=") for word in text.split()]


def _json_or_text(value: str) -> object:
    try:
        parsed: object = json.loads(value)
    except json.JSONDecodeError:
        return value
    return parsed


def key(default: T, rule: Rule | None = None) -> T:
    """Declare one key: its default and the rule that its values obey."""
    declared: T = field(default=default, metadata={"rule": rule})
    return declared


def key_names(section: type[Any], prefix: str) -> dict[str, str]:
    """Map the user's keys of a section to its field names."""
    return {prefix + f.name.replace("_", "-"): f.name for f in fields(section)}


def parse_section(section: type[T], prefix: str, values: Mapping[str, Value]) -> T:
    """Build one section from the keys that start with ``prefix``; raises ConfigError."""
    names = key_names(section, prefix)
    found: dict[str, Value] = {}
    for field_ in fields(section):  # type: ignore[arg-type]
        name = next(k for k, f in names.items() if f == field_.name)
        if name in values:
            value = _typed(name, values[name], str(field_.type))
            _check(name, value, field_.metadata.get("rule"))
            found[field_.name] = value
    return section(**found)


def check_section(section: object, prefix: str) -> None:
    """Check the values of a section that was built by hand; raises ConfigError."""
    for field_ in fields(section):  # type: ignore[arg-type]
        name = prefix + field_.name.replace("_", "-")
        _check(name, getattr(section, field_.name), field_.metadata.get("rule"))


def refuse_unknown(values: Iterable[str], known: set[str], what: str = "run-config key") -> None:
    """Raise ConfigError for the first key that no section declares."""
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise ConfigError(f"{what} {name} is unknown; {hint}")


def _typed(name: str, value: Value, wanted: str) -> Value:
    """Accept exactly the declared type; a whole number also serves where a float is asked."""
    if wanted == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value).__name__ != wanted:
        words = {"str": "a string", "int": "a whole number", "float": "a number"}
        raise ConfigError(f"{name} must be {words.get(wanted, 'true or false')}, got {value!r}")
    return value


def _check(name: str, value: Value, rule: Rule | None) -> None:
    if rule is not None and not rule.holds(value):
        raise ConfigError(f"{name} {rule.says}, got {value!r}")
