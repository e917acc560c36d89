"""Event simulator of one pipeline step: stages and links as resources, micro-batches as jobs.

It knows nothing of closed forms: it plays a schedule in time. It prices 1F1B, for which no closed
form with slow links exists, and checks the GPipe formula. A stage runs its actions in order; a
link carries one payload at a time, first come first served. Half-duplex links serve both
directions with one resource. A stage that hands the gradient of its input on before it computes
those of its weights is busy with them afterwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from collapipe_flwr.core.errors import ScheduleError

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
Action = tuple[int, int]  # (FORWARD | BACKWARD, micro-batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds per micro-batch: ``stage_s[direction][stage]`` and ``hop_s[direction][hop]``.

    ``weights_s[stage]`` is the part of a backward pass that comes after its gradient was handed on;
    where nothing is given all of it comes before.
    """

    stage_s: tuple[tuple[float, ...], tuple[float, ...]]
    hop_s: tuple[tuple[float, ...], tuple[float, ...]]
    half_duplex: bool = False
    weights_s: tuple[float, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages; there is one hop fewer."""
        return len(self.stage_s[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One use of one resource."""

    resource: str  # "stage 2", "hop 1 forward", "hop 1 backward", "hop 1"
    direction: int
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What happened when."""

    makespan_s: float
    spans: tuple[Span, ...]


def stage_order(depth: int, micro_batches: int) -> tuple[Action, ...]:
    """``depth`` forwards to warm up, then one backward and one forward in turn.

    Depth >= ``micro_batches`` is GPipe.
    """
    warm = min(max(depth, 1), micro_batches)
    actions = [(FORWARD, m) for m in range(warm)]
    for m in range(micro_batches):
        actions.append((BACKWARD, m))
        if m + warm < micro_batches:
            actions.append((FORWARD, m + warm))
    return tuple(actions)


def replay(times: StepTimes, depths: Sequence[int], micro_batches: int) -> Trace:
    """Play one step with those warm-up depths per stage; raises ScheduleError on deadlock."""
    if len(depths) != times.stages:
        raise ScheduleError(f"{times.stages} stages need as many depths, got {len(depths)}")
    return _Play(times, [stage_order(d, micro_batches) for d in depths]).run()


@dataclass(slots=True)
class _Resource:
    """Something that does one thing at a time; ``queue`` waits for links only."""

    name: str
    busy: bool = False
    queue: list[tuple[int, int]] = field(default_factory=list)


class _Play:
    """The state of a replay: the next event is always the earliest end of a span."""

    def __init__(self, times: StepTimes, orders: Sequence[Sequence[Action]]) -> None:
        self.times, self.orders = times, orders
        self.last = times.stages - 1
        self.at = [0] * times.stages
        self.stage_busy = [False] * times.stages
        self.arrived: set[tuple[int, int, int]] = set()
        self.links = [self._links(hop) for hop in range(self.last)]
        self.events: list[tuple[float, int, tuple[int, int, int], bool]] = []
        self.spans: list[Span] = []
        self.now, self.serial = 0.0, 0

    def _links(self, hop: int) -> tuple[_Resource, _Resource]:
        if self.times.half_duplex:
            shared = _Resource(f"hop {hop}")
            return shared, shared
        return _Resource(f"hop {hop} forward"), _Resource(f"hop {hop} backward")

    def run(self) -> Trace:
        self.arrived |= {(0, FORWARD, m) for m in range(len(self.orders[0]) // 2)}
        for stage in range(self.times.stages):
            self._start_stage(stage)
        while self.events:
            self.now, _, (place, direction, micro_batch), is_stage = heapq.heappop(self.events)
            if is_stage:
                self._stage_done(place, direction, micro_batch)
            else:
                self._hop_done(place, direction, micro_batch)
        if any(at < len(order) for at, order in zip(self.at, self.orders, strict=True)):
            raise ScheduleError(f"the schedule blocks: stages stopped at actions {self.at}")
        return Trace(makespan_s=self.now, spans=tuple(self.spans))

    def _use(self, name: str, what: tuple[int, int, int], length_s: float, stage: bool) -> None:
        self.serial += 1
        end = self.now + length_s
        heapq.heappush(self.events, (end, self.serial, what, stage))
        span = Span(
            resource=name, direction=what[1], micro_batch=what[2], start_s=self.now, end_s=end
        )
        self.spans.append(span)

    def _start_stage(self, stage: int) -> None:
        if self.stage_busy[stage] or self.at[stage] == len(self.orders[stage]):
            return
        direction, micro_batch = self.orders[stage][self.at[stage]]
        if (stage, direction, micro_batch) not in self.arrived:
            return
        self.stage_busy[stage] = True
        length = self.times.stage_s[direction][stage]
        self._use(f"stage {stage}", (stage, direction, micro_batch), length, True)

    def _stage_done(self, stage: int, direction: int, micro_batch: int) -> None:
        if direction == FORWARD and stage == self.last:
            self.arrived.add((stage, BACKWARD, micro_batch))
        elif direction == FORWARD:
            self._request(stage, direction, micro_batch)
        elif direction == BACKWARD:
            if stage > 0:
                self._request(stage - 1, direction, micro_batch)
            if self.times.weights_s:
                what = (stage, WEIGHTS, micro_batch)
                self._use(f"stage {stage}", what, self.times.weights_s[stage], True)
                return
        self.stage_busy[stage] = False
        self.at[stage] += 1
        self._start_stage(stage)

    def _request(self, hop: int, direction: int, micro_batch: int) -> None:
        link = self.links[hop][direction]
        link.queue.append((direction, micro_batch))
        self._start_hop(hop, direction)

    def _start_hop(self, hop: int, direction: int) -> None:
        link = self.links[hop][direction]
        if link.busy or not link.queue:
            return
        link.busy = True
        heading, micro_batch = link.queue.pop(0)
        length = self.times.hop_s[heading][hop]
        self._use(link.name, (hop, heading, micro_batch), length, False)

    def _hop_done(self, hop: int, direction: int, micro_batch: int) -> None:
        self.links[hop][direction].busy = False
        stage = hop + 1 if direction == FORWARD else hop
        self.arrived.add((stage, direction, micro_batch))
        self._start_stage(stage)
        self._start_hop(hop, direction)
