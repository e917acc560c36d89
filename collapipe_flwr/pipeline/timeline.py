"""What every stage did when, as a Chrome trace: open it in Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from collapipe_flwr.core.durable import write_text
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.pipeline.clocks import on_one_clock
from collapipe_flwr.pipeline.meter import Span

_NAMES = {
    "forward": "F",
    "backward": "B",
    "weights": "W",
    "optimizer": "step",
    "send": "send",
    "receive": "wait",
}
Stages = Mapping[str, Sequence[Span]]  # in pipeline order


def chrome_trace(pipelines: Mapping[str, Stages]) -> dict[str, object]:
    """The trace as a JSON value: a process per pipeline, a row per stage, times in microseconds.

    Each pipeline starts at 0, by the clock of its first stage.
    """
    events: list[dict[str, object]] = []
    rows = count()  # threads of different processes must differ too
    for number, (name, stages) in enumerate(pipelines.items()):
        events.append(_label("process_name", number, 0, name))
        aligned = on_one_clock(stages)
        starts = [span.start_s for spans in aligned.values() for span in spans]
        origin_s = min(starts, default=0.0)
        for stage, spans in aligned.items():
            row = next(rows)
            events += [_label("thread_name", number, row, stage), _order(number, row)]
            events += [_event(span, number, row, origin_s) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, pipelines: Mapping[str, Stages]) -> None:
    """Write `chrome_trace` to a file, whole or not at all; raises RunError when it cannot be."""
    try:
        write_text(path, json.dumps(chrome_trace(pipelines)))
    except OSError as error:
        raise RunError(f"the timeline {path} cannot be written ({error}); make room") from error


def _event(span: Span, process: int, row: int, origin_s: float) -> dict[str, object]:
    passes = span.work in ("forward", "backward", "weights")
    return {
        "ph": "X",
        "name": f"{_NAMES[span.work]}{span.micro_batch}" if passes else _NAMES[span.work],
        "cat": span.work,
        "pid": process,
        "tid": row,
        "ts": (span.start_s - origin_s) * 1e6,
        "dur": (span.stop_s - span.start_s) * 1e6,
        "args": {"step": span.step, "micro_batch": span.micro_batch},
    }


def _label(kind: str, process: int, row: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}


def _order(process: int, row: int) -> dict[str, object]:
    return {
        "ph": "M",
        "name": "thread_sort_index",
        "pid": process,
        "tid": row,
        "args": {"sort_index": row},
    }
