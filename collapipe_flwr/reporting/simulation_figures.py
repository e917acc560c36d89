"""The pictures of ``collapipe simulate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from collapipe_flwr.core.domain import Segment
from collapipe_flwr.reporting import figures
from collapipe_flwr.simulation.score import Score
from collapipe_flwr.simulation.setting import PRESETS, Setting
from collapipe_flwr.simulation.simulate import PolicyResult, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES = (9.0, 5.0)
_MOST_NAMED = 6  # seeds
_BELOW_0 = 0.1  # so that a curve at 0 is not cut
_LIGHT = (*figures.COLOURS[3:6], figures.COLOURS[8])  # black is read better on them than white


def save_figures(
    simulation: Simulation, tradeoff: Mapping[float, Score], folder: Path
) -> list[Path]:
    """Draw everything; returns the files written."""
    paths = []
    for name, figure in draw_figures(simulation, tradeoff).items():
        paths.append(folder / f"{name}.png")
        figures.write_picture(figure, paths[-1])
    return paths


def draw_figures(simulation: Simulation, tradeoff: Mapping[float, Score]) -> dict[str, Figure]:
    """Draw all pictures, by the names of their files."""
    setting = simulation.setting
    ran = [p for p in simulation.policies if p.refusal is None]
    where, first = describe(setting), f"seed {setting.seeds[0]}"
    found = {
        "latency": _by_round(
            {p.policy: _join_seeds(median, [s.latency_s for s in p.scores]) for p in ran},
            "Latency over rounds",
            "latency of the round [s]",
            "log",
            f"{where}\n{_seeds(setting, 'median over ')}",
        ),
        "queues": _by_round(
            {p.policy: _join_seeds(max, [s.queue_share for s in p.scores]) for p in ran},
            "Longest energy queue: what stays bounded keeps its budget",
            "queue [budgets of a round]",
            "symlog",
            f"{where}\n{_seeds(setting, 'worst of ')}",
        ),
        "segments": _segments(ran, f"{where}\n{first}"),
    }
    if tradeoff:
        found["tradeoff"] = _weights(tradeoff, f"{where}\n{first}")
    return found


def describe(setting: Setting) -> str:
    """Say in one line what was simulated: the preset and the setting."""
    parts = []
    if setting.preset:
        base = PRESETS[setting.preset]
        same = replace(
            setting, preset="", seeds=base.seeds, rounds=base.rounds, policies=base.policies
        )
        parts.append(f"preset {setting.preset}" + ("" if same == base else ", changed"))
    fleet = f"{len(setting.fleet)} clusters of your own"
    drawn = f"{setting.clusters} clusters of {setting.devices} devices"
    parts.append(fleet if setting.fleet else drawn)
    parts += [f"{setting.radio}, {setting.channel}", f"energy budget {setting.budget}"]
    return "; ".join(parts)


def _seeds(setting: Setting, how: str) -> str:
    seeds = setting.seeds
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if len(seeds) <= _MOST_NAMED:
        return f"{how}seeds {', '.join(map(str, seeds))}"
    return f"{how}{len(seeds)} seeds from {min(seeds)} to {max(seeds)}"


def _join_seeds(
    join: Callable[[Sequence[float]], float], series: Sequence[Sequence[float]]
) -> list[float]:
    return [join(values) for values in zip(*series, strict=True)]


def _by_round(
    series: Mapping[str, Sequence[float]], title: str, label: str, scale: str, caption: str
) -> Figure:
    """Draw a curve for each policy."""
    figure = figures.new_figure(_INCHES, title, caption)
    axes = figure.add_subplot(ylabel=label, yscale=scale)
    curves = [figures.Curve(name, range(1, len(y) + 1), y) for name, y in series.items()]
    figures.draw_curves(axes, curves)
    figures.write_plain_numbers(axes)
    if scale == "symlog":
        axes.set_ylim(bottom=-_BELOW_0)
    figures.label_whole_rounds(axes)
    figures.place_legend_outside(figure, axes)
    return figure


def _weights(scores: Mapping[float, Score], caption: str) -> Figure:
    """Draw two panels, as two scales on one would differ by colour only."""
    figure = figures.new_figure(_INCHES, "Trade-off of the penalty weight V", caption)
    above, below = figure.subplots(2, sharex=True)
    for axes, label, values in (
        (above, "mean latency [s]", [s.latency_mean_s for s in scores.values()]),
        (
            below,
            "longest queue\n[budgets of a round]",
            [max(s.queue_share) for s in scores.values()],
        ),
    ):
        figures.draw_curves(axes, [figures.Curve(label, list(scores), values)])
        axes.set(xscale="log", ylabel=label)
        axes.grid(alpha=0.3)
    below.set_xlabel("penalty weight V")
    return figure


def _segments(ran: Sequence[PolicyResult], caption: str) -> Figure:
    """Draw the device of each block, by policy; devices are numbered."""
    from matplotlib.patches import Patch

    plans = [(r.policy, r.scores[0].last_plan.clusters[0]) for r in ran]
    cluster_id = plans[0][1].cluster_id
    figure = figures.new_figure(
        (_INCHES[0], 2.0 + 0.4 * len(plans)),
        f"Segments of {cluster_id} in round {ran[0].scores[0].last_plan.round_index}",
        caption,
    )
    axes = figure.add_subplot(xlabel="block")
    devices = sorted({d for _, p in plans for s in p.segments for d in s.device_ids})
    numbers = {device: number for number, device in enumerate(devices, start=1)}
    for row, (_, plan) in enumerate(plans):
        for segment in plan.segments:
            _draw_segment(axes, row, segment, numbers)
    cuts = [f"{policy} ({p.micro_batch_size}x{p.micro_batches})" for policy, p in plans]
    axes.set_yticks(range(len(plans)), cuts)
    blocks = max(plan.segments[-1].stop_block for _, plan in plans)
    axes.set(xlim=(0, blocks), xticks=range(0, blocks + 1, max(1, blocks // 12)))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    handles = [
        Patch(facecolor=figures.colour(number - 1), label=f"{number}: {device.rpartition('/')[2]}")
        for device, number in numbers.items()
    ]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small", frameon=False)
    return figure


def _draw_segment(axes: Axes, row: int, segment: Segment, numbers: dict[str, int]) -> None:
    holders = [numbers[device] for device in segment.device_ids]
    left, width = segment.first_block, segment.stop_block - segment.first_block
    axes.barh(
        row, width, left=left, color=figures.colour(holders[0] - 1), edgecolor="white", linewidth=2
    )
    axes.text(
        left + width / 2,
        row,
        "+".join(map(str, holders)),
        ha="center",
        va="center",
        color="black" if figures.colour(holders[0] - 1) in _LIGHT else "white",
    )
