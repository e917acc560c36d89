"""Energy against budgets, and energy queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan

from collapipe_flwr.reporting.events import KEPT_FROM
from collapipe_flwr.reporting.output import format_count
from collapipe_flwr.reporting.report import charts
from collapipe_flwr.reporting.report.charts import Chart, Section
from collapipe_flwr.reporting.run_data import RunData, thin

_QUEUES = 5  # devices whose queue has a curve of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Mean energy of one device per round."""

    name: str
    mean_j: float
    budget_j: float | None
    predicted_j: float
    queue_j: float | None
    metered: bool

    @property
    def share(self) -> float | None:
        """Share of its budget; None without one."""
        return self.mean_j / self.budget_j if self.budget_j else None

    @property
    def over(self) -> bool:
        """Whether it spent more than its budget."""
        return self.share is not None and self.share > 1


def list_spent(run: RunData) -> list[Spent]:
    """List all devices, the largest share of a budget first."""
    rounds, mean_j = max(len(run.rounds), 1), run.mean_j(run.budget_j)
    found = [
        Spent(
            name=run.role(name),
            mean_j=mean_j[name],
            budget_j=run.budget_j.get(name),
            predicted_j=device.predicted_j / rounds,
            queue_j=device.queue_j.last,
            metered=device.metered,
        )
        for name, device in run.devices.items()
        if name in mean_j
    ]
    return sorted(found, key=lambda each: (-(each.share or 0), -each.mean_j))


def energy(run: RunData) -> Section:
    """Show budgets, queues and a table."""
    devices = list_spent(run)
    if not devices:
        return Section(key="energy", title="Energy", empty="No energy was recorded.")
    head = ["device", "J per round", "predicted", "budget", "share", "queue [J]", "source"]
    rows = [_row(each) for each in devices]
    table = charts.long_table("Devices", head, rows, "device", "more in events.jsonl")
    found = charts.drop_missing(_budgets(devices), _queues(run))
    text = _text(devices, early=run.is_early)
    return Section(key="energy", title="Energy", text=text, charts=found, tables=[table])


def _text(devices: Sequence[Spent], *, early: bool) -> str:
    budgeted = [each for each in devices if each.budget_j]
    over = sum(each.over for each in budgeted)
    if not budgeted:
        return "No device has an energy budget."
    kept = "all keep their budget" if not over else f"{over} spent more than their budget"
    if over and early:
        kept += f" so far: budgets hold from {KEPT_FROM} rounds on, the scheduler pays back"
    metered = sum(each.metered for each in devices)
    source = f"A sensor metered {metered} of {len(devices)}; the rest is modelled from times."
    return f"{format_count(len(budgeted), 'device')} with a budget: {kept}. {source}"


def _budgets(devices: Sequence[Spent]) -> Chart:
    budgeted = [each for each in devices if each.budget_j]
    shown = (budgeted or devices)[: charts.MOST_BARS]
    unit = "% of the budget" if budgeted else "J per round"

    def text(each: Spent) -> str:
        mean, budget = charts.format_number(each.mean_j), charts.format_number(each.budget_j)
        of = f" of {budget} J, {100 * each.share:.0f} %" if each.share is not None else " J"
        return f"{mean}{of}"

    traces = [
        charts.bars(
            name,
            [each.name for each in kept],
            [100 * (each.share or 0) if budgeted else each.mean_j for each in kept],
            colour,
            customdata=[text(each) for each in kept],
            hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        )
        for name, colour, over in (
            ("within budget", charts.FIRST, False),
            ("above budget", charts.WARNING, True),
        )
        if (kept := [each for each in shown if each.over is over])
    ]
    figure = charts.plot_by_row(traces, unit)
    rest = "that used less are not shown"
    order = [charts.escape_name(each.name) for each in shown]
    figure["layout"]["yaxis"] |= {"categoryorder": "array", "categoryarray": order}
    return Chart(
        key="energy",
        title="Mean energy of a round",
        note=charts.note_left_out(budgeted or devices, shown, "device", rest),
        figure=charts.draw_limit(figure) if budgeted else figure,
    )


def _queues(run: RunData) -> Chart | None:
    count = len(run.rounds)
    queues = {run.role(n): d.queue_j.pad(count) for n, d in run.devices.items() if d.queue_j.known}
    if not queues:
        return None
    columns = zip(*queues.values(), strict=True)
    longest = [max((v for v in column if not isnan(v)), default=float("nan")) for column in columns]
    traces = [
        charts.line("longest of all", *thin(run.rounds, longest, of=max), charts.MUTED, width=4)
    ]
    peaks = sorted(queues, key=lambda n: -max(v for v in queues[n] if not isnan(v)))[:_QUEUES]
    traces += [
        charts.line(
            charts.shorten(name), *thin(run.rounds, queues[name], of=max), colour, width=1.5
        )
        for name, colour in zip(peaks, charts.COLOURS, strict=False)
        if any(v > 0 for v in queues[name])
    ]
    return Chart(
        key="queues",
        title="Energy queues in joules",
        note="What a device spent beyond its budgets so far, below 0 where it has saved. While "
        "queues stay bounded, budgets are kept in the long run.",
        figure=charts.plot_by_round(traces, zero=True),
    )


def _row(each: Spent) -> list[str]:
    return [
        each.name,
        charts.format_number(each.mean_j),
        charts.format_number(each.predicted_j),
        charts.format_number(each.budget_j) if each.budget_j else "none",
        f"{100 * each.share:.0f} %{' ▲' if each.over else ''}" if each.share is not None else "-",
        charts.format_number(None if each.queue_j is None else each.queue_j + 0.0, 3),
        "metered" if each.metered else "modelled",
    ]


def compare_energy(runs: Sequence[RunData]) -> Section:
    """Show the joules of all devices together in a round, run by run."""
    found = {run.name: list_spent(run) for run in runs}
    totals = {
        name: sum(each.mean_j for each in devices) if devices else None
        for name, devices in found.items()
    }
    if not any(totals.values()):
        return Section(key="energy", title="Energy", empty="No run recorded energy.")
    worst = {
        name: max((100 * each.share for each in devices if each.share is not None), default=None)
        for name, devices in found.items()
    }
    title = "Mean energy of a round, all devices"
    total = charts.plot_per_run("energy", title, "energy", totals, "J")
    share = charts.plot_per_run("worst", "Worst device, in % of its budget", "worst", worst, "%")
    limit = replace(share, figure=charts.draw_limit(share.figure or {}))
    return Section(key="energy", title="Energy", charts=[total, limit])
