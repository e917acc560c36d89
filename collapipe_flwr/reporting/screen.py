"""The terminal of `collapipe run`: phases, rounds and the final summary.

On a terminal the last lines say what happens now (`Bars`); elsewhere each phase is a plain line,
and where a phase takes long, another line says every few seconds how far it is.
The ServerApp is a process without a terminal, so what is shown is read from the run directory.

There is a bar for all clusters together, and one for each. A phase whose progress is unknown has a
clock. If no edge counts micro-batches, the bar of a round on real machines follows the plan's
prediction and says so. No line is wider than the terminal.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from collapipe_flwr.core.processes import run_beside
from collapipe_flwr.reporting import run_directory
from collapipe_flwr.reporting.console import ProgressPrinter, summary_table
from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.output import PlainTable, terminal
from collapipe_flwr.reporting.progress import ClusterProgress, RunProgress, read_progress
from collapipe_flwr.reporting.run_lock import LOG
from collapipe_flwr.reporting.run_reader import EventTail

_SCREEN = 80  # columns
_PLAIN = 200  # of lines that no terminal folds
_PER_S = 2.0  # redraws of the bars: the processor is for the run
_SILENT_S = 10.0  # without a terminal, at most
_LOOK_S = 1.0
_ENDING = "stopping Flower"
_MOST_CLUSTERS = 6  # that have a bar each
_WIDE, _NARROW = 70, 50  # columns of a terminal, from which on there is room for more


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


class Bars:
    """Renders the newest `RunProgress`; a rate counts from when its cluster had done nothing."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._spinner = Spinner("dots")
        self._progress: RunProgress | None = None
        self._begun_s: dict[str, float] = {}  # when a cluster was last seen idle

    def show(self, progress: RunProgress | None) -> None:
        """Render ``progress`` from now on; None renders nothing."""
        before = self._progress
        if progress is None or before is None or progress.since_s != before.since_s:
            self._begun_s = {}
        self._progress = progress
        if progress is not None:
            waiting = (name for name, each in progress.clusters.items() if not _done(each))
            self._begun_s |= dict.fromkeys(waiting, progress.at_s)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        progress, width = self._progress, options.max_width
        if progress is None:
            return
        clusters, title = progress.clusters, progress.phase
        if progress.round_index:
            title = f"round {progress.round_index}/{progress.rounds or '?'} {title}"
        if clusters and all(cluster.of for cluster in clusters.values()):
            grid = _grid(width)
            names = sorted(clusters)
            self._add(grid, title, names, progress, width)
            if 1 < len(names) <= _MOST_CLUSTERS:
                for name in names:
                    self._add(grid, f"  {name}", [name], progress, width)
            yield grid
            return
        predicted_s = max((c.predicted_s or 0.0 for c in clusters.values()), default=0.0)
        passed_s = max(self._now() - progress.since_s, 0.0)
        if predicted_s and not progress.simulated:
            bar = ProgressBar(total=1.0, completed=min(passed_s / predicted_s, 1.0))
            grid = _grid(width)
            grid.add_row(title, bar, f"{_clock(predicted_s - passed_s)} left, as predicted")
            yield grid
            return
        tested = sum(cluster.tested for cluster in clusters.values())
        what = f"{title}, {tested} batches tested" if tested else title
        clock = _clock(passed_s)
        line = PlainTable.grid(padding=(0, 1, 0, 0))
        line.add_column(width=1)
        line.add_column(no_wrap=True, overflow="ellipsis", max_width=width - len(clock) - 4)
        line.add_column(no_wrap=True)
        line.add_row(self._spinner, what, clock)
        yield line

    def _add(
        self, grid: Table, title: str, names: list[str], progress: RunProgress, width: int
    ) -> None:
        clusters = [progress.clusters[name] for name in names]
        done, whole = sum(map(_done, clusters)), sum(c.of for c in clusters)
        cells = []
        if width >= _NARROW:
            steps = sum(_done(c) // c.per_step for c in clusters)
            cells.append(f"{steps}/{sum(c.of // c.per_step for c in clusters)} steps")
        if width >= _WIDE:
            per_s = sum(self._rate(n, progress) * progress.clusters[n].examples for n in names)
            cells.append(f"{per_s:.3g} ex/s" if per_s else "")
        left_s = self._left_s(names, progress)
        cells.append("" if left_s is None else f"{_clock(left_s)} left")
        bar = ProgressBar(total=1.0, completed=min(done / whole, 1.0))
        grid.add_row(title, bar, "  ".join(filter(None, cells)))

    def _rate(self, name: str, progress: RunProgress) -> float:
        """Return the micro-batches per second of a cluster that is working, else 0."""
        done, of = _done(progress.clusters[name]), progress.clusters[name].of
        passed_s = progress.at_s - self._begun_s.get(name, progress.since_s)
        return done / passed_s if passed_s > 0.0 and done < of else 0.0

    def _left_s(self, names: list[str], progress: RunProgress) -> float | None:
        """Estimate the seconds until all end; those that have not begun count at the mean rate."""
        clusters = {name: progress.clusters[name] for name in names}
        left = {name: max(each.of - _done(each), 0) for name, each in clusters.items()}
        rates = {name: rate for name in names if (rate := self._rate(name, progress))}
        if not any(left.values()):
            return 0.0
        if not rates:
            return None
        slowest_s = max(left[name] / rate for name, rate in rates.items())
        waited_s = max(self._now() - progress.at_s, 0.0)
        return max(slowest_s, sum(left.values()) / sum(rates.values())) - waited_s


def plain_line(progress: RunProgress, now_s: float) -> str:
    """Say the progress in words: ``round 3/12 training, 4 of 9 steps, 0:12 so far``."""
    title = progress.phase
    if progress.round_index:
        title = f"round {progress.round_index}/{progress.rounds or '?'} {title}"
    clusters = progress.clusters.values()
    steps = ""
    if clusters and all(cluster.of for cluster in clusters):
        done, whole = (
            sum(count // each.per_step for each, count in zip(clusters, counts, strict=True))
            for counts in (map(_done, clusters), (each.of for each in clusters))
        )
        steps = f", {done} of {whole} steps"
    return f"{title}{steps}, {_clock(now_s - progress.since_s)} so far"


def _done(cluster: ClusterProgress) -> int:
    return cluster.trained or cluster.tested


def _grid(width: int) -> Table:
    grid = PlainTable.grid(padding=(0, 1, 0, 0), expand=False)
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=max(width // 2 - 2, 8))
    grid.add_column(no_wrap=True, width=max(min(width // 4, 30), 6))
    grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def _clock(seconds: float) -> str:
    whole = round(max(seconds, 0.0))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
