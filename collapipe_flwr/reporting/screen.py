"""What whoever starts a run sees: phases, rounds and the end, as much as was asked for.

On a terminal a phase that takes long has a line with a clock; elsewhere each phase is a plain line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from collapipe_flwr.reporting.console import RoundPrinter, summary_table


class Screen:
    """The terminal of `collapipe run`: ``quiet`` shows nothing, ``verbose`` the log itself."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.verbose = verbose
        self._console = Console(quiet=quiet, highlight=False)
        self.printer = RoundPrinter(console=self._console)

    def say(self, text: str) -> None:
        """One line."""
        self.printer.say(text)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Say what takes a while, in the body."""
        if self._console.is_terminal and not self.verbose:
            with self._console.status(text):
                yield
            return
        self.say(text)
        yield

    def pass_on(self, log: str) -> None:
        """A piece of the log as it is."""
        sys.stdout.write(log)
        sys.stdout.flush()

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """The end of a run at a glance."""
        self._console.print(summary_table(summary))
