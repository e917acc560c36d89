"""What went wrong and how the run went on."""

from __future__ import annotations

from collections import Counter

from collapipe_flwr.reporting.report import charts
from collapipe_flwr.reporting.report.charts import Chart, Section, Table
from collapipe_flwr.reporting.report.run_data import RunData
from collapipe_flwr.reporting.report.series import MOST_COLUMNS, stride_of, thinned

KINDS = {
    "lost": "cluster lost",
    "recovered": "device lost, replayed",
    "quarantined": "device quarantined",
    "retry": "round repeated",
    "late": "late update",
    "remark": "remark",
    "failure": "failure",
}


def incidents(run: RunData) -> Section:
    """Counts by round and kind, and the newest sentences."""
    return Section(
        key="incidents",
        title="Incidents",
        text=counts_text(run),
        charts=[_chart(run)] if run.incidents else [],
        tables=[_table(run)] if run.incidents else [],
        empty="None: every cluster replied in every round.",
    )


def counts_text(run: RunData) -> str:
    """``cluster lost: 2, late update: 1``."""
    counts = Counter(incident.kind for incident in run.incidents)
    return ", ".join(f"{KINDS.get(kind, kind)}: {count}" for kind, count in counts.most_common())


def _chart(run: RunData) -> Chart:
    counts = Counter((incident.kind, incident.round_index) for incident in run.incidents)
    kinds = [kind for kind in KINDS if any(kind == found for found, _ in counts)]
    kinds += sorted({kind for kind, _ in counts} - set(kinds))
    traces = []
    for place, kind in enumerate(kinds):
        values = [float(counts[kind, index]) for index in run.rounds]
        x, y = thinned(run.rounds, values, MOST_COLUMNS, of=sum)
        traces.append(charts.columns(KINDS.get(kind, kind), x, y, charts.colour_of(place)))
    figure = charts.stacked(traces)
    figure["layout"]["xaxis"] |= {"range": [run.rounds[0] - 0.6, run.rounds[-1] + 0.6]}
    if max(Counter(each.round_index for each in run.incidents).values()) <= 6:
        figure["layout"]["yaxis"] |= {"dtick": 1}
    stride = stride_of(len(run.rounds), MOST_COLUMNS)
    note = f"Each bar counts {stride} rounds." if stride > 1 else ""
    return Chart(key="incidents", title="Incidents by round", note=note, figure=figure)


def _table(run: RunData) -> Table:
    head = ["round", "kind", "cluster", "what"]
    rows = [
        [str(each.round_index), KINDS.get(each.kind, each.kind), each.cluster, each.text]
        for each in reversed(run.incidents)
    ]
    rest = "before these in events.jsonl"
    return charts.long_table("What happened, newest first", head, rows, "incident", rest)
