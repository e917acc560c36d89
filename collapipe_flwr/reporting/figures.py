"""Plots of a simulation as PNG files; matplotlib is an optional extra and loaded only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting.output import write_picture
from collapipe_flwr.simulation.simulate import PolicyResult, Simulation, TradeoffPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (8.0, 4.5)


def check_plot(folder: Path) -> None:
    """Make the folder; raises ConfigError without matplotlib or where that fails."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib: install it with pip install 'collapipe-flwr[plot]'"
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot {folder}: the folder cannot be made ({error})") from error


def save_figures(
    simulation: Simulation, tradeoff: Sequence[TradeoffPoint], folder: Path
) -> list[Path]:
    """Draw everything for the first seed; returns the files written."""
    ran = [p for p in simulation.policies if p.refusal is None]
    drawn = {"latency": _latency(ran), "queues": _queues(ran), "segments": _segments(ran)}
    if tradeoff:
        drawn["tradeoff"] = _tradeoff(tradeoff)
    paths = []
    for name, figure in drawn.items():
        paths.append(folder / f"{name}.png")
        write_picture(figure, paths[-1])
    return paths


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _latency(ran: Sequence[PolicyResult]) -> Figure:
    figure, axes = _axes("Latency over rounds", "round", "latency of the round [s]")
    for result in ran:
        series = result.scores[0].latency_s
        axes.plot(range(1, len(series) + 1), series, label=result.policy)
    axes.set_yscale("log")
    axes.legend(ncols=2, fontsize="small")
    return figure


def _queues(ran: Sequence[PolicyResult]) -> Figure:
    figure, axes = _axes(
        "Longest energy queue: what stays bounded keeps its budget",
        "round",
        "queue [budgets of a round]",
    )
    for result in ran:
        series = result.scores[0].queue_share
        axes.plot(range(1, len(series) + 1), series, label=result.policy)
    axes.set_yscale("symlog")
    axes.set_ylim(bottom=0)
    axes.legend(ncols=2, fontsize="small")
    return figure


def _tradeoff(points: Sequence[TradeoffPoint]) -> Figure:
    figure, axes = _axes(
        "Trade-off of the penalty weight V", "penalty weight V", "mean latency [s]"
    )
    weights = [p.penalty_weight for p in points]
    axes.plot(weights, [p.latency_mean_s for p in points], "o-", color="C0")
    axes.set_xscale("log")
    axes.yaxis.label.set_color("C0")
    other = axes.twinx()
    other.plot(weights, [p.queue_share_max for p in points], "s--", color="C3")
    other.set_ylabel("longest queue [budgets of a round]", color="C3")
    return figure


def _segments(ran: Sequence[PolicyResult]) -> Figure:
    plans = [(r.policy, r.scores[0].last_plan.clusters[0]) for r in ran]
    figure, axes = _axes(
        f"Segments of cluster {plans[0][1].cluster_id!r} in the last round", "block", ""
    )
    for row, (_, plan) in enumerate(plans):
        _bars(axes, row, plan)
    axes.set_yticks(range(len(plans)), [_label(policy, plan) for policy, plan in plans])
    axes.set_xlim(0, max(plan.segments[-1].stop_block for _, plan in plans))
    axes.invert_yaxis()
    return figure


def _bars(axes: Axes, row: int, plan: ClusterPlan) -> None:
    for segment in plan.segments:
        device = segment.device_id.rpartition("/")[2]
        width = segment.stop_block - segment.first_block
        colour = f"C{sum(map(ord, device)) % 10}"
        axes.barh(row, width, left=segment.first_block, color=colour, edgecolor="white")
        axes.text(segment.first_block + width / 2, row, device, ha="center", va="center")


def _label(policy: str, plan: ClusterPlan) -> str:
    return f"{policy} ({plan.micro_batch_size}x{plan.micro_batches})"
