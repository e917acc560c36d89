"""Progress bars of a run: one for all clusters together, and one for each.

A phase whose progress is unknown has a clock. If no edge counts micro-batches, the bar of a round
on real machines follows the plan's prediction and says so. No line is wider than the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from collapipe_flwr.reporting.output import PlainTable
from collapipe_flwr.reporting.progress import ClusterProgress, RunProgress

_MOST_CLUSTERS = 6  # that have a bar each
_WIDE, _NARROW = 70, 50  # columns of a terminal, from which on there is room for more


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
