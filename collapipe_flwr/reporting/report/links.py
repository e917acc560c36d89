"""Bytes and rates of links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from collapipe_flwr.reporting.events import KINDS
from collapipe_flwr.reporting.report import charts
from collapipe_flwr.reporting.report.charts import Chart, Json, Section
from collapipe_flwr.reporting.run_data import MOST_COLUMNS, RunData, stride_of, thin

Hop = Mapping[str, Any]  # as in events, or one direction of it


def links(run: RunData) -> Section:
    """Show bytes by kind and round, and rates by hop over the run."""
    hops = sorted(
        run.links,
        key=lambda hop: -(hop["forward"]["bytes"] + hop["backward"]["bytes"]),
    )
    head = ["hop", "codec", "forward", "backward", "Mbit/s forward", "Mbit/s backward"]
    rows = [_row(hop) for hop in hops]
    table = charts.long_table("Hops", head, rows, "hop", "with fewer bytes in events.jsonl")
    return Section(
        key="links",
        title="Links",
        charts=charts.drop_missing(_bytes(run), _rates(hops)),
        tables=[table] if hops else [],
    )


def _bytes(run: RunData) -> Chart | None:
    count, traces = len(run.rounds), []
    for kind, colour in zip(KINDS, charts.COLOURS, strict=False):
        series = run.bytes[kind]
        if any(series.values):
            x, y = thin(run.rounds, series.pad(count), MOST_COLUMNS)
            name = f"{KINDS[kind]}: {charts.format_size(sum(series.known))}"
            megabytes = [(value or 0) / 1e6 for value in y]
            traces.append(charts.columns(name, x, megabytes, colour, "%{y:.4~g} MB"))
    if not traces:
        return None
    return Chart(
        key="bytes",
        title="MB of a round by kind of link",
        note="Legend: totals of the run."
        + (" Each bar is a mean of several rounds." if stride_of(count, MOST_COLUMNS) > 1 else ""),
        figure=charts.stack(traces),
    )


def _rates(hops: Sequence[Hop]) -> Chart | None:
    rated = [hop for hop in hops if any(hop[way]["bit_per_s"] for way in ("forward", "backward"))]
    if not rated:
        return None
    shown = rated[: charts.MOST_BARS // 2]
    ways = []
    for hop in shown:
        cluster, first, last = _ends(hop)
        ways.append((f"{cluster}: {first} → {last}", hop["forward"]))
        ways.append((f"{cluster}: {last} → {first}", hop["backward"]))
    labels, hover = [name for name, _ in ways], {"hovertemplate": "%{x:.4~g} Mbit/s"}
    traces = [charts.bars("reached", labels, [_mega(way["bit_per_s"]) for _, way in ways], **hover)]
    planned = [_mega(way["planned_bit_per_s"]) for _, way in ways]
    if any(planned):
        traces.append(charts.marks("planned", labels, planned, **hover))
    more = charts.note_left_out(rated, shown, "hop", "more in the table")
    return Chart(
        key="rates",
        title="What links carried while they sent",
        note=f"The hops with most bytes; {more}" if more else "",
        figure=charts.plot_by_row(
            traces,
            "Mbit/s",
            bars=3 * len(shown),
            named=lambda way: "<br>→ ".join(map(charts.label, way.split(" → ", 1))),
            hovermode="y unified",
        ),
    )


def _mega(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e6


def _ends(hop: Hop) -> tuple[str, str, str]:
    """Return the hop's cluster and ends."""
    sender, receiver = (hop[end].rpartition("/")[2] for end in ("sender", "receiver"))
    return hop["cluster"], sender, receiver


def _row(hop: Hop) -> list[str]:
    cluster, sender, receiver = _ends(hop)
    return [
        f"{cluster}: {sender} > {receiver}",
        hop["codec"],
        *(charts.format_size(hop[way]["bytes"]) for way in ("forward", "backward")),
        *(_rate_text(hop[way]) for way in ("forward", "backward")),
    ]


def _rate_text(way: Hop) -> str:
    if way["bit_per_s"] is None:
        return "-"
    text, planned = f"{way['bit_per_s'] / 1e6:.4g}", way["planned_bit_per_s"]
    return text if planned is None else f"{text} of {planned / 1e6:.4g}"


def compare_links(runs: Sequence[RunData]) -> Section:
    """Show the bytes of all rounds by kind, run by run."""
    labels = [run.name for run in runs]
    traces: list[Json] = []
    for kind, colour in zip(KINDS, charts.COLOURS, strict=False):
        totals = [sum(run.bytes[kind].known) / 1e6 for run in runs]
        if any(totals):
            hover = {"hovertemplate": "%{x:.4~g} MB"}
            traces.append(charts.bars(KINDS[kind], labels, totals, colour, **hover))
    if not traces:
        return Section(key="links", title="Links", empty="No run recorded bytes.")
    figure = charts.plot_by_row(traces, "MB", bars=2 * len(runs), barmode="stack")
    chart = Chart(key="bytes", title="MB of all rounds by kind of link", figure=figure)
    return Section(key="links", title="Links", charts=[chart])
