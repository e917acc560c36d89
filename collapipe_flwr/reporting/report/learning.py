"""Losses and metrics by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle
from math import isnan

from collapipe_flwr.reporting.output import format_count
from collapipe_flwr.reporting.report import charts
from collapipe_flwr.reporting.report.charts import Chart, Json, Section
from collapipe_flwr.reporting.run_data import RunData, Series, stride_of, thin

_DASHES = ("solid", "dash", "dot", "dashdot")
_SINGLE = 8  # clusters that have a curve of their own each; more of them are a band


def learning(run: RunData) -> Section:
    """Show losses first, then every metric."""
    names = [name for name in run.metrics | run.clusters_metrics if name != "loss"]
    names.sort(key=lambda name: name != run.metric)
    stride = stride_of(len(run.rounds))
    return Section(
        key="learning",
        title="Learning",
        text=f"Every point is the mean of {stride} rounds." if stride > 1 else "",
        charts=charts.drop_missing(
            _loss(run), *(_metric(run, n) for n in names), _stream(run), _epsilon(run)
        ),
    )


def _loss(run: RunData) -> Chart | None:
    traces = _draw_clusters(run, {n: c.loss for n, c in run.clusters.items()}, "training, ")
    training, on_shares = run.numbers["loss"], run.numbers["clusters_loss"]
    if training.known:
        traces.append(charts.curve("training, all clusters", run.rounds, training, charts.FIRST))
    if "loss" in run.metrics and run.metrics["loss"].known:
        traces.append(_by_server(run, "loss"))
    if on_shares.known:
        traces.append(_by_clusters(run, on_shares))
    return Chart(key="loss", title="Loss", figure=charts.plot_by_round(traces)) if traces else None


def _metric(run: RunData, name: str) -> Chart:
    traces = [_by_server(run, name)] if name in run.metrics else []
    if name in run.clusters_metrics:
        traces.append(_by_clusters(run, run.clusters_metrics[name]))
    figure = charts.plot_by_round(traces, log=name == "perplexity")
    return Chart(key=f"metric-{name}", title=f"{name} on unseen examples", figure=figure)


def _by_server(run: RunData, name: str) -> Json:
    """Draw the server's curve of a metric; at round 0, the score of the untrained model."""
    curve = charts.curve("test, by the server", run.rounds, run.metrics[name], charts.SECOND)
    untrained = run.untrained.get(name)
    if untrained is not None:
        curve |= {"x": [0, *curve["x"]], "y": [untrained, *curve["y"]]}
    return curve


def _by_clusters(run: RunData, series: Series) -> Json:
    return charts.curve("test, by the clusters", run.rounds, series, charts.THIRD, "dot")


def _stream(run: RunData) -> Chart | None:
    series = run.numbers["prequential_loss"]
    if not series.known:
        return None
    curve = charts.curve("new examples", run.rounds, series, charts.FIRST)
    return Chart(
        key="stream",
        title="Loss on new examples of the stream, before training on them",
        figure=charts.plot_by_round([curve]),
    )


def _epsilon(run: RunData) -> Chart | None:
    """Draw what clusters that train privately have spent."""
    traces = _draw_clusters(run, {n: c.epsilon for n, c in run.clusters.items()}, "")
    if not traces:
        return None
    delta = run.config.get("privacy.delta")
    at = "" if delta is None else f" at delta {delta:g}"
    return Chart(
        key="epsilon",
        title=f"Epsilon of a cluster's examples{at}, spent so far",
        figure=charts.plot_by_round(traces, zero=True),
    )


def _draw_clusters(run: RunData, numbers: Mapping[str, Series], what: str) -> list[Json]:
    """Draw a number of each cluster, or the range of all where they are many."""
    count = len(run.rounds)
    series = {name: found.pad(count) for name, found in numbers.items() if found.known}
    if len(series) <= _SINGLE:
        return [
            charts.line(
                f"{what}{charts.shorten(name)}",
                *thin(run.rounds, y),
                charts.MUTED,
                dash=dash,
                width=1.2,
            )
            for (name, y), dash in zip(series.items(), cycle(_DASHES), strict=False)
        ]
    rows = [[v for v in column if not isnan(v)] for column in zip(*series.values(), strict=True)]
    low = [min(row) if row else float("nan") for row in rows]
    high = [max(row) if row else float("nan") for row in rows]
    x, lows = thin(run.rounds, low, of=min)
    _, highs = thin(run.rounds, high, of=max)
    return charts.band(f"{what}range of {format_count(len(series), 'cluster')}", x, lows, highs)


def compare_learning(runs: Sequence[RunData]) -> Section:
    """Show a chart per number with a curve per run; the main metric also over time."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    names.sort(key=lambda name: name != runs[0].metric)
    found = [_compare(runs, f"test {name}", [r.metrics.get(name) for r in runs]) for name in names]
    found.append(_compare(runs, "training loss", [run.numbers["loss"] for run in runs]))
    found.insert(1, _over_time(runs))
    text = identical_text(runs, names)
    return Section(key="learning", title="Learning", text=text, charts=charts.drop_missing(*found))


def identical_text(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Name the runs whose metrics all equal those of the first; empty if there are none."""
    curves = [[points_of(run, name) for name in names] for run in runs]
    pairs = zip(runs[1:], curves[1:], strict=True)
    same = [run.name for run, curve in pairs if curve == curves[0] and any(map(any, curve))]
    words = f"identical to {runs[0].name} in all metrics of all rounds: {', '.join(names)}."
    return f"{', '.join(same)}: {words}" if same else ""


def points_of(run: RunData, name: str) -> list[float | None]:
    """Return one metric by round; None where a round was not evaluated."""
    series = run.metrics.get(name)
    values = [] if series is None else series.pad(len(run.rounds))
    return [None if isnan(value) else value for value in values]


def _compare(runs: Sequence[RunData], name: str, series: Sequence[Series | None]) -> Chart | None:
    traces = [
        charts.curve(run.name, run.rounds, values, "") | run_style(place, len(runs))
        for place, (run, values) in enumerate(zip(runs, series, strict=True))
        if values is not None and values.known
    ]
    if not traces:
        return None
    figure = charts.plot_by_round(traces, log="perplexity" in name)
    key, missing = f"compared-{name.replace(' ', '-')}", charts.note_not_measured(runs, traces)
    return Chart(key=key, title=name, note=missing, figure=figure)


def _over_time(runs: Sequence[RunData]) -> Chart | None:
    """Draw the main metric of the first run over minutes by the clock."""
    name, traces = runs[0].metric, []
    for place, run in enumerate(runs):
        if name in run.metrics:
            minutes = [total / 60 for total in accumulate(run.numbers["wall_s"].known)]
            pairs = zip(minutes, run.metrics[name].pad(len(run.rounds)), strict=False)
            known = [(minute, value) for minute, value in pairs if not isnan(value)]
            known = known[:: stride_of(len(known))]
            x, y = [minute for minute, _ in known], [value for _, value in known]
            traces.append(charts.line(run.name, x, y, "") | run_style(place, len(runs)))
    if not traces:
        return None
    figure = charts.plot_by_round(traces, log=name == "perplexity")
    axis = {"title": {"text": "minutes by the clock"}}
    figure["layout"] |= {"xaxis": axis, "hovermode": "closest"}
    missing = charts.note_not_measured(runs, traces)
    return Chart(key="over-time", title=f"test {name} over time", note=missing, figure=figure)


def run_style(place: int, count: int) -> Json:
    """Return a run's style; earlier curves are wider, so that all which coincide are seen."""
    colour = charts.colour_of(place)
    dash = ("solid", "dash", "dot")[place // len(charts.COLOURS) % 3]
    width = min(2.0 + 1.3 * (count - 1 - place), 9.0)
    return {
        "line": {"color": colour, "dash": dash, "width": width},
        "marker": {"color": colour, "size": width + 3},
    }
