"""Runs side by side: learning curves as a Markdown table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from collapipe_flwr.core.errors import ConfigError, extra
from collapipe_flwr.reporting.output import write_picture
from collapipe_flwr.reporting.run_directory import read_events, read_summary


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
        """The same before the first round, where it is known: of the task's metric."""
        value: float | None = self.summary["metric"].get("initial")
        return value if name == self.metric else None


def read_curves(sources: Sequence[str]) -> list[Curve]:
    """Curves from ``LABEL=RUN_DIRECTORY``; raises ConfigError where there is no summary."""
    curves = []
    for source in sources:
        label, equals, folder = source.partition("=")
        summary = read_summary(Path(folder)) if equals else None
        if summary is None:
            raise ConfigError(f"{source!r} is not LABEL=RUN_DIRECTORY with a summary.json inside")
        curves.append(Curve(label=label, summary=summary, events=read_events(Path(folder))))
    return curves


def markdown(curves: Sequence[Curve], metrics: Sequence[str] = ()) -> str:
    """Metrics by round (all, or those named), then what each run cost; an empty cell: no number.

    Round 0 is the untrained model. Raises ConfigError for a metric that no run has.
    """
    names = list(metrics) or list(dict.fromkeys(name for curve in curves for name in curve.names))
    columns = [(curve, name) for name in names for curve in curves if name in curve.names]
    missing = set(names) - {name for _, name in columns}
    if missing:
        raise ConfigError(f"no run has the metric {min(missing)!r}")
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


def draw(curves: Sequence[Curve], path: Path) -> None:
    """A picture of the curves; raises ConfigError without matplotlib, or a place to write it."""
    with extra("plot"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for place, curve in enumerate(curves):
        scores = [curve.untrained(curve.metric), *curve.points(curve.metric)]
        points = [(i, p) for i, p in enumerate(scores) if p is not None]
        wide = 3.0 * (len(curves) - place)  # so that curves which coincide are all seen
        axes.plot(*zip(*points, strict=True), linewidth=wide, alpha=0.8, label=curve.label)
    axes.set_xlabel("round")
    axes.set_ylabel(curves[0].metric)
    if curves[0].metric == "perplexity":
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    write_picture(figure, path)
