"""Results as JSON files and tables, and a progress bar."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from collapipe_flwr.core.durable import write_text
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting.events import replace_nonfinite


def prepare(option: str, path: Path | None) -> None:
    """Make the folder of ``path``, if one was given; raises ConfigError that names the option."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: its folder cannot be made ({error})") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written; choose another file")


def write_json(path: Path | None, values: object) -> None:
    """Replace ``path``, if given; numbers unknown to JSON become null. Raises ConfigError."""
    if path is None:
        return
    text = json.dumps(replace_nonfinite(values), indent=2, allow_nan=False)
    try:
        write_text(path, text + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error})") from error


def cell(value: float | None, unit: float, digits: int) -> str:
    """Format a cell of :func:`number_table`: the value in this unit, empty for None."""
    return "" if value is None else f"{value / unit:z.{digits}f}"


def terminal(**how: Any) -> Console:
    """Make a console that prints texts as they are, even if they look like rich's markup."""
    return Console(highlight=False, markup=False, emoji=False, **how)


class PlainTable(Table):
    """A table that shows texts as they are, on every console; a coloured cell is a `Text`."""

    def set_title(self, title: str) -> Self:
        """Put a title on its left; returns the table."""
        self.title, self.title_justify = Text(title, style="table.title"), "left"
        return self

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        """Add a line."""
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **how)


def number_table(title: str, names: Sequence[str], numbers: Sequence[str]) -> PlainTable:
    """Make an empty table: names wrap on a narrow terminal, numbers do not."""
    table = PlainTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)).set_title(title)
    for name in names:
        table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def format_count(count: int, noun: str) -> str:
    """Format as ``1 round``, ``2 rounds``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after every step, with the name of that step.

    Bars go to stderr; where none moves, as in a pipe, goes a line at the beginning and when a step
    of another name comes first.
    """
    columns = (
        TextColumn("{task.description:<16}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
    )
    console, begun = terminal(stderr=True), set[str]()
    is_plain = not console.is_terminal or console.is_dumb_terminal
    if is_plain:
        console.print(f"begun: {format_count(total, 'step')}")
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=total)

        def tick(doing: str) -> None:
            bar.update(task, advance=1, description=doing)
            if is_plain and doing not in begun:
                begun.add(doing)
                console.print(f"{doing} ...")

        yield tick
