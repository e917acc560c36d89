"""What a stage measures: seconds, gradient norms and tensor memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import chain

import torch
from torch import Tensor

from collapipe_flwr.core.links import LinkTraffic

MOST_SPANS = 10_000  # of one stage: a report must fit into a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One timed piece of work of one stage."""

    work: str  # forward, test, backward, weights, optimizer, send, receive
    step: int
    micro_batch: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The first single spans of a session, if it was opened with `keep_spans`."""

    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage over all steps since it was opened, or over several intervals of a round.

    Its passes of `micro_batches` in training took `forward_s` and `backward_s`; what is only
    tested counts for neither. `wait_s` is time spent waiting for a neighbour, to receive or to find
    room to send. `energy_j` is what a sensor of its machine counted meanwhile, None without one.
    `*_up` is the link towards the control unit, `*_down` towards the edge; `sent_beside_bytes` went
    to other replicas of the stage.
    `small_square_norm` and `big_square_norm` are means over the steps of the squared norm of this
    stage's gradients for the first micro-batch alone and for the whole batch; only the first
    replica of a stage has them.
    `peak_tensor_bytes`: see `MemoryMeter`. `spans` are there if they were asked for.

    The sum of two reports keeps the first `MOST_SPANS` spans.
    """

    name: str
    steps: int = 0
    micro_batches: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    wait_s: float = 0.0
    sent_up: LinkTraffic = field(default_factory=LinkTraffic)
    received_up: LinkTraffic = field(default_factory=LinkTraffic)
    sent_down: LinkTraffic = field(default_factory=LinkTraffic)
    received_down: LinkTraffic = field(default_factory=LinkTraffic)
    sent_beside_bytes: int = 0
    peak_tensor_bytes: int = 0
    energy_j: float | None = None
    small_square_norm: float = 0.0
    big_square_norm: float = 0.0
    spans: tuple[Span, ...] = ()

    def __add__(self, later: StageReport) -> StageReport:
        """Join two intervals of the same stage."""
        share = later.steps / max(self.steps + later.steps, 1)
        joint: dict[str, object] = {}
        for name in (f.name for f in fields(self) if f.name != "name"):
            mine, theirs = getattr(self, name), getattr(later, name)
            if name == "peak_tensor_bytes":
                joint[name] = max(mine, theirs)
            elif name.endswith("_square_norm"):
                joint[name] = mine + share * (theirs - mine)
            elif name == "energy_j":
                known = mine is not None and theirs is not None
                joint[name] = mine + theirs if known else None
            elif name == "spans":
                joint[name] = (mine + theirs)[:MOST_SPANS]
            else:
                joint[name] = mine + theirs
        return replace(self, **joint)  # type: ignore[arg-type]


class Recorder:
    """Sums the seconds per kind of work, and keeps the first single spans when asked to.

    Work has ended when `finish` returns, which waits for what was begun on an accelerator.
    """

    def __init__(
        self,
        *,
        keep_spans: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._finish = finish
        self.spans: list[Span] = []
        self._keep = keep_spans
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    @contextmanager
    def span(self, work: str, step: int, micro_batch: int = 0) -> Iterator[None]:
        """Time the body under `work`, also when it raises."""
        start_s = self._clock()
        try:
            yield
            self._finish()
        finally:
            stop_s = self._clock()
            self._seconds[work] = self._seconds.get(work, 0.0) + stop_s - start_s
            self._counts[work] = self._counts.get(work, 0) + 1
            if self._keep and len(self.spans) < MOST_SPANS:
                self.spans.append(
                    Span(
                        work=work,
                        step=step,
                        micro_batch=micro_batch,
                        start_s=start_s,
                        stop_s=stop_s,
                    )
                )

    def seconds(self, work: str) -> float:
        """Total of one kind of work."""
        return self._seconds.get(work, 0.0)

    def count(self, work: str) -> int:
        """How many pieces of one kind of work have ended; may be called from any thread."""
        return self._counts.get(work, 0)


@dataclass(slots=True, kw_only=True)
class GradientNorms:
    """Running means over the steps, for the gradient noise scale; see `StageReport`.

    The first micro-batch of a step counts with the gradient it would have alone: the accumulated
    one carries the factor n_i / N.
    """

    steps: int = 0
    small_square_norm: float = 0.0
    big_square_norm: float = 0.0

    def note_first(self, norm: float, scale: float) -> None:
        """After the first backward of a step: the squared norm, and n_i / N."""
        if scale > 0:
            self.small_square_norm += self._share(self.small_square_norm, norm / scale**2)

    def note_step(self, norm: float) -> None:
        """At the end of a step: the squared norm."""
        self.big_square_norm += self._share(self.big_square_norm, norm)
        self.steps += 1

    def _share(self, mean: float, value: float) -> float:
        return (value - mean) / (self.steps + 1)


def square_norm(tensors: Iterable[Tensor]) -> float:
    """Sum of the squares of all elements; 0 of nothing."""
    found = [t.detach() for t in tensors]
    return float(torch.stack(torch._foreach_norm(found)).square().sum()) if found else 0.0


class MemoryMeter:
    """Measures weights, gradients, optimizer state, and what autograd keeps for the backward.

    The first time that a micro-batch of some shape is computed, hooks see every tensor that
    autograd saves; its storage counts once however many views of it are saved, and parameters do
    not count again. Micro-batches of the same shape are assumed to keep as much, so measuring
    costs nothing later. Temporaries inside an operator and frames queued in a link do not count.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._fixed_bytes = 0
        self._known_fixed: dict[tuple[int, ...], int] = {}
        self._saved_bytes: dict[Hashable, int] = {}  # by kind of forward pass
        self._in_flight: dict[int, int] = {}  # by micro-batch

    def set_fixed(self, *groups: Sequence[Tensor]) -> None:
        """Set what lives apart from micro-batches; measured when the number of tensors changes."""
        kind = tuple(map(len, groups))
        if kind not in self._known_fixed:
            self._known_fixed[kind] = bytes_of(chain.from_iterable(groups))
        self._fixed_bytes = self._known_fixed[kind]
        self._note()

    @contextmanager
    def saving(self, kind: Hashable, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Measure what the body saves for backward, if no body of this kind was measured yet."""
        if kind in self._saved_bytes:
            yield
            return
        with _noticing() as saved:
            yield
        self._saved_bytes[kind] = _apart_from(parameters, saved)

    @contextmanager
    def recomputing(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Measure what the body saves and frees: a block of activation checkpointing."""
        with _noticing() as saved:
            yield
        self._note(_apart_from(parameters, saved))

    def hold(self, micro_batch: int, kind: Hashable, tensors: Iterable[Tensor]) -> None:
        """Count what a micro-batch of this kind saves for backward, or at least these tensors."""
        self._in_flight[micro_batch] = max(self._saved_bytes[kind], bytes_of(tensors))
        self._note()

    def note_rest(self, micro_batch: int, tensors: Iterable[Tensor]) -> None:
        """Note a moment when a micro-batch keeps these instead of its activations."""
        saved_bytes = self._in_flight.get(micro_batch, 0)
        self._note(bytes_of(tensors) - saved_bytes)

    def release(self, micro_batch: int) -> None:
        """Call after the backward pass of a micro-batch."""
        self._in_flight.pop(micro_batch, None)

    def _note(self, passing_bytes: int = 0) -> None:
        alive_bytes = self._fixed_bytes + sum(self._in_flight.values()) + passing_bytes
        self.peak_bytes = max(self.peak_bytes, alive_bytes)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    return sum(_distinct(tensors).values())


@contextmanager
def _noticing() -> Iterator[dict[int, int]]:
    """Storages that autograd saves in the body: bytes by address."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.update(_distinct((tensor,)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, _same):
        yield saved


def _apart_from(parameters: Iterable[Tensor], saved: Mapping[int, int]) -> int:
    own = _distinct(parameters)
    return sum(n for address, n in saved.items() if address not in own)


def _distinct(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by address of the storages behind the tensors."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _same(tensor: Tensor) -> Tensor:
    return tensor
