"""Runs side by side: learning curves as a Markdown table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting import figures
from collapipe_flwr.reporting.report.learning import identical_text, points_of
from collapipe_flwr.reporting.run_data import RunData, read_run
from collapipe_flwr.reporting.run_directory import find_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BESIDE = 3  # panels
# Costs that are left out where all runs have one of these values.
_USUAL = {
    "status": {"completed", ""},
    "rounds without a cluster": {""},
    "largest difference of the loss": {""},
}


def read_runs(sources: Sequence[str]) -> list[RunData]:
    """Read the runs of ``sources``, see `find_run`; raises ConfigError where one has no summary."""
    runs = [find_run(source) for source in sources]
    labels = [label for label, _ in runs]
    return [
        read_run(folder, str(folder) if labels.count(label) > 1 else label)
        for label, folder in runs
    ]


def choose_metrics(runs: Sequence[RunData], wanted: Sequence[str] = ()) -> list[str]:
    """Return the wanted metrics, or all; raises ConfigError for one that no run has."""
    known = dict.fromkeys(name for run in runs for name in run.metrics)
    missing = set(wanted) - set(known)
    if missing:
        raise ConfigError(f"no run has the metric {min(missing)!r}; known: {', '.join(known)}")
    return list(wanted or known)


def render_markdown(runs: Sequence[RunData], metrics: Sequence[str] = ()) -> str:
    """Render metrics by round (all, or those named) and costs as tables; unknown cells are empty.

    Round 0 is the untrained model. Raises ConfigError for a metric that no run has.
    """
    names = choose_metrics(runs, metrics)
    columns = [(run, name) for name in names for run in runs if name in run.metrics]
    head = ["round", *(f"{run.name}: {name}" for run, name in columns)]
    points = list(zip_longest(*(points_of(run, name) for run, name in columns)))
    untrained = tuple(run.untrained.get(name) for run, name in columns)
    first = 1 if all(value is None for value in untrained) else 0
    points = points if first else [untrained, *points]
    rows = [
        [str(index), *("" if value is None else f"{value:.4f}" for value in values)]
        for index, values in enumerate(points, start=first)
    ]
    same = identical_text(runs, names)
    curves = _table(head, rows) if columns else "No run was evaluated yet.\n"
    return "\n".join((curves, _costs(runs), *([f"{same}\n"] if same else [])))


def _costs(runs: Sequence[RunData]) -> str:
    columns = [_column(run, runs[0]) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    shown = [row for row in rows if not set(row[1:]) <= _USUAL.get(row[0], set())]
    return _table(["", *(run.name for run in runs)], shown)


def _column(run: RunData, first: RunData) -> dict[str, str]:
    """Return the costs of a run by name, empty where they are nothing or unknown."""
    summary, sizes = run.summary, run.summary.get("bytes", {})
    lost = {index for rounds in summary.get("lost", {}).values() for index in rounds}
    pairs = zip(points_of(run, "loss"), points_of(first, "loss"), strict=False)
    gaps = [abs(ours - theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    peaks = [
        size
        for role, size in summary.get("peak_memory_bytes", {}).items()
        if not role.endswith(("/edge", "/control-unit"))
    ]
    return {
        "status": summary.get("status", ""),
        "largest difference of the loss": f"{max(gaps):.1e}" if gaps and run is not first else "",
        "wall-clock seconds": f"{summary['wall_s']:.0f}" if "wall_s" in summary else "",
        "rounds without a cluster": str(len(lost) or ""),
        "Flower MB": _megabytes(sizes.get("flower", 0)),
        "device-to-device MB": _megabytes(sizes.get("d2d", 0)),
        "device-to-edge MB": _megabytes(sizes.get("d2e", 0)),
        "largest device, peak MB": _megabytes(max(peaks, default=0)),
    }


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}" if size else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(runs: Sequence[RunData], path: Path, metrics: Sequence[str] = ()) -> None:
    """Draw all metrics, or those named, to a file.

    Raises ConfigError as `render_markdown`, without matplotlib, or where it cannot be written.
    """
    names = choose_metrics(runs, metrics)
    if not names:
        raise ConfigError(f"--plot {path}: no run was evaluated yet, so there is nothing to draw")
    figures.write_picture(draw_panels(runs, names), path)


def draw_panels(runs: Sequence[RunData], names: Sequence[str]) -> Figure:
    """Draw a panel per metric with a curve per run; round 0 is the untrained model."""
    wide = min(len(names), _MOST_BESIDE)
    rows = -(-len(names) // wide)
    figure = figures.new_figure((2.5 + 4.0 * wide, 0.5 + 3.0 * rows), "")
    panels = list(figure.subplots(rows, wide, squeeze=False).flat)
    for axes, name in zip(panels, names, strict=False):
        axes.set(title=name, yscale="log" if name == "perplexity" else "linear")
        scores = [(run.name, [run.untrained.get(name), *points_of(run, name)]) for run in runs]
        known = [(run, {i: v for i, v in enumerate(y) if v is not None}) for run, y in scores]
        figures.draw_curves(
            axes, [figures.Curve(run, list(y), list(y.values())) for run, y in known]
        )
        figures.write_plain_numbers(axes)
        figures.label_whole_rounds(axes)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    figures.place_legend_outside(figure, panels[0])
    return figure
