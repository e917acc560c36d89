"""Measured peaks of memory beside planned ones and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collapipe_flwr.reporting.events import describe_share_cap
from collapipe_flwr.reporting.report import charts
from collapipe_flwr.reporting.report.charts import Chart, Section
from collapipe_flwr.reporting.run_data import RunData


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak memory of one member in bytes; 0 and None: unknown."""

    name: str
    measured: int
    planned: int
    allowed: int | None  # what plans may use of it

    @property
    def known(self) -> int:
        """What was measured, or else planned."""
        return self.measured or self.planned

    @property
    def share(self) -> float | None:
        """The share of what is allowed that was measured, or else planned."""
        return self.share_of(self.known)

    def share_of(self, peak: int) -> float | None:
        """Return the share of what is allowed that ``peak`` is; None where one is unknown."""
        return peak / self.allowed if self.allowed and peak else None


def peaks(run: RunData) -> list[Peak]:
    """List all members, the fullest first."""
    planned = {run.role(name): d.planned_bytes for name, d in run.devices.items()}
    allowed = {run.role(name): limit for name, limit in run.memory_limit_bytes.items()}
    measured = run.memory_bytes
    names = dict.fromkeys((*measured, *(n for n, held in planned.items() if held)))
    found = [
        Peak(
            name=name,
            measured=measured.get(name, 0),
            planned=planned.get(name, 0),
            allowed=allowed.get(name),
        )
        for name in names
    ]
    return sorted(found, key=lambda peak: (-(peak.share or 0), -peak.known))


def memory(run: RunData) -> Section:
    """Show the fullest members, and a table of all."""
    found = peaks(run)
    if not found:
        return Section(key="memory", title="Memory", empty="No peak of memory was recorded.")
    text = (
        "Weights, gradients, optimizer state and activations at their peak over all rounds, as "
        "planned and as measured. Allowed is what plans may use of a member."
    )
    if share := run.summary.get("model_share"):
        text += (
            f" The planned peak of every device stays below {100 * share['most']:.3g} % of what "
            "training the whole model takes with the same micro-batches"
            f"{describe_share_cap(share)}."
        )
    head = ["member", "measured peak", "planned peak", "allowed", "measured", "planned"]
    rows = [
        [
            peak.name,
            charts.format_size(peak.measured or None),
            charts.format_size(peak.planned or None),
            charts.format_size(peak.allowed),
            *(
                "-" if share is None else f"{100 * share:.0f} %"
                for share in map(peak.share_of, (peak.measured, peak.planned))
            ),
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
    bounded = [peak for peak in found if peak.allowed]
    shown = (bounded or found)[: charts.MOST_BARS]
    labels = [peak.name for peak in shown]

    def scaled(count: int, peak: Peak) -> float | None:
        if not count:
            return None
        return 100 * count / peak.allowed if peak.allowed else count / 1e6

    def text(peak: Peak) -> str:
        known = {"measured": peak.measured, "planned": peak.planned, "allowed": peak.allowed}
        return ", ".join(f"{name} {charts.format_size(n)}" for name, n in known.items() if n)

    hover: dict[str, Any] = {
        "customdata": [text(peak) for peak in shown],
        "hovertemplate": "%{y}<br>%{customdata}<extra></extra>",
    }
    traces = [
        charts.bars("measured peak", labels, [scaled(p.measured, p) for p in shown], **hover),
        charts.marks("planned peak", labels, [scaled(p.planned, p) for p in shown], **hover),
    ]
    unit = "% of allowed" if bounded else "MB"
    figure = charts.plot_by_row(traces, unit)
    rest = charts.note_left_out(found, shown, "member", "more in the table")
    limit = "The dashed line is what is allowed." if bounded else ""
    return Chart(
        key="memory",
        title="Peak memory by member",
        note=f"{limit} {rest}".strip(),
        figure=charts.draw_limit(figure) if bounded else figure,
    )
