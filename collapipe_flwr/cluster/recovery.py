"""A round that outlives the loss of devices and a restart of the edge.

The round runs in legs. Before each one the control unit holds the state of every segment, and the
edge a snapshot of its decoder after the same step. When anything breaks, the leg is void on all
sides at once: the edge goes back to its snapshot, the segments are placed anew by a plan for the
devices that still answer, and the same batches are played again with the same seeds. So no step is
applied twice or half, and the weights are those of an undisturbed run on the new plan.

With ``snapshot_every`` 0 the round is one leg: its first state came with the order and costs
nothing, and at most one round is replayed. With S > 0 a loss costs at most S steps, and every S
steps the segments' weights and optimiser slots (for AdamW three times the weights) travel to the
control unit and back, while the edge copies its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Protocol, TypeVar

from collapipe_flwr.cluster.fleet import Fleet
from collapipe_flwr.cluster.guessing import Guessing, Tested
from collapipe_flwr.cluster.leg import Leg, run_leg, run_test
from collapipe_flwr.cluster.order import RoundOrder
from collapipe_flwr.core.domain import ClusterProfile, ModelProfile
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.roles import MicroBatch
from collapipe_flwr.scheduler.replan import ReplanInput, replan

log = logging.getLogger(__name__)
Batch = Sequence[MicroBatch]
Result = TypeVar("Result")
MOST_REPLAYS = 2  # of one leg without losing a device: whatever breaks it then will not mend


class Replica(Protocol):
    """The cluster's decoder, as far as a replay concerns it; both calls may be repeated."""

    def snapshot(self, step: int) -> None:
        """Keep the state after ``step`` steps; raises LinkError."""
        ...

    def rollback(self, step: int) -> None:
        """Go back to the snapshot after ``step`` steps; raises LinkError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a cluster needs to go on without some of its devices."""

    profile: ClusterProfile
    model: Callable[[], ModelProfile]  # asked only when a device is lost
    edge: Replica
    snapshot_every: int = 0  # steps; 0: only the round's first state


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that broke a leg. Times are ``time.monotonic``.

    A leg that broke several times has as many incidents, which the play that went through ended
    together.
    """

    reason: str
    lost: tuple[str, ...]  # device ids
    from_step: int  # replayed from here
    noticed_s: float
    resumed_s: float  # when the first step of the play that went through was done

    def __str__(self) -> str:
        lost = f"lost {', '.join(self.lost)}" if self.lost else "lost no device"
        seconds = self.resumed_s - self.noticed_s
        return f"{lost}, replayed from step {self.from_step} after {seconds:.1f} s ({self.reason})"


class RecoveringRound:
    """One round of one cluster, leg by leg; ``order`` is what is left to do and its plan."""

    def __init__(
        self, splitter: Splitter, order: RoundOrder, fleet: Fleet, recovery: Recovery
    ) -> None:
        self.order = order
        self.legs: list[Leg] = []
        self.incidents: list[Incident] = []
        self._splitter = splitter
        self._fleet = fleet
        self._recovery = recovery
        self._probe: tuple[Batch, ...] = ()
        self._done = 0  # optimiser steps
        self._lost: set[str] = set()  # device ids

    def run(self, batches: Iterable[Batch], probe: Iterable[Batch] = ()) -> None:
        """Every batch as one step, after testing ``probe``.

        Raises InfeasibleError when no plan fits the devices that are left, and LinkError when the
        edge is gone for good or when a leg breaks again and again without the loss of a device.
        """
        source, self._probe = Source(batches), tuple(probe)
        while source.more():
            tape = Tape(source, self._recovery.snapshot_every)
            leg = self._until_done(partial(self._once, tape), resumed_s=tape.first_done)
            self.order = leg.order_behind(self.order)
            self.legs.append(leg)
            self._probe, self._done = (), self._done + len(leg.losses)

    def test(self, batches: Iterable[Batch], wanted: Guessing | None = None) -> Tested:
        """Loss and guesses of the chain without training it; raises as :meth:`run`."""
        taken = tuple(batches)

        def attempt() -> Tested:
            return run_test(self._splitter, self.order, taken, self._fleet, wanted)

        return self._until_done(attempt, resumed_s=time.monotonic)

    def _until_done(
        self, attempt: Callable[[], Result], *, resumed_s: Callable[[], float]
    ) -> Result:
        """Try again, without the devices that each failure cost, until it works."""
        replays = 0
        ended: list[Incident] = []
        while True:
            try:
                result = attempt()
            except LinkError as error:
                ended.append(self._recover(error))
                replays = 0 if ended[-1].lost else replays + 1
                if replays > MOST_REPLAYS:
                    raise
            else:
                at_s = resumed_s()
                self.incidents += [replace(incident, resumed_s=at_s) for incident in ended]
                return result

    def _once(self, tape: Tape) -> Leg:
        """Play the leg and have the edge keep its end.

        Behind the last leg, too: else an edge that restarts just then would go on from a snapshot,
        and give out a decoder that lacks the leg.
        """
        more = tape.source.more
        leg = run_leg(
            self._splitter,
            self.order,
            tape.play(),
            self._fleet,
            self._probe,
            keep_optimizer=lambda: more() or self.order.keep_optimizer,
        )
        self._recovery.edge.snapshot(self._done + len(leg.losses))
        return leg

    def _recover(self, error: LinkError) -> Incident:
        """Void the leg everywhere, and plan for the devices that answer.

        A device that was lost stays out until the round is over: one that comes and goes would
        have the leg replayed without end.
        """
        noticed_s, plan = time.monotonic(), self.order.plan
        ids = [device.device_id for device in self._recovery.profile.devices]
        missing = self._fleet.missing(ids)
        lost = tuple(s.device_id for s in plan.segments if s.device_id in missing)
        self._lost.update(lost)
        log.warning("cluster %s: %s", plan.cluster_id, error)
        if lost:
            present = [name for name in ids if name not in missing | self._lost]
            plan = replan(plan, self._remains(present))
            self.order = replace(self.order, plan=plan)
        try:
            self._recovery.edge.rollback(self._done)
        except LinkError as gone:
            raise LinkError(f"{error}; the round cannot be replayed: {gone}") from error
        where = ", ".join(s.device_id for s in plan.segments)
        log.warning("replaying from step %d on %s", self._done, where)
        return Incident(
            reason=str(error),
            lost=lost,
            from_step=self._done,
            noticed_s=noticed_s,
            resumed_s=noticed_s,
        )

    def _remains(self, present: Collection[str]) -> ReplanInput:
        return ReplanInput(
            profile=self._recovery.profile,
            model=self._recovery.model(),
            present=present,
            options=PricingOptions(
                schedule=self.order.schedule, recompute=self.order.execution.recompute
            ),
        )


class Source:
    """Batches with a look ahead of one."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self._next: Batch | None = None

    def more(self) -> bool:
        """Whether there is another batch."""
        if self._next is None:
            self._next = next(self._batches, None)
        return self._next is not None

    def take(self) -> Batch:
        """The next batch, after :meth:`more`."""
        batch, self._next = self._next, None
        assert batch is not None
        return batch


class Tape:
    """The batches of one leg: taken once from their source, played as often as needed."""

    def __init__(self, source: Source, limit: int) -> None:
        self.source = source
        self._first_done_s = 0.0
        self._limit = limit or math.inf
        self._batches: list[Batch] = []

    def first_done(self) -> float:
        """When the first step of the last play was over."""
        return self._first_done_s

    def play(self) -> Iterator[Batch]:
        """From the first batch on; takes new ones when the known ones are through."""
        for index in count():
            if index == 1:
                self._first_done_s = time.monotonic()
            if index == len(self._batches) and index < self._limit and self.source.more():
                self._batches.append(self.source.take())
            if index == len(self._batches):
                return
            yield self._batches[index]
