"""The terminal of `collapipe run`: phases, rounds and the final summary.

On a terminal the last lines say what happens now (`bars`); elsewhere each phase is a plain line,
and where a phase takes long, another line says every few seconds how far it is.
The ServerApp is a process without a terminal, so what is shown is read from the run directory.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.live import Live

from collapipe_flwr.core.processes import run_beside
from collapipe_flwr.reporting import run_directory
from collapipe_flwr.reporting.bars import Bars, plain_line
from collapipe_flwr.reporting.console import ProgressPrinter, summary_table
from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.output import terminal
from collapipe_flwr.reporting.progress import RunProgress, read_progress
from collapipe_flwr.reporting.run_lock import LOG
from collapipe_flwr.reporting.run_reader import EventTail

_SCREEN = 80  # columns
_PLAIN = 200  # of lines that no terminal folds
_PER_S = 2.0  # redraws of the bars: the processor is for the run
_SILENT_S = 10.0  # without a terminal, at most
_LOOK_S = 1.0
_ENDING = "stopping Flower"


class Screen(ProgressPrinter):
    """The terminal of `collapipe run`: ``quiet`` shows nothing, ``verbose`` the log itself."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        verbose: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(console=terminal(quiet=quiet))
        self.verbose = verbose
        self._now, self._said_s = now, now()
        self._progress: RunProgress | None = None
        if not self._console.is_terminal:
            self._console.width = _PLAIN
        moves = self._console.is_terminal and not self._console.is_dumb_terminal
        self._draws = moves and not verbose and not quiet
        self._bars = Bars()
        self._said = ""

    def say(self, text: str) -> None:
        """Print one line, wrapped on a terminal."""
        self._said_s = self._now()
        super().say(text)

    def remind(self) -> None:
        """Say what goes on, where nothing was said for a while."""
        if self._progress is not None and self._now() - self._said_s >= _SILENT_S:
            self.say(f"    {plain_line(self._progress, self._now())}")

    def _remind(self, over: threading.Event) -> None:
        while not over.wait(_LOOK_S):
            self.remind()

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Show ``text`` while the body runs, until :meth:`show_progress` replaces it."""
        now_s = self._now()
        begun = RunProgress(phase=text, since_s=now_s, at_s=now_s)
        if not self._draws:
            self.say(text)
            self._progress = None if self.verbose else begun
            with run_beside(self._remind, "screen"):
                yield
            self._progress = None
            return
        self._bars.show(begun)
        try:
            with Live(self._bars, console=self._console, transient=True, refresh_per_second=_PER_S):
                yield
        finally:
            self._bars.show(None)

    def show_progress(self, progress: RunProgress) -> None:
        """Show the progress; without a terminal, each phase outside of rounds is printed once."""
        if self._draws:
            self._bars.show(progress)
            return
        self._progress = None if self.verbose else progress
        if not (self.verbose or progress.round_index) and progress.phase != self._said:
            self._said = progress.phase
            self.say(progress.phase)

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """Print the table at the end of a run."""
        folds = self._console.is_terminal and self._console.width < _SCREEN
        width = None if self._console.is_terminal else _PLAIN
        self._console.print(summary_table(summary, folds=folds), width=width)


class Follower:
    """Shows each new note and round of one attempt at a run, exactly once.

    Rounds up to the checkpoint from which it resumes were shown by earlier attempts. A verbose
    screen copies the log instead, which contains the same lines.
    """

    def __init__(self, run_dir: Path, screen: Screen) -> None:
        self._run_dir = run_dir
        self._screen = screen
        found = read_progress(run_dir)  # left by an earlier attempt that was killed
        self._left_s = None if found is None else found.since_s
        self._last = run_directory.newest_checkpoint(run_dir)
        self._stamp = run_directory.summary_stamp(run_dir)
        self._events = EventTail(run_dir)
        summary = run_directory.read_summary(run_dir) or {}
        self._notes = set(summary.get("notes", ()))  # of earlier attempts
        self._untrained = bool(self._last)  # resumed: it was shown before
        self._shown: RunProgress | None = None
        log = run_dir / LOG
        self._log_place = log.stat().st_size if log.exists() else 0

    def look(self) -> None:
        """Show what is new."""
        if self._screen.verbose:
            self._pass_on_log()
            return
        if (stamp := run_directory.summary_stamp(self._run_dir)) != self._stamp:
            self._stamp = stamp
            self._show_rounds()
        progress = read_progress(self._run_dir)
        if progress is not None and progress.since_s != self._left_s:  # clocks may be set back
            self._shown = progress
        elif self._shown is not None and self._shown.phase != _ENDING:
            # The ServerApp removes its progress file last; what still runs is Flower.
            self._shown = RunProgress(phase=_ENDING, since_s=time.time())
        if self._shown is not None:
            self._screen.show_progress(self._shown)

    def _show_rounds(self) -> None:
        summary = run_directory.read_summary(self._run_dir) or {}
        self._screen.rounds = summary.get("rounds_asked")
        for note in summary.get("notes", ()):
            if note not in self._notes:
                self._notes.add(note)
                self._screen.say(note)
        if summary.get("untrained") and not self._untrained:
            self._untrained = True
            self._screen.show_untrained(summary["untrained"])
        for event in self._events.read_new():
            if event["round_index"] > self._last:
                self._last = event["round_index"]
                self._screen.show(RoundEvent.of_json(event))

    def _pass_on_log(self) -> None:
        log = self._run_dir / LOG
        if log.exists():
            with log.open("rb") as file:
                file.seek(self._log_place)
                new = file.read()
            self._log_place += len(new)
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()
