"""What every stage did when, as a Chrome trace: open it in Perfetto or chrome://tracing.

Spans of machines whose clocks differ are put on one clock first. A forward pass cannot start before
the same one of the stage ahead has ended, nor a backward pass before that of the stage behind.
Where the spans of two neighbours say otherwise their clocks differ, and the later stage is shifted
so that the shortest gaps both ways are equal (as network time protocols do). Clocks that contradict
nothing are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from collapipe_flwr.core.durable import write_text
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.pipeline.meter import Span

_NAMES = {
    "forward": "F",
    "test": "F",
    "backward": "B",
    "weights": "W",
    "optimizer": "step",
    "send": "send",
    "receive": "wait",
}
Stages = Mapping[str, Sequence[Span]]  # in pipeline order
Pass = tuple[int, int]  # step, micro-batch


def chrome_trace(pipelines: Mapping[str, Stages]) -> dict[str, object]:
    """The trace as a JSON value: a process per pipeline, a row per stage, times in microseconds.

    Each pipeline starts at 0, by the clock of its first stage.
    """
    events: list[dict[str, object]] = []
    rows = count()  # threads of different processes must differ too
    for number, (name, stages) in enumerate(pipelines.items()):
        events.append(_metadata("process_name", number, 0, name=name))
        aligned = on_one_clock(stages)
        starts = [span.start_s for spans in aligned.values() for span in spans]
        origin_s = min(starts, default=0.0)
        for stage, spans in aligned.items():
            row = next(rows)
            events.append(_metadata("thread_name", number, row, name=stage))
            events.append(_metadata("thread_sort_index", number, row, sort_index=row))
            events += [_event(span, number, row, origin_s) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, pipelines: Mapping[str, Stages]) -> None:
    """Write `chrome_trace` to a file, whole or not at all; raises RunError when it cannot be."""
    try:
        write_text(path, json.dumps(chrome_trace(pipelines)))
    except OSError as error:
        raise RunError(f"the timeline {path} cannot be written ({error}); make room") from error


def _event(span: Span, process: int, row: int, origin_s: float) -> dict[str, object]:
    passes = span.work in ("forward", "test", "backward", "weights")
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


def _metadata(kind: str, process: int, row: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": args}


def on_one_clock(stages: Mapping[str, Sequence[Span]]) -> dict[str, tuple[Span, ...]]:
    """The spans of all stages, in pipeline order, by the clock of the first."""
    aligned: dict[str, tuple[Span, ...]] = {}
    before: Sequence[Span] | None = None
    for name, spans in stages.items():
        offset_s = 0.0 if before is None else _offset_s(before, spans)
        before = aligned[name] = tuple(_shifted(span, offset_s) for span in spans)
    return aligned


def _offset_s(ahead: Sequence[Span], behind: Sequence[Span]) -> float:
    """Seconds to add to the stage behind; 0 where nothing says that its clock is wrong."""
    down = _least_gap_s(_passes(ahead, "forward"), _passes(behind, "forward"))
    up = _least_gap_s(_passes(behind, "backward"), _passes(ahead, "backward"))
    if down is None or up is None or (down >= 0 and up >= 0):
        return 0.0
    return (up - down) / 2


def _passes(spans: Sequence[Span], work: str) -> dict[Pass, Span]:
    return {(s.step, s.micro_batch): s for s in spans if s.work == work}


def _least_gap_s(first: Mapping[Pass, Span], then: Mapping[Pass, Span]) -> float | None:
    """Shortest time from the end of a pass to the start of the next stage's; None without any."""
    gaps = [then[key].start_s - first[key].stop_s for key in first.keys() & then.keys()]
    return min(gaps, default=None)


def _shifted(span: Span, offset_s: float) -> Span:
    if offset_s == 0.0:
        return span
    return replace(span, start_s=span.start_s + offset_s, stop_s=span.stop_s + offset_s)
