"""A bar for work that is counted in steps, on stderr so that results can be piped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call after every step with the name of what is being done."""
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda doing: bar.update(task, advance=1, description=doing)
