"""Measurements of a stage: seconds, gradient norms and tensor memory; timelines of all stages.

A timeline is a Chrome trace: open it in Perfetto or chrome://tracing. Clocks of machines that
differ are aligned first. A forward pass cannot start before the same one of the stage ahead has
ended, nor a backward pass before that of the stage behind. Where the spans of two neighbours
contradict this, the later stage is shifted so that the shortest gaps both ways are equal (as in
network time protocols). Replicas share no passes with each other: each is compared with the stages
ahead, and a stage behind them with all of them.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from collapipe_flwr.core.durable import write_text
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.core.measurements import MOST_SPANS, WORK_NAMES, Span


class Recorder:
    """Sums the seconds per kind of work, and on request keeps the first single spans.

    Timed work ends when `finish` returns, which waits for an accelerator.
    """

    def __init__(
        self,
        *,
        keep_spans: bool = False,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self.spans: list[Span] = []
        self._finish = finish
        self._keep = keep_spans
        self._seconds = defaultdict[str, float](float)
        self._counts = Counter[str]()

    def record(self, work: str, step: int, micro_batch: int = 0) -> AbstractContextManager[None]:
        """Time the body under `work`, also when it raises."""
        return _Timing(self, work, step, micro_batch)

    def sum_seconds(self, work: str) -> float:
        return self._seconds.get(work, 0.0)

    def count(self, work: str) -> int:
        """Return the number of ended spans of this kind; may be called from any thread."""
        return self._counts.get(work, 0)


class _Timing:
    """One span of a `Recorder`; a class, because a generator costs twice as much."""

    __slots__ = "_micro_batch", "_recorder", "_start_s", "_step", "_work"

    def __init__(self, recorder: Recorder, work: str, step: int, micro_batch: int) -> None:
        self._recorder, self._work = recorder, work
        self._step, self._micro_batch = step, micro_batch

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        recorder, work = self._recorder, self._work
        try:
            if kind is None:
                recorder._finish()
        finally:
            start_s, stop_s = self._start_s, time.perf_counter()
            recorder._seconds[work] += stop_s - start_s
            recorder._counts[work] += 1
            if recorder._keep and len(recorder.spans) < MOST_SPANS:
                place = {"step": self._step, "micro_batch": self._micro_batch}
                recorder.spans.append(Span(work=work, start_s=start_s, stop_s=stop_s, **place))


def sum_squares(tensors: Iterable[Tensor]) -> float:
    """Sum the squares of all elements; 0 of nothing."""
    found = [t.detach() for t in tensors]
    return float(torch.stack(torch._foreach_norm(found)).square().sum()) if found else 0.0


class MemoryMeter:
    """Measures weights, gradients, optimizer state, and tensors saved for the backward pass.

    For the first micro-batch of each shape, hooks see every tensor that autograd saves; its storage
    counts once however many views of it are saved, and parameters do not count again. Others of
    the same shape are assumed to save as much, so that later ones cost nothing to measure.
    Temporaries inside an operator and frames queued in a link do not count.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._fixed_bytes = 0
        self._known_fixed: dict[Hashable, int] = {}
        self._saved_bytes: dict[Hashable, int] = {}  # by kind of forward pass
        self._in_flight: dict[int, int] = {}  # by micro-batch

    def set_fixed(self, kind: Hashable, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Set the tensors besides micro-batches; those of a ``kind`` are measured once."""
        if kind not in self._known_fixed:
            self._known_fixed[kind] = count_bytes(tensors())
        self._fixed_bytes = self._known_fixed[kind]
        self._note()

    @contextmanager
    def measure_saved(
        self, kind: Hashable, parameters: Iterable[Tensor], inputs: Iterable[Tensor | None] = ()
    ) -> Iterator[None]:
        """Measure what the body saves for backward, at least its ``inputs``.

        Not if a body of this kind was measured before.
        """
        if kind in self._saved_bytes:
            yield
            return
        with _notice_saved() as saved:
            yield
        alive_bytes = count_bytes(tensor for tensor in inputs if tensor is not None)
        self._saved_bytes[kind] = max(_exclude(parameters, saved), alive_bytes)

    @contextmanager
    def measure_recomputed(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Measure what the body saves and frees: a block of activation checkpointing."""
        with _notice_saved() as saved:
            yield
        self._note(_exclude(parameters, saved))

    def hold(self, micro_batch: int, kind: Hashable) -> None:
        """Count the tensors that a micro-batch of this kind saves."""
        self._in_flight[micro_batch] = self._saved_bytes[kind]
        self._note()

    def note_rest(self, micro_batch: int, tensors: Iterable[Tensor]) -> None:
        """Note a moment when a micro-batch keeps these instead of its activations."""
        self._note(count_bytes(tensors) - self._in_flight.get(micro_batch, 0))

    def release(self, micro_batch: int) -> None:
        """Stop counting a micro-batch, after its backward pass."""
        self._in_flight.pop(micro_batch, None)

    def _note(self, passing_bytes: int = 0) -> None:
        alive_bytes = self._fixed_bytes + sum(self._in_flight.values()) + passing_bytes
        self.peak_bytes = max(self.peak_bytes, alive_bytes)


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of the storages behind the tensors, each storage once."""
    return sum(_find_storages(tensors).values())


@contextmanager
def _notice_saved() -> Iterator[dict[int, int]]:
    """Yield the storages that autograd saves in the body: bytes by address."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.update(_find_storages((tensor,)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def _exclude(parameters: Iterable[Tensor], saved: Mapping[int, int]) -> int:
    own = _find_storages(parameters)
    return sum(n for address, n in saved.items() if address not in own)


def _find_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return bytes by address of the storages behind the tensors."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


Stages = Mapping[str, Sequence[Span]]  # in pipeline order
Pass = tuple[int, int]  # step, micro-batch


def build_trace(pipelines: Mapping[str, Stages]) -> dict[str, object]:
    """Build the trace as JSON: a process per pipeline, a row per stage, in microseconds.

    Each pipeline starts at 0, by the clock of its first stage.
    """
    events: list[dict[str, object]] = []
    rows = count()  # threads of different processes must differ too
    for number, (name, stages) in enumerate(pipelines.items()):
        events.append(_make_metadata("process_name", number, 0, name=name))
        aligned = align_clocks(stages)
        starts = [span.start_s for spans in aligned.values() for span in spans]
        origin_s = min(starts, default=0.0)
        for stage, spans in aligned.items():
            row = next(rows)
            events.append(_make_metadata("thread_name", number, row, name=stage))
            events.append(_make_metadata("thread_sort_index", number, row, sort_index=row))
            events += [_make_event(span, number, row, origin_s) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, pipelines: Mapping[str, Stages]) -> None:
    """Write `build_trace` to a file, whole or not at all; raises RunError when it cannot be."""
    try:
        write_text(path, json.dumps(build_trace(pipelines)))
    except OSError as error:
        raise RunError(f"the timeline {path} cannot be written ({error}); make room") from error


def _make_event(span: Span, process: int, row: int, origin_s: float) -> dict[str, object]:
    passes = span.work in ("forward", "test", "backward", "weights")
    return {
        "ph": "X",
        "name": f"{WORK_NAMES[span.work]}{span.micro_batch}" if passes else WORK_NAMES[span.work],
        "cat": span.work,
        "pid": process,
        "tid": row,
        "ts": (span.start_s - origin_s) * 1e6,
        "dur": (span.stop_s - span.start_s) * 1e6,
        "args": {"step": span.step, "micro_batch": span.micro_batch},
    }


def _make_metadata(kind: str, process: int, row: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": args}


def align_clocks(stages: Mapping[str, Sequence[Span]]) -> dict[str, tuple[Span, ...]]:
    """Shift the spans of all stages, in pipeline order, to the clock of the first."""
    aligned: dict[str, tuple[Span, ...]] = {}
    forward: dict[Pass, Span] = {}  # of the nearest stage ahead that has the pass
    backward: dict[Pass, Span] = {}
    for name, spans in stages.items():
        down = _find_least_gap_s(forward, _select_passes(spans, "forward"))
        up = _find_least_gap_s(_select_passes(spans, "backward"), backward)
        offset_s = _find_offset_s(down, up)
        aligned[name] = tuple(
            replace(span, start_s=span.start_s + offset_s, stop_s=span.stop_s + offset_s)
            for span in spans
        )
        forward |= _select_passes(aligned[name], "forward")
        backward |= _select_passes(aligned[name], "backward")
    return aligned


def _find_offset_s(down: float | None, up: float | None) -> float:
    """Return seconds to add to the stage behind; 0 where no gap is negative."""
    if down is None or up is None or (down >= 0 and up >= 0):
        return 0.0
    return (up - down) / 2  # then both gaps are (down + up) / 2


def _select_passes(spans: Sequence[Span], work: str) -> dict[Pass, Span]:
    return {(s.step, s.micro_batch): s for s in spans if s.work == work}


def _find_least_gap_s(first: Mapping[Pass, Span], then: Mapping[Pass, Span]) -> float | None:
    """Return the shortest time from a pass's end to the next stage's start; None without any."""
    gaps = [then[key].start_s - first[key].stop_s for key in first.keys() & then.keys()]
    return min(gaps, default=None)
