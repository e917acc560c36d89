"""Which device holds which blocks, over the rounds."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from collapipe_flwr.reporting.report import charts
from collapipe_flwr.reporting.report.charts import Chart, Json, Section, Table
from collapipe_flwr.reporting.run_data import ClusterData, RunData, stride_of

_MOST_COLUMNS = 120  # rounds that a picture has room for
_ROW_PIXELS, _FRAME_PIXELS = 34, 110


def placement(run: RunData) -> Section:
    """Show a chart with a choice of clusters, and a table of their last plans."""
    planned = {name: data for name, data in run.clusters.items() if data.placed}
    note = f"Light: the first of the {run.blocks} blocks, strong: the last; no colour: no block."
    if (stride := stride_of(len(run.rounds), _MOST_COLUMNS)) > 1:
        note += f" Of every {stride} rounds, the first is shown."
    chart = Chart(
        key="placement",
        title="Blocks that each device holds",
        note=note,
        choices={name: draw_blocks(run, name) for name in planned},
    )
    return Section(
        key="placement",
        title="Blocks on devices",
        charts=[chart] if planned else [],
        tables=[_last_plans(planned)] if planned else [],
        empty="No plan: every cluster trained the whole model, or no round has ended.",
    )


def draw_blocks(run: RunData, cluster: str) -> Json:
    """Draw rounds from left to right, a row for each device: the blocks it holds."""
    data = run.clusters[cluster]
    places = range(0, len(run.rounds), stride_of(len(run.rounds), _MOST_COLUMNS))
    names = _members(run, cluster, data)
    held = [{name: (first, stop) for name, first, stop in data.placed.get(p, ())} for p in places]
    rows = [charts.escape_name(name.rpartition("/")[2]) for name in names]
    gap = 2 if len(places) <= 30 else 0
    return {
        "data": [
            {
                "type": "heatmap",
                "x": [run.rounds[place] for place in places],
                "y": rows,
                "z": [[fmean(b) if (b := c.get(name)) else None for c in held] for name in names],
                "text": [[_blocks(column.get(name)) for column in held] for name in names],
                "texttemplate": "%{text}",
                "hovertemplate": "round %{x}<br>%{y}<br>blocks %{text}<extra></extra>",
                "hoverongaps": False,
                "colorscale": "@scale",
                "textfont": {"color": "@text"},
                "zmin": 0,
                "zmax": run.blocks,
                "xgap": gap,
                "ygap": 3,
                "showscale": False,
            }
        ],
        "layout": {
            "height": _FRAME_PIXELS + _ROW_PIXELS * len(names),
            "xaxis": {
                **charts.round_axis([run.rounds[place] for place in places]),
                "showgrid": False,
            },
            "yaxis": {"autorange": "reversed", **charts.row_names(rows), "showgrid": False},
        },
    }


def _members(run: RunData, cluster: str, data: ClusterData) -> list[str]:
    """Return the devices of a cluster, with and without blocks."""
    held = {name for placed in data.placed.values() for name, _, _ in placed}
    idle = {
        name
        for name, device in run.devices.items()
        if device.cluster == cluster and name not in run.control_units and name != f"{cluster}/edge"
    }

    def natural(name: str) -> tuple[int, str]:
        """Sort ``2-board`` before ``10-board``."""
        digits = name.rpartition("/")[2].partition("-")[0]
        return (int(digits) if digits.isdigit() else 0, name)

    return sorted(held | idle, key=natural)


def _blocks(held: tuple[int, int] | None) -> str:
    if held is None:
        return ""
    first, stop = held
    return str(first) if stop == first + 1 else f"{first}-{stop - 1}"


def _last_plans(planned: dict[str, ClusterData]) -> Table:
    rows = []
    for name, data in planned.items():
        plan, placed = data.last_plan, list(data.placed.values())
        batches = f"{plan['micro_batches']} of {plan['micro_batch_size']}"
        codecs = " → ".join(hop["codec"] for hop in plan.get("hops", ())) or "-"
        changes = sum(now != before for before, now in pairwise(placed))
        pipeline = " → ".join(
            f"{device.rpartition('/')[2]}: {_blocks((first, stop))}"
            for device, first, stop in placed[-1]
        ) + (f" → edge {plan['edge']}" if plan.get("edge") else "")
        rows.append([name, pipeline, batches, codecs, str(changes)])
    return Table(
        title="The last plan of each cluster",
        head=["cluster", "pipeline", "micro-batches of examples", "codecs", "changes"],
        rows=rows,
        folded=charts.is_long(rows),
    )
