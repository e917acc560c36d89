"""Configuration keys, declared beside the fields that they set.

A key is a field with dashes for underscores. The type of the field and its rule decide which values
are accepted; lists, paths and the like also declare how they are read from text. Values become
fields in ``config.parsing``. Every refusal is a :class:`ConfigError` that names the key as the user
wrote it, the value and the way out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar, cast

from collapipe_flwr.core.errors import ConfigError

Value = bool | int | float | str
T = TypeVar("T")
_RULE, _NAME, _INLINE = "rule", "name", "inline"
MOST_COUNTED = 1_000_000  # tables of costs have a row for each
_PLAIN: Mapping[str, tuple[type, str]] = {  # fields of these types, as a program may set them
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a string"),
}
AUTO, CPU = "auto", "cpu"  # where a process computes


@dataclass(frozen=True, slots=True)
class Rule:
    """A test of one value and a description of what it accepts.

    ``read`` and ``write`` convert a value that is not plain from and to text of a configuration;
    ``read`` raises ValueError for text that it cannot convert.
    """

    holds: Callable[[Any], bool]
    says: str
    read: Callable[[str], Any] | None = None
    write: Callable[[Any], str] = str
    names: tuple[str, ...] = ()  # all values, where they can be listed


def at_least(low: float) -> Rule:
    return Rule(lambda v: v >= low, f"must be at least {low:g}")


def above(low: float) -> Rule:
    return Rule(lambda v: v > low, f"must be > {low:g}")


def between(low: float, high: float) -> Rule:
    return Rule(lambda v: low <= v <= high, f"must lie between {low:.7g} and {high:.7g}")


def off_or_at_least(limit: float) -> Rule:
    return Rule(lambda v: v == 0 or v >= limit, f"must be 0 or >= {limit:g}")


def one_of(*names: str | int) -> Rule:
    says = "must be one of " + ", ".join(map(str, names))
    return Rule(lambda v: v in names, says, names=tuple(map(str, names)))


def matches(pattern: str, says: str) -> Rule:
    """Accept text that a regular expression covers from end to end."""
    return Rule(lambda v: re.fullmatch(pattern, v) is not None, says)


def some_of(*names: str, empty: bool = False) -> Rule:
    """Accept a comma-separated choice of a few names, or ``empty`` text, as a tuple."""

    def read(text: str) -> tuple[str, ...]:
        return _split_parts(text) if text.strip() or not empty else ()

    says = "must list some of " + ", ".join(names)
    return Rule(lambda v: set(v) <= set(names), says, read, ",".join)


def counts(*, empty: bool = False) -> Rule:
    """Accept comma-separated whole numbers from 1 to a million, or ``empty`` text, as a tuple."""

    def read(text: str) -> tuple[int, ...]:
        parts = _split_parts(text) if text.strip() or not empty else ()
        if not all(part.isdigit() for part in parts):
            raise ValueError(text)
        return tuple(map(int, parts))

    says = f'must list whole numbers from 1 to {MOST_COUNTED}, for example "4,8"'
    return Rule(
        lambda v: all(1 <= n <= MOST_COUNTED for n in v),
        says,
        read,
        lambda v: ",".join(map(str, v)),
    )


def numbers() -> Rule:
    """Accept comma-separated numbers, as a tuple."""
    return Rule(
        lambda v: all(map(math.isfinite, v)),
        'must list numbers, for example "0.5,0.5,0.5"',
        read=lambda t: tuple(float(part) for part in t.split(",")),
        write=lambda v: ",".join(repr(n).removesuffix(".0") for n in v),
    )


def compute_name() -> Rule:
    """Accept names of devices to compute on, here or not (`pipeline.compute` looks)."""
    rule = matches(
        r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?",
        "must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N",
    )
    return replace(rule, names=(AUTO, CPU, "cuda", "mps"))


def words() -> Rule:
    """Accept words between spaces or commas, as a tuple."""
    return _accept_any(read=lambda t: tuple(t.replace(",", " ").split()), write=" ".join)


def name_lists() -> Rule:
    """Accept lists of names, commas inside and semicolons between them, as tuples in a tuple."""
    return _accept_any(
        read=lambda t: tuple(_split_parts(part) for part in t.split(";") if part.strip()),
        write=lambda v: ";".join(map(",".join, v)),
    )


def path() -> Rule:
    """Accept the name of a file or folder; None where it is empty."""
    return _accept_any(read=lambda t: Path(t) if t else None, write=lambda v: str(v or ""))


def assignments() -> Rule:
    """Accept what :func:`read_assignments` reads."""

    def holds(text: str) -> bool:
        return all(name and equals for name, equals, _ in _split_assignments(text))

    return Rule(holds, 'must read like "d_model=64 dropout=0.0"')


def read_assignments(text: str) -> dict[str, object]:
    """Read ``"d_model=64 act=gelu"`` as a mapping; values are JSON where they can be."""
    found: dict[str, object] = {}
    for name, _, value in _split_assignments(text):
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def key(default: T, rule: Rule | None = None, *, name: str = "") -> T:
    """Declare one key: its default, the rule that its values obey, its name if not the field's."""
    metadata = {_RULE: rule, _NAME: name}
    if isinstance(default, dict):  # compared, but not hashed: a dict cannot be
        return cast(T, field(default_factory=default.copy, hash=False, metadata=metadata))
    declared: T = field(default=default, metadata=metadata)
    return declared


def inline(default: T, *, table: str = "") -> T:
    """Declare another dataclass, whose keys stand among those of this one, or in a ``table``."""
    declared: T = field(default=default, metadata={_INLINE: f"{table}." if table else ""})
    return declared


def find_prefix(field_: Field[Any]) -> str | None:
    """Find the prefix of the keys of an inlined field; None for any other field."""
    prefix: str | None = field_.metadata.get(_INLINE)
    return prefix


def is_key(field_: Field[Any]) -> bool:
    return _RULE in field_.metadata


def find_name(field_: Field[Any]) -> str:
    """Find the name by which users write a key."""
    return field_.metadata[_NAME] or field_.name.replace("_", "-")


def find_rule(field_: Field[Any]) -> Rule | None:
    rule: Rule | None = field_.metadata[_RULE]
    return rule


def check(name: str, value: object, rule: Rule | None) -> None:
    """Raise ConfigError, naming the key, for a value against the rule."""
    if rule is not None and not rule.holds(value):
        near = get_close_matches(str(value), rule.names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{name} {rule.says}, got {value!r}{hint}")


def check_keys(section: Any, prefix: str) -> None:
    """Check the keys of an object that was built by hand; raises ConfigError."""
    check_types(section, prefix)
    for field_ in filter(is_key, fields(section)):
        check(prefix + find_name(field_), getattr(section, field_.name), find_rule(field_))


def check_types(section: Any, prefix: str) -> None:
    """Raise ConfigError for a text, number or truth value of the wrong one of these types."""
    for field_ in filter(is_key, fields(section)):
        value, kind = getattr(section, field_.name), str(field_.type)
        wanted = kind.removesuffix(" | None")
        if wanted not in _PLAIN or (value is None and wanted != kind):
            continue
        if not isinstance(value, _PLAIN[wanted][0]) or isinstance(value, bool) > (wanted == "bool"):
            name = prefix + find_name(field_)
            raise ConfigError(f"{name} must be {describe_type(wanted)}, got {value!r}")


def describe_type(kind: str) -> str:
    """Describe the values of a type in words."""
    return _PLAIN[kind][1]


def _accept_any(read: Callable[[str], Any], write: Callable[[Any], str]) -> Rule:
    return Rule(lambda _: True, "", read, write)


def _split_parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _split_assignments(text: str) -> list[tuple[str, str, str]]:
    return [word.partition("=") for word in text.split()]
