"""Runs side by side: learning curves as a Markdown table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting import figures
from collapipe_flwr.reporting.figures import (
    draw_curves,
    legend_outside,
    new_figure,
    plain_numbers,
    whole_rounds,
    write_picture,
)
from collapipe_flwr.reporting.run_directory import labelled_run, read_events, read_summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BESIDE = 3  # panels


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run under the name that it bears in the comparison."""

    label: str
    summary: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]

    @property
    def metric(self) -> str:
        """Name of the task's metric."""
        return str(self.summary["metric"]["name"])

    @property
    def names(self) -> list[str]:
        """All metrics on unseen examples."""
        return list(next((e["metrics"] for e in self.events if e["metrics"]), {}))

    def points(self, name: str) -> list[float | None]:
        """One metric by round; None where a round was not evaluated."""
        return [event["metrics"].get(name) for event in self.events]

    def untrained(self, name: str) -> float | None:
        """The same before the first round, where it is known: older runs know the task's metric."""
        known: Mapping[str, float | None] = self.summary.get("untrained") or {
            self.metric: self.summary["metric"].get("initial")
        }
        return known.get(name)

    def drawn(self, name: str) -> figures.Curve:
        """The rounds in which it was evaluated; 0 is the untrained model."""
        scores = [self.untrained(name), *self.points(name)]
        known = {i: score for i, score in enumerate(scores) if score is not None}
        return figures.Curve(self.label, list(known), list(known.values()))


def read_curves(sources: Sequence[str]) -> list[Curve]:
    """Curves from ``LABEL=RUN_DIRECTORY``, or run directories under the names of their folders.

    Raises ConfigError where there is no summary.
    """
    runs = [labelled_run(source) for source in sources]
    labels = [label for label, _ in runs]
    return [
        Curve(
            label=str(folder) if labels.count(label) > 1 else label,
            summary=read_summary(folder) or {},
            events=read_events(folder),
        )
        for label, folder in runs
    ]


def metric_names(curves: Sequence[Curve], wanted: Sequence[str] = ()) -> list[str]:
    """Those that are wanted, else all of all runs; raises ConfigError for one that no run has."""
    known = dict.fromkeys(name for curve in curves for name in curve.names)
    missing = set(wanted) - set(known)
    if missing:
        raise ConfigError(f"no run has the metric {min(missing)!r}; known: {', '.join(known)}")
    return list(wanted or known)


def markdown(curves: Sequence[Curve], metrics: Sequence[str] = ()) -> str:
    """Metrics by round (all, or those named), then what each run cost; an empty cell: no number.

    Round 0 is the untrained model. Raises ConfigError for a metric that no run has.
    """
    names = metric_names(curves, metrics)
    columns = [(curve, name) for name in names for curve in curves if name in curve.names]
    head = ["round", *(f"{curve.label}: {name}" for curve, name in columns)]
    points = list(zip_longest(*(curve.points(name) for curve, name in columns)))
    untrained = tuple(curve.untrained(name) for curve, name in columns)
    first = 1 if all(value is None for value in untrained) else 0
    points = points if first else [untrained, *points]
    rows = [
        [str(index), *("" if value is None else f"{value:.4f}" for value in values)]
        for index, values in enumerate(points, start=first)
    ]
    return _table(head, rows) + "\n" + _costs(curves)


def _costs(curves: Sequence[Curve]) -> str:
    lost = [_lost_rounds(curve) for curve in curves]
    ends = [curve.summary.get("status", "") for curve in curves]
    rows = [
        *([["status", *ends]] if set(ends) - {"completed", ""} else []),
        ["largest difference of the loss", *(_farthest(curve, curves[0]) for curve in curves)],
        ["wall-clock seconds", *(f"{curve.summary['wall_s']:.0f}" for curve in curves)],
        *([["rounds without a cluster", *lost]] if any(lost) else []),
        ["Flower MB", *(_megabytes(curve, "flower") for curve in curves)],
        ["device-to-device MB", *(_megabytes(curve, "d2d") for curve in curves)],
        ["device-to-edge MB", *(_megabytes(curve, "d2e") for curve in curves)],
        ["largest device, peak MB", *(_largest_device(curve) for curve in curves)],
    ]
    return _table(["", *(curve.label for curve in curves)], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _farthest(curve: Curve, first: Curve) -> str:
    """How far a curve of the loss is from the first run's at most; empty for that one itself."""
    pairs = zip(curve.points("loss"), first.points("loss"), strict=False)
    gaps = [abs(ours - theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    return f"{max(gaps):.1e}" if gaps and curve is not first else ""


def _lost_rounds(curve: Curve) -> str:
    """How many rounds lost a cluster; empty for a run that lost none."""
    lost = curve.summary.get("lost", {})
    return str(len({index for rounds in lost.values() for index in rounds}) or "")


def _megabytes(curve: Curve, link: str) -> str:
    size = curve.summary["bytes"][link]
    return f"{size / 1e6:.1f}" if size else ""


def _largest_device(curve: Curve) -> str:
    """Peak tensor memory of the device that needed most; empty where devices were not measured."""
    sizes = [
        size
        for role, size in curve.summary["peak_memory_bytes"].items()
        if not role.endswith(("/edge", "/control-unit"))
    ]
    return f"{max(sizes) / 1e6:.1f}" if sizes else ""


def draw(curves: Sequence[Curve], path: Path, metrics: Sequence[str] = ()) -> None:
    """A picture of all metrics, or those named; raises ConfigError as `markdown`, without
    matplotlib, or where it cannot be written.
    """
    names = metric_names(curves, metrics)
    if not names:
        raise ConfigError(f"--plot {path}: no run was evaluated yet, so there is nothing to draw")
    write_picture(drawn(curves, names), path)


def drawn(curves: Sequence[Curve], names: Sequence[str]) -> Figure:
    """A panel for each metric with a curve for each run; round 0 is the untrained model."""
    wide = min(len(names), _MOST_BESIDE)
    rows = -(-len(names) // wide)
    figure = new_figure((2.5 + 4.0 * wide, 0.5 + 3.0 * rows), "")
    panels = list(figure.subplots(rows, wide, squeeze=False).flat)
    for axes, name in zip(panels, names, strict=False):
        axes.set(title=name, yscale="log" if name == "perplexity" else "linear")
        draw_curves(axes, [run.drawn(name) for run in curves])
        plain_numbers(axes)
        whole_rounds(axes)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    legend_outside(figure, panels[0])
    return figure
