"""The timeline of one step by stage."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.reporting.report import charts
from collapipe_flwr.reporting.report.charts import Chart, Json, Section

_FILE = re.compile(r"timeline-round(\d+)\.json")
_MOST_PIPELINES = 12
_MOST_SPANS = 3000  # of one picture
_WORK = {
    "forward": ("forward", charts.FIRST),
    "test": ("evaluation", charts.FOURTH),
    "backward": ("backward", charts.SECOND),
    "weights": ("weight gradients", charts.FIFTH),
    "optimizer": ("optimizer", charts.THIRD),
    "send": ("sending", charts.SIXTH),
    "receive": ("waiting", charts.MUTED),
}
_THIN = ("send", "receive")


def steps(run_dir: Path | None) -> Section:
    """Show, per cluster, a step in the middle of the newest round that has a timeline."""
    found = _newest(run_dir)
    title = "Timeline of a step"
    if found is None:
        empty = "Not recorded; a run with train.timeline=true records what each stage does when."
        return Section(key="timeline", title=title, empty=empty)
    index, path = found
    choices, step = {}, 0
    for name, spans in _pipelines(_events(path)).items():
        recorded = sorted({span["args"]["step"] for span in spans})
        step = recorded[len(recorded) // 2]
        choices[name] = _figure([span for span in spans if span["args"]["step"] == step])
    chart = Chart(
        key="timeline",
        title=f"Round {index}, step {step + 1}",
        note=f"The whole round is in {path.name}, which ui.perfetto.dev opens.",
        choices=choices,
    )
    return Section(key="timeline", title=title, charts=[chart] if choices else [])


def _newest(run_dir: Path | None) -> tuple[int, Path] | None:
    if run_dir is None:
        return None
    names = ((_FILE.fullmatch(path.name), path) for path in run_dir.iterdir())
    return max(((int(match[1]), path) for match, path in names if match), default=None)


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error!r}); delete it to go on without it") from error
    return events


def _pipelines(events: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group the spans of the first clusters, each with the name of its stage."""
    clusters: dict[int, str] = {}
    stages: dict[tuple[int, int], str] = {}
    spans: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["name"] == "process_name":
            clusters[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            stages[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            stage = stages.get((event["pid"], event["tid"]), str(event["tid"]))
            spans[clusters.get(event["pid"], str(event["pid"]))].append({**event, "stage": stage})
    return dict(list(spans.items())[:_MOST_PIPELINES])


def _figure(spans: list[dict[str, Any]]) -> Json:
    """Draw stages from top to bottom over the milliseconds since the step began."""
    start = min(span["ts"] for span in spans)
    stages = list(dict.fromkeys(span["stage"] for span in spans))
    names = [stage.rpartition("/")[2] for stage in stages]
    traces = []
    for work, (name, colour) in _WORK.items():
        kept = [span for span in spans if span["cat"] == work][:_MOST_SPANS]
        if kept:
            traces.append(
                charts.bars(
                    name,
                    [names[stages.index(span["stage"])] for span in kept],
                    [span["dur"] / 1000 for span in kept],
                    colour,
                    base=[charts.round_digits((span["ts"] - start) / 1000) for span in kept],
                    width=0.25 if work in _THIN else 0.7,
                    text=["" if work in _THIN else span["name"] for span in kept],
                    textposition="inside",
                    insidetextanchor="middle",
                    textangle=0,
                    constraintext="inside",
                    customdata=[span["name"] for span in kept],
                    hovertemplate="%{customdata}: %{x:.3~g} ms<extra>%{fullData.name}</extra>",
                )
            )
    rows = charts.row_names([charts.escape_name(name) for name in names])
    layout = {
        "barmode": "overlay",
        "uniformtext": {"minsize": 9, "mode": "hide"},
        "height": 120 + 38 * len(names),
        "xaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
        "yaxis": {
            "autorange": "reversed",
            **rows,
            "categoryorder": "array",
            "categoryarray": rows["tickvals"],
        },
    }
    return {"data": traces, "layout": layout}
