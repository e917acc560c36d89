"""What every stage did when, as a Chrome trace: open it in Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from collapipe_flwr.pipeline.meter import Span

_NAMES = {"forward": "F", "backward": "B", "optimizer": "step", "send": "send", "receive": "wait"}


def chrome_trace(process: str, stages: Mapping[str, Sequence[Span]]) -> dict[str, object]:
    """The trace as a JSON value: one row per stage, in the given order, times in microseconds.

    Stages must share a clock: those of one process do, and those of processes on one Linux
    machine (`time.perf_counter` counts from the machine's start).
    """
    starts = [span.start_s for spans in stages.values() for span in spans]
    origin_s = min(starts, default=0.0)
    events: list[dict[str, object]] = [_label("process_name", 0, process)]
    for row, (stage, spans) in enumerate(stages.items()):
        events += [_label("thread_name", row, stage), _order(row)]
        events += [_event(span, row, origin_s) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, process: str, stages: Mapping[str, Sequence[Span]]) -> None:
    """Write `chrome_trace` to a file, which appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(chrome_trace(process, stages)), encoding="utf-8")
    os.replace(part, path)


def _event(span: Span, row: int, origin_s: float) -> dict[str, object]:
    passes = span.work in ("forward", "backward")
    return {
        "ph": "X",
        "name": f"{_NAMES[span.work]}{span.micro_batch}" if passes else _NAMES[span.work],
        "cat": span.work,
        "pid": 0,
        "tid": row,
        "ts": (span.start_s - origin_s) * 1e6,
        "dur": (span.stop_s - span.start_s) * 1e6,
        "args": {"step": span.step, "micro_batch": span.micro_batch},
    }


def _label(kind: str, row: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": row, "args": {"name": name}}


def _order(row: int) -> dict[str, object]:
    return {
        "ph": "M",
        "name": "thread_sort_index",
        "pid": 0,
        "tid": row,
        "args": {"sort_index": row},
    }
