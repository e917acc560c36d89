"""Reference pages from the code: keys of a run-config, the command line, names of the library.

    make reference

writes what stands between ``<!-- generated: run-config -->`` and ``<!-- end -->`` on the pages of
``reference/``. Defaults come from ``pyproject.toml``, allowed values from what the parser refuses,
meanings from ``reference/keys.toml``, names from the page itself.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import click
import typer

from collapipe_flwr.config import schema
from collapipe_flwr.core.errors import ConfigError

Value = bool | int | float | str

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
TITLES = {
    "": "The run",
    "data": "Data",
    "model": "Model",
    "lora": "LoRA adapters",
    "train": "Local training",
    "scheduler": "Scheduler",
    "world": "Simulated devices and radio",
    "links": "Links between stages",
    "cache": "Results of frozen blocks",
    "edge": "Edge",
    "privacy": "Privacy",
    "trust": "Trust in devices",
    "evaluation": "Evaluation",
    "reporting": "Reporting",
}
BENCH = "collapipe bench"  # in a checkout only
_SHORT = 3  # words of an option that is told again rather than referred to
_PLAIN = ("at least 0", "at least 1", "> 0")
_TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_GENERATED = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
_NAME = re.compile(r"^(?:## (?P<heading>.+)|::: (?P<name>\S+))$", re.MULTILINE)
_REFUSED: Mapping[type, Value] = {int: -(10**9), float: -1e9, str: "?"}


@dataclass(frozen=True)
class Key:
    """One key of a run-config as a reader needs it."""

    name: str
    default: Value
    allowed: str
    meaning: str


def run_config() -> str:
    """The keys of every section."""
    found = keys()
    parts = []
    for section, title in TITLES.items():
        rows = [_key_row(key) for key in found if section_of(key.name) == section]
        parts.append(f"## {title}\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def keys() -> list[Key]:
    """Every key of ``pyproject.toml``, in its order."""
    said = meanings()
    return [Key(k, v, allowed(k, v), said.get(k, "")) for k, v in defaults().items()]


@cache
def defaults() -> dict[str, Value]:
    """The run-config of ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(flattened(project["tool"]["flwr"]["app"]["config"]))


def meanings() -> dict[str, str]:
    """What ``reference/keys.toml`` says of every key."""
    text = (ROOT / "docs/reference/keys.toml").read_text(encoding="utf-8")
    return dict(flattened(tomllib.loads(text)))


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as Flower joins them, by dots."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def section_of(key: str) -> str:
    """The section that a key belongs to; empty for keys of the run."""
    return key.rpartition(".")[0]


def parse(values: Mapping[str, Value]) -> Any:
    """The run-config as the product reads it; raises ConfigError."""
    return schema.parse(values)


def allowed(key: str, default: Value) -> str:
    """The values that the parser accepts, in the words in which it refuses others."""
    if not isinstance(default, bool):
        try:
            parse({key: _REFUSED[type(default)]})
        except ConfigError as error:
            said, got, _ = str(error).partition(", got ")
            if got:
                said = said.removeprefix(f"{key} must ").removeprefix("be ")
                return said.replace("lie between", "between").replace("list ", "list of ")
            if known := re.search(r"known are (.+)", said):
                return f"one of {known[1]}"
    return _TYPES[type(default)]


def commands() -> str:
    """Commands with arguments and options, without benches; shared ones are told of the first."""
    seen: dict[str, str] = {}
    tree = command_tree().items()
    return "\n\n".join(_command(*each, seen) for each in tree if BENCH not in each[0])


def names() -> str:
    """The names that `reference/api.md` documents, with their arguments and methods, by heading."""
    tables: dict[str, list[str]] = {}
    heading = ""
    for match in _NAME.finditer((FOLDER / "api.md").read_text(encoding="utf-8")):
        if match["name"]:
            tables.setdefault(heading, []).extend(_name_rows(match["name"]))
        heading = match["heading"] or heading
    return "\n\n".join(f"**{heading}**\n\n" + "\n".join(rows) for heading, rows in tables.items())


@cache
def command_tree() -> dict[str, click.Command]:
    """The commands that do something, by their full name."""
    from benchmarks.__main__ import app as benches
    from collapipe_flwr.cli import app

    tree = dict(_leaves("collapipe", typer.main.get_command(app)))
    del tree[BENCH]  # it passes its arguments on
    return tree | dict(_leaves(BENCH, typer.main.get_command(benches)))


def _key_row(key: Key) -> str:
    shown = str(key.default).lower() if isinstance(key.default, bool) else str(key.default)
    about = [f"`{shown}`" if shown else "empty", key.allowed]
    if key.allowed in (*_TYPES.values(), *_PLAIN):
        about.pop()  # the default shows it
    return f"* `{key.name}` ({'; '.join(about)}): {key.meaning}"


def _leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    for child, nested in command.commands.items():
        yield from _leaves(f"{name} {child}", nested)


def _command(name: str, command: click.Command, seen: dict[str, str]) -> str:
    with click.Context(command, info_name=name) as context:
        options = [_option(p, context) for p in command.params if isinstance(p, click.Option)]
    shared: dict[str, list[str]] = {}
    for line in options:
        if (first := seen.setdefault(line, name)) != name and len(line.split()) > _SHORT:
            shared.setdefault(first, []).append(re.split(r": | \(", line[2:])[0])
    options = [line for line in options if seen[line] == name or len(line.split()) <= _SHORT]
    options += [f"* {', '.join(names)}: as of `{first}`." for first, names in shared.items()]
    arguments = [f"* `{argument.upper()}`: {said}" for argument, said in _arguments(command)]
    parts = [f"## {name}", _first_paragraph(command.help), "\n".join([*arguments, *options])]
    return "\n\n".join(filter(None, parts))


def _arguments(command: click.Command) -> Iterator[tuple[str, str]]:
    """Names and help of arguments, as declared: click 8.5 forgets the help that typer gives it."""
    assert command.callback is not None
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    for name, hint in hints.items():
        for said in getattr(hint, "__metadata__", ()):
            if isinstance(said, typer.models.ArgumentInfo):
                yield name, said.help or ""


def _option(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = option.get_default(context)
    shown = "" if default in (None, "", False, (), []) else f" (`{default}`)"
    return f"* {names}{shown}: {option.help or ''}"


def _name_rows(dotted: str) -> Iterator[str]:
    """A name with its arguments; the site shows methods, too."""
    found, short = pkgutil.resolve_name(dotted), dotted.rpartition(".")[2]
    bare = isinstance(found, type) and issubclass(found, (Exception, Protocol))  # not to be made
    yield f"* `{short}{'' if bare else _arguments_of(found)}`: {_summary(found)}"


def _arguments_of(found: Any) -> str:
    """``(a, *, b=...)``, without annotations and ``self``."""
    plain = [
        each.replace(
            annotation=each.empty, default=each.empty if each.default is each.empty else ...
        )
        for each in inspect.signature(found).parameters.values()
        if each.name != "self"
    ]
    return str(inspect.Signature(plain)).replace("Ellipsis", "...").replace(" = ", "=")


def _summary(found: Any) -> str:
    """The first paragraph of a docstring, without roles of Sphinx."""
    return re.sub(r":\w+:(?=`)", "", _first_paragraph(found.__doc__)).replace("``", "`")


def _first_paragraph(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def page(text: str) -> str:
    """The text of a page with its generated parts made anew."""
    return _GENERATED.sub(lambda m: f"{m[1]}\n{GENERATED[m[2]]()}\n\n{m[3]}", text)


GENERATED: Mapping[str, Callable[[], str]] = {
    "run-config": run_config,
    "commands": commands,
    "names": names,
}

if __name__ == "__main__":
    for path in FOLDER.glob("*.md"):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
