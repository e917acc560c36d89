"""Predicted and real seconds of rounds and stages."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from statistics import median

from collapipe_flwr.reporting.report import charts
from collapipe_flwr.reporting.report.charts import Chart, Section, Table
from collapipe_flwr.reporting.report.learning import run_style
from collapipe_flwr.reporting.run_data import MOST_COLUMNS, ClusterData, RunData, stride_of, thin

_MOST_PAIRS = 1500  # points of the scatter


def times(run: RunData) -> Section:
    """Show rounds as planned and as they were."""
    text = (
        "Seconds measured by the clocks of the machines beside those that the plan predicted."
        if run.measured
        else "The devices are simulated: their seconds are those of the boards that they stand "
        "for, not of the machine that ran the simulation."
    )
    return Section(
        key="time",
        title="Time of a round",
        text=text if run.numbers["latency_s"].known else "",
        charts=charts.drop_missing(_rounds(run), _pairs(run), _stages(run), _wall(run)),
        tables=_clusters(run),
    )


def name_kind(run: RunData) -> str:
    """Say what real seconds are, beside predicted ones: "measured" or "simulated"."""
    return "measured" if run.measured else "simulated"


def _rounds(run: RunData) -> Chart | None:
    predicted, latency = run.numbers["predicted_latency_s"], run.numbers["latency_s"]
    if not (predicted.known or latency.known):
        return None
    traces = [
        charts.curve(name_kind(run), run.rounds, latency, charts.FIRST),
        charts.curve("predicted", run.rounds, predicted, charts.SECOND, "dash"),
    ]
    return Chart(
        key="round-time",
        title="Seconds of a round, from sending weights out to having them back",
        figure=charts.plot_by_round(traces, zero=True),
    )


def _pairs(run: RunData) -> Chart | None:
    """Draw each cluster's rounds, predicted against real; None if all are equal."""
    pairs = [
        (name, run.rounds[place], expected, found)
        for name, data in run.clusters.items()
        for place, (expected, found) in enumerate(
            zip(data.predicted_s.values, data.latency_s.values, strict=True)
        )
        if expected > 0 and found > 0
    ]
    if all(abs(expected / found - 1) < 1e-6 for _, _, expected, found in pairs):
        return None
    kept = pairs[:: stride_of(len(pairs), _MOST_PAIRS)]
    ends = [min(min(p[2:]) for p in kept), max(max(p[2:]) for p in kept)]
    share = "" if len(kept) == len(pairs) else f" {len(kept):,} of {len(pairs):,} are shown."
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": "a cluster's round",
        "x": [charts.round_digits(p[2]) for p in kept],
        "y": [charts.round_digits(p[3]) for p in kept],
        "text": [f"{charts.escape_name(name)}, round {index}" for name, index, _, _ in kept],
        "hovertemplate": "%{text}<br>predicted %{x:.3~g} s<br>" + name_kind(run) + " %{y:.3~g} s"
        "<extra></extra>",
        "marker": {"color": charts.FIRST, "size": 6, "opacity": 0.6},
    }
    same = {
        "type": "scatter",
        "mode": "lines",
        "name": "equal",
        "x": ends,
        "y": ends,
        "hoverinfo": "skip",
        "line": {"color": charts.MUTED, "dash": "dot", "width": 1.5},
    }
    axes = {
        "xaxis": {"title": {"text": "predicted [s]"}},
        "yaxis": {"title": {"text": f"{name_kind(run)} [s]"}},
    }
    return Chart(
        key="prediction",
        title="Predicted against " + name_kind(run) + " seconds",
        note=f"One point for each cluster and round; on the line, the two are equal.{share}",
        figure={"data": [same, points], "layout": {**axes, "hovermode": "closest"}},
    )


def _stages(run: RunData) -> Chart | None:
    """Draw the devices that compute longest, which set the pace."""
    timed = [
        (
            device.measured_s / device.stage_rounds,
            device.predicted_s / device.stage_rounds,
            run.role(name),
        )
        for name, device in run.devices.items()
        if device.stage_rounds and device.measured_s > 0
    ]
    if not timed:
        return None
    shown = sorted(timed, reverse=True)[: charts.MOST_BARS]
    labels = [name for _, _, name in shown]
    found = [1000 * each for each, _, _ in shown]
    expected = [1000 * each for _, each, _ in shown]
    traces = [
        charts.bars(name_kind(run), labels, found, hovertemplate="%{x:.3~g} ms"),
        charts.marks("predicted", labels, expected, hovertemplate="%{x:.3~g} ms"),
    ]
    more = charts.note_left_out(timed, shown, "member", "that compute less are not shown")
    return Chart(
        key="stages",
        title="Computing time of a micro-batch, forward and backward",
        note=f"Means over the rounds. {more}".strip(),
        figure=charts.plot_by_row(traces, "ms", hovermode="y unified"),
    )


def _wall(run: RunData) -> Chart | None:
    wall, evaluation = run.numbers["wall_s"], run.numbers["evaluation_s"]
    if not wall.known:
        return None
    count = len(run.rounds)
    x, total = thin(run.rounds, wall.pad(count), MOST_COLUMNS)
    known = [0 if isnan(v) else v for v in evaluation.pad(count)]
    _, tested = thin(run.rounds, known, MOST_COLUMNS)
    trained = [None if t is None else t - (e or 0) for t, e in zip(total, tested, strict=True)]
    hover = "%{y:.3~g} s"
    traces = [
        charts.columns("training", x, trained, charts.FIRST, hover),
        charts.columns("evaluation by the server", x, tested, charts.THIRD, hover),
    ]
    title = "Wall-clock seconds of a round on the server"
    return Chart(key="wall", title=title, figure=charts.stack(traces))


def _clusters(run: RunData) -> list[Table]:
    rows = [_row(name, data) for name, data in run.clusters.items() if data.latency_s.known]
    if not rows:
        return []
    return [
        Table(
            title="Clusters",
            head=["cluster", "rounds", "predicted", name_kind(run), "median error"],
            rows=rows,
            note="Seconds are means over the rounds.",
            folded=charts.is_long(rows),
        )
    ]


def _row(name: str, data: ClusterData) -> list[str]:
    pairs = zip(data.predicted_s.values, data.latency_s.values, strict=True)
    errors = [abs(e / f - 1) for e, f in pairs if e > 0 and f > 0]
    return [
        name,
        str(len(data.latency_s.known)),
        charts.format_seconds(data.predicted_s.mean),
        charts.format_seconds(data.latency_s.mean),
        f"{100 * median(errors):.1f} %" if errors else "-",
    ]


def compare_times(runs: Sequence[RunData]) -> Section:
    """Show the seconds of rounds of all runs, and their wall-clock time."""
    traces = [
        charts.curve(run.name, run.rounds, run.numbers["latency_s"], "")
        | run_style(place, len(runs))
        for place, run in enumerate(runs)
        if run.numbers["latency_s"].known
    ]
    clocks = {run.name: run.numbers["wall_s"].known for run in runs}
    walls = {name: sum(known) if known else None for name, known in clocks.items()}
    wall = charts.plot_per_run("wall", "Wall-clock seconds of all rounds", "wall clock", walls, "s")
    if not traces:
        return Section(key="time", title="Time of a round", charts=[wall])
    figure = charts.plot_by_round(traces, zero=True)
    missing = charts.note_not_measured(runs, traces)
    rounds = Chart(key="round-time", title="Seconds of a round", note=missing, figure=figure)
    return Section(key="time", title="Time of a round", charts=[rounds, wall])
