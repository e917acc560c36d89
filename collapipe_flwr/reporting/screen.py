"""What whoever starts a run sees: phases, rounds and the end, as much as was asked for.

On a terminal the last lines say what happens now (`bars`); elsewhere each phase is a plain line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live

from collapipe_flwr.reporting.bars import Bars
from collapipe_flwr.reporting.console import RoundPrinter, summary_table
from collapipe_flwr.reporting.progress import RunProgress

_SCREEN = 80  # columns
_PLAIN = 200  # of lines that no terminal folds
_PER_S = 2.0  # that the bars are drawn anew: a run needs the processor more


class Screen:
    """The terminal of `collapipe run`: ``quiet`` shows nothing, ``verbose`` the log itself."""

    def __init__(
        self, *, quiet: bool = False, verbose: bool = False, console: Console | None = None
    ) -> None:
        self.verbose = verbose
        self._console = console or Console(quiet=quiet, highlight=False)
        if console is None and not self._console.is_terminal:
            self._console.width = _PLAIN
        self._draws = self._console.is_terminal and not verbose and not quiet
        self._bars = Bars()
        self._said = ""
        self.printer = RoundPrinter(console=self._console)

    def say(self, text: str) -> None:
        """One line."""
        self.printer.say(text)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Show what takes a while, in the body, unless :meth:`show` knows better."""
        if not self._draws:
            self.say(text)
            yield
            return
        now_s = time.time()
        self._bars.show(RunProgress(phase=text, since_s=now_s, at_s=now_s))
        try:
            with Live(self._bars, console=self._console, transient=True, refresh_per_second=_PER_S):
                yield
        finally:
            self._bars.show(None)

    def show(self, progress: RunProgress) -> None:
        """Where the run is; without a terminal each phase outside of rounds is said once."""
        if self._draws:
            self._bars.show(progress)
        elif not (self.verbose or progress.round_index) and progress.phase != self._said:
            self._said = progress.phase
            self.say(progress.phase)

    def pass_on(self, log: str) -> None:
        """A piece of the log as it is."""
        sys.stdout.write(log)
        sys.stdout.flush()

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """The end of a run at a glance."""
        folds = self._console.is_terminal and self._console.width < _SCREEN
        width = None if self._console.is_terminal else _PLAIN
        self._console.print(summary_table(summary, folds=folds), width=width)
