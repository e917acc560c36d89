"""Peaks of memory beside what was planned and what a device has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collapipe_flwr.reporting.report import charts
from collapipe_flwr.reporting.report.charts import Chart, Section
from collapipe_flwr.reporting.report.run_data import RunData


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak memory of one member in bytes; 0 and None: unknown."""

    name: str
    measured: int
    planned: int
    limit: int | None

    @property
    def most(self) -> int:
        """The larger of what was planned and what was measured."""
        return max(self.measured, self.planned)

    @property
    def share(self) -> float | None:
        """Of the limit; None without one."""
        return self.most / self.limit if self.limit else None


def peaks(run: RunData) -> list[Peak]:
    """All members, the fullest first."""
    planned = {_role(run, name): d.planned_bytes for name, d in run.devices.items()}
    limits = {_role(run, name): limit for name, limit in run.memory_limit_bytes.items()}
    measured = run.summary.get("peak_memory_bytes", {})
    names = dict.fromkeys((*measured, *(n for n, held in planned.items() if held)))
    found = [
        Peak(
            name=name,
            measured=measured.get(name, 0),
            planned=planned.get(name, 0),
            limit=limits.get(name),
        )
        for name in names
    ]
    return sorted(found, key=lambda peak: (-(peak.share or 0), -peak.most))


def _role(run: RunData, name: str) -> str:
    """The key of a member in ``memory_bytes``: a control unit is recorded by its role."""
    if name not in run.control_units:
        return name
    cluster = run.devices[name].cluster if name in run.devices else name.rpartition("/")[0]
    return f"{cluster}/control-unit"


def memory(run: RunData) -> Section:
    """The fullest members, and a table of all."""
    found = peaks(run)
    if not found:
        return Section(key="memory", title="Memory", empty="No peak of memory was recorded.")
    text = "Weights, gradients, optimizer state and activations at their peak over all rounds."
    if share := run.summary.get("model_share"):
        cap = "" if share["cap"] is None else f" (allowed: {100 * share['cap']:.3g} %)"
        text += (
            f" No plan gave a device more than {100 * share['most']:.3g} % of what training the "
            f"whole model takes with the same micro-batches{cap}."
        )
    head = ["member", "measured", "planned", "limit", "share"]
    rows = [
        [
            peak.name,
            charts.size(peak.measured or None),
            charts.size(peak.planned or None),
            charts.size(peak.limit),
            "-" if peak.share is None else f"{100 * peak.share:.0f} %",
        ]
        for peak in found
    ]
    table = charts.long_table("Members", head, rows, "member", "more in summary.json")
    return Section(
        key="memory",
        title="Memory",
        text=text,
        charts=[_chart(found)],
        tables=[table],
    )


def _chart(found: Sequence[Peak]) -> Chart:
    bounded = [peak for peak in found if peak.limit]
    shown = (bounded or found)[: charts.MOST_BARS]
    labels = [peak.name for peak in shown]

    def scaled(count: int, peak: Peak) -> float | None:
        if not count:
            return None
        return 100 * count / peak.limit if peak.limit else count / 1e6

    def text(peak: Peak) -> str:
        known = {"measured": peak.measured, "planned": peak.planned, "limit": peak.limit}
        return ", ".join(f"{name} {charts.size(count)}" for name, count in known.items() if count)

    hover: dict[str, Any] = {
        "customdata": [text(peak) for peak in shown],
        "hovertemplate": "%{y}<br>%{customdata}<extra></extra>",
    }
    traces = [
        charts.bars("measured", labels, [scaled(p.measured, p) for p in shown], **hover),
        charts.marks("planned", labels, [scaled(p.planned, p) for p in shown], **hover),
    ]
    unit = "% of the limit" if bounded else "MB"
    figure = charts.by_row(traces, unit)
    rest = charts.left_out(found, shown, "member", "more in the table")
    limit = "The dashed line is what plans may use of a device." if bounded else ""
    return Chart(
        key="memory",
        title="Peak of memory by member",
        note=f"{limit} {rest}".strip(),
        figure=charts.limited(figure) if bounded else figure,
    )
