"""A round that survives the loss of devices and a restart of the edge.

The round runs in replay intervals: steps over one chain, between two states of all parts. An
interval either ends with the new states at the control unit, or changes nothing there. Before each
interval the control unit has the state of every part, in a file. When anything fails, the interval
is void on all sides: the parts are placed again by a plan for the devices that still answer
(without moving a block where every stage has a replica left), and the same batches are replayed
with the same seeds. So no step is applied twice or in part, and the weights are those of an
undisturbed run on the new plan. The edge is one more host: the control unit waits for one that
restarts, and sends its part again. If the cluster has another edge, it waits less: the next edge
gets the part from the control unit, which has the state of all parts. The same happens to an edge
that answers and is to blame (`Suspects`).

With ``snapshot_every`` 0 in the order the round is one interval: its first state came with the
order and costs nothing, and a loss replays at most one round. With S > 0 a loss replays at most S
steps, and every S steps the weights and optimizer slots of all parts (for AdamW three times the
weights) are sent to the control unit and back.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from collapipe_flwr.cluster.audit import audit, check_audited, check_room
from collapipe_flwr.cluster.evaluation import EvalResult, PredictionConfig, generate_texts
from collapipe_flwr.cluster.fleet import Fleet, ThreadFleet
from collapipe_flwr.cluster.front_cache import CachedFront, build_front
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import CONTROL_UNIT, EDGE, Segments, TrainingOrder
from collapipe_flwr.cluster.replay_buffer import Batch, ReplayBuffer
from collapipe_flwr.cluster.suspects import Suspects
from collapipe_flwr.core.domain import ClusterPlan, ClusterProfile, EdgeProfile, ModelProfile
from collapipe_flwr.core.errors import (
    AuditFailed,
    Blame,
    CollaPipeError,
    Diverged,
    EdgeLost,
    InfeasibleError,
    LinkError,
    MemberFailed,
    ModelError,
)
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.costs.work import count_end_bytes
from collapipe_flwr.host.allocator import trim_heap
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.front import FrontPart
from collapipe_flwr.models.parts import EmbeddingPart
from collapipe_flwr.pipeline.offload import LazyMapping
from collapipe_flwr.pipeline.roles import FirstStage
from collapipe_flwr.pipeline.soundness import describe_implausible
from collapipe_flwr.pipeline.state import PartState
from collapipe_flwr.pipeline.step import StepResult
from collapipe_flwr.scheduler.plans import check_privacy
from collapipe_flwr.scheduler.refusal import compare_sizes
from collapipe_flwr.scheduler.replan import ReplanInput, add_head, drop_lost, replan

log = logging.getLogger(__name__)
_draw = random.SystemRandom()  # nobody can foresee it
Result = TypeVar("Result")
MOST_REPLAYS = 2  # of one interval without losing a device: the failure is not transient then


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayInterval:
    """The result of an interval; ``held`` has all parts, on request with slots."""

    losses: tuple[float, ...]  # per optimizer step; a batch without labels makes none
    probe: EvalResult  # before the first step
    next_step: int  # the number of the step after this interval, evaluations counted
    held: Segments
    hops: Sequence[LinkConfig]  # its links
    at_home: bool  # its last stage was in this process

    @property
    def without_notes(self) -> ReplayInterval:
        """The same without the notes for an audit."""
        reports = tuple(replace(each, notes={}, rounding="") for each in self.held.reports)
        return replace(self, held=replace(self.held, reports=reports))

    def advance(self, order: TrainingOrder) -> TrainingOrder:
        """Return what is left of ``order`` after this interval."""
        return replace(
            order,
            weights=LazyMapping.join(order.weights, self.held.state.weights),
            slots=self.held.state.optimizer,
            first_step=self.next_step,
            updates=order.updates + len(self.losses),
        )


def run_interval(
    splitter: AnySplitter,
    order: TrainingOrder,
    batches: Iterable[Batch],
    fleet: Fleet,
    probe: Iterable[Batch],
    keep_optimizer: Callable[[], bool],
) -> ReplayInterval:
    """Run every batch as one optimizer step on the devices of ``fleet``, from ``order``'s state.

    ``probe`` is tested before the first step; ``keep_optimizer`` is called after the last one.

    Raises LinkError when a device or the edge fails or stays silent; then nothing of the interval
    is left on any device.
    """
    embedding, optimizer = order.place(build_front(splitter, order))
    with fleet.open_chain(splitter, order) as chain:
        trim_heap(order.compute)  # what sending the segments took
        first = FirstStage(
            embedding,
            optimizer,
            order.configure_stage(0),
            downstream=chain.link,
            shared=splitter.sums_shared,
            first_step=order.first_step,
            rates=order.learning.optimizer.rates(first=order.updates, batches=order.batches),
            targets=chain.targets,
        )
        with first.tell_neighbours():
            tested = EvalResult.average(_list_losses(first.evaluate(batch) for batch in probe))
            steps = [first.train_step(batch) for batch in batches]
            first.finish()
        keeps = keep_optimizer()
        slots = optimizer.collect_state() if keeps else {}
        own = PartState(weights=embedding.state_dict(), optimizer=slots).offload()
        report = first.report()
        if isinstance(embedding, CachedFront):
            report = replace(report, cache=embedding.use)
        ahead, next_step = Segments(state=own, reports=(report,)), first.next_step
        del first, optimizer, embedding, slots  # freed before the segments arrive
        trim_heap(order.compute)
        held = ahead + chain.collect(keeps)
        trim_heap(order.compute)
    _check_sound(splitter, order, held.state)
    return ReplayInterval(
        losses=tuple(step.loss for step in steps if step.weight),
        probe=tested,
        next_step=next_step,
        held=held,
        hops=chain.hops,
        at_home=chain.targets is not None,
    )


def _check_sound(splitter: AnySplitter, order: TrainingOrder, state: PartState) -> None:
    """Raise MemberFailed for a device, or the edge, that returns weights that cannot be right."""
    owners = [(splitter.segment_keys(s.first_block, s.stop_block), s) for s in order.plan.segments]
    owned = {key: segment.device_id for keys, segment in owners for key in keys}
    owned |= dict.fromkeys(splitter.edge_keys(), EDGE)
    for key, tensor in state.weights.items():
        wrong = describe_implausible(tensor)
        if wrong and (key not in order.weights or not describe_implausible(order.weights[key])):
            owner = owned.get(key, CONTROL_UNIT)
            raise MemberFailed(owner, f"{owner} returned {key} with {wrong}", Blame.UNSOUND)


def evaluate_chain(
    splitter: AnySplitter,
    order: TrainingOrder,
    batches: Iterable[Batch],
    fleet: Fleet,
    wanted: PredictionConfig | None,
) -> EvalResult:
    """Compute loss and predictions of one chain without training; raises as ``run_interval``."""
    taken, generates = tuple(batches), wanted is not None and wanted.generates(splitter.decodes)
    front = splitter.build_front(order.weights) if generates else build_front(splitter, order)
    embedding, optimizer = order.place(front)
    if generates:  # a text stays on the devices that keep its hidden states
        segments = tuple(replace(segment, replicas=()) for segment in order.plan.segments)
        order = replace(order, plan=replace(order.plan, segments=segments))
    predict = "" if wanted is None or generates else wanted.kind
    with fleet.open_chain(splitter, order) as chain:
        first = FirstStage(
            embedding,
            optimizer,
            order.configure_stage(0),
            downstream=chain.link,
            targets=chain.targets,
        )
        with first.tell_neighbours():
            results = [first.evaluate(batch, predict=predict) for batch in taken]
            predictions = tuple(result.predictions for result in results)
            if wanted is not None and generates:
                assert isinstance(embedding, EmbeddingPart | FrontPart)
                predictions = generate_texts(
                    embedding, chain.link, order.configure_stage(0), taken, wanted
                )
            else:
                first.finish()
    return EvalResult.average(_list_losses(results), predictions)


def _list_losses(results: Iterable[StepResult]) -> Iterator[tuple[float, float]]:
    return ((result.loss, result.weight) for result in results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The cluster and model by which a round plans again without some of its devices."""

    profile: ClusterProfile
    model: Callable[[], ModelProfile]  # called only when a device is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """A failure that voided an interval. Times are ``time.monotonic``.

    An interval that failed several times has as many incidents, all ended by the replay that
    succeeded.
    """

    reason: str
    lost: tuple[str, ...]  # device ids
    quarantined: bool = False  # the lost devices answer, but are to blame
    untrue: bool = False  # an audit found wrong results
    from_step: int  # replayed from here
    noticed_s: float
    resumed_s: float  # end of the first step of the replay that succeeded

    def __str__(self) -> str:
        what = "quarantined" if self.quarantined else "lost"
        lost = f"{what} {', '.join(self.lost)}" if self.lost else "lost no device"
        seconds = self.resumed_s - self.noticed_s
        return f"{lost}, replayed from step {self.from_step} after {seconds:.1f} s ({self.reason})"


class RecoveringPipeline:
    """One round of one cluster in intervals; ``order`` is what is left to do, with its plan.

    Without a ``recovery`` the first failure is raised. Raises ScheduleError for a plan that gives
    trusted blocks to devices which this cluster does not trust, whatever the server says.
    """

    def __init__(
        self, splitter: AnySplitter, order: TrainingOrder, fleet: Fleet, recovery: Recovery | None
    ) -> None:
        self.order = order
        self.intervals: list[ReplayInterval] = []
        self.incidents: list[Interruption] = []
        self.suspects = Suspects(clips=order.learning.execution.clip_norm > 0)
        self._splitter = splitter
        self._fleet = fleet
        self._recovery = recovery
        self._probe: tuple[Batch, ...] = ()
        self._buffer: ReplayBuffer | None = None
        self._done = 0  # optimizer steps
        self._lost: set[str] = set()  # device ids
        self._edges_lost: Counter[str] = Counter()
        if recovery is not None:
            check_privacy(order.plan, recovery.profile)

    def run(self, batches: Iterable[Batch], probe: Iterable[Batch] = ()) -> None:
        """Train on every batch as one step, after testing ``probe``.

        Raises InfeasibleError when no plan fits the remaining devices, and LinkError when the edge
        is lost or an interval fails repeatedly without the loss of a device.
        """
        learning, recovery = self.order.learning, self._recovery
        if learning.audit_share and recovery is not None:
            check_room(self.order.plan, recovery.profile, recovery.model())
        every = learning.snapshot_every
        buffer = self._buffer = ReplayBuffer(batches, every if self._recovery else 0)
        self._probe = tuple(probe)
        while buffer.has_next() or not self.intervals:
            buffer.begin()
            # Drawn before the first attempt, and kept for its replays.
            audited = _draw.random() < learning.audit_share
            once = partial(self._run_once, buffer, audited)
            interval = self._repeat_until_done(once, lambda: buffer.first_done_s)
            if buffer.has_next():
                self.order = interval.advance(self.order)
                freed = replace(interval.held, state=PartState(weights={}))
                interval = replace(interval, held=freed)
            self.intervals.append(interval)
            self._probe, self._done = (), self._done + len(interval.losses)

    def test(self, batches: Iterable[Batch], wanted: PredictionConfig | None = None) -> EvalResult:
        """Compute loss and predictions without training; raises as :meth:`run`."""
        taken = tuple(batches)

        def attempt() -> EvalResult:
            return evaluate_chain(self._splitter, self.order, taken, self._fleet, wanted)

        return self._repeat_until_done(attempt, time.monotonic)

    def _repeat_until_done(
        self, attempt: Callable[[], Result], resumed_s: Callable[[], float]
    ) -> Result:
        """Repeat, each time without the devices lost so far, until an attempt succeeds.

        An error that ends the round names all lost devices, because the reply holds nothing else.
        An error for which no device is to blame says so itself.
        """
        try:
            return self._repeat(attempt, resumed_s)
        except CollaPipeError as error:
            if not self._lost or isinstance(error, ModelError | Diverged):
                raise
            kind = LinkError if isinstance(error, MemberFailed | AuditFailed) else type(error)
            raise kind(f"{error}; the round lost {', '.join(sorted(self._lost))}") from error

    def _repeat(self, attempt: Callable[[], Result], resumed_s: Callable[[], float]) -> Result:
        replays = 0
        ended: list[Interruption] = []
        while True:
            try:
                result = attempt()
            except EdgeLost as gone:
                if (moved := self._move_edge(gone)) is not None:
                    ended.append(moved)
                    continue
                if not ended:
                    raise
                why = f"{ended[-1].reason}; the round cannot be replayed: {gone}"
                raise EdgeLost(why) from gone
            except LinkError as error:
                if self._recovery is None:
                    raise
                ended.append(self._recover(self._recovery, error, last=replays >= MOST_REPLAYS))
                replays = 0 if ended[-1].lost else replays + 1
                if replays > MOST_REPLAYS:
                    raise
            else:
                self.suspects.clear()
                at_s = resumed_s()
                self.incidents += [replace(incident, resumed_s=at_s) for incident in ended]
                return result

    def _run_once(self, buffer: ReplayBuffer, audited: bool) -> ReplayInterval:
        def keeps() -> bool:
            return buffer.has_next() or self.order.keep_optimizer

        check_audited(self.order)
        interval = run_interval(
            self._splitter, self.order, buffer.replay(), self._fleet, self._probe, keeps
        )
        if audited:
            self._audit(interval, buffer, keeps())
        return interval.without_notes

    def _audit(self, told: ReplayInterval, buffer: ReplayBuffer, keeps: bool) -> None:
        """Run an interval again in this process, and compare; raises as `audit`."""
        order, place = self.order, self.order.compute
        hops = tuple(hop.unpaced for hop in told.hops)
        order = replace(order, plan=replace(order.plan, hops=hops))
        fleet = ThreadFleet(ThreadEdge(place, holds_targets=told.at_home))
        due = run_interval(self._splitter, order, buffer.kept, fleet, self._probe, lambda: keeps)
        steps = range(order.first_step, told.next_step)
        audit(self._splitter, order, steps, told.held, due.held)

    def _recover(self, recovery: Recovery, error: LinkError, *, last: bool) -> Interruption:
        """Plan for the devices that answer.

        A lost device stays out until the round is over: one that comes and goes would make the
        interval replay without end. Where all answer, one may be to blame, see `Suspects`.
        """
        noticed_s, plan = time.monotonic(), self.order.plan
        ids = [device.device_id for device in recovery.profile.devices]
        missing = self._fleet.find_missing(list(dict.fromkeys((*ids, *plan.device_ids))))
        lost = tuple(name for name in plan.device_ids if name in missing)
        log.warning("cluster %s: %s", plan.cluster_id, error)
        untrue = error.accused if isinstance(error, AuditFailed) else ()
        blamed = untrue
        if not (untrue or lost) and (suspect := self._suspect(error, last=last)):
            blamed = (suspect,)
        if blamed == (EDGE,):
            if (moved := self._move_edge(error)) is not None:
                return moved
            blamed = ()
        self.suspects.quarantined |= dict.fromkeys(set(untrue) - {EDGE}, str(error))
        for name in blamed:
            log.warning("%s is quarantined: %s", name, self.suspects.quarantined[name])
        lost = blamed or lost
        self._lost.update(lost)
        if lost:
            edge = {e.device_id for e in recovery.profile.edges if e.id == plan.edge}
            present = [name for name in ids if name not in missing | self._lost | edge]
            plan = self._plan_for(plan, present, recovery, error)
            self.order = replace(self.order, plan=plan)
        where = ", ".join(plan.device_ids)
        log.warning("replaying from step %d on %s", self._done, where)
        return Interruption(
            reason=self.suspects.quarantined[blamed[0]] if blamed else str(error),
            lost=lost,
            quarantined=bool(blamed),
            untrue=bool(untrue),
            from_step=self._done,
            noticed_s=noticed_s,
            resumed_s=noticed_s,
        )

    def _move_edge(self, error: LinkError) -> Interruption | None:
        """Continue on the next edge that has room; return None where there is none.

        An edge that was lost may be back: it is tried once more after all others. An edge that
        answered and was to blame is not.
        """
        plan, noticed_s, recovery = self.order.plan, time.monotonic(), self._recovery
        lost, answers = self._edges_lost, not isinstance(error, EdgeLost)
        lost[plan.edge] += 2 if answers else 1
        if recovery is None:
            return None
        edges = [e for e in recovery.profile.edges if e.id != plan.edge and lost[e.id] < 2]
        for edge in sorted(edges, key=lambda each: lost[each.id]):
            try:
                self.order = replace(self.order, plan=self._plan_on(edge, recovery, error))
            except InfeasibleError as short:
                log.warning("the edge %s cannot go on: %s", edge.id, short)
                continue
            what = "is to blame" if answers else "is lost"
            why = f"the edge {plan.edge} {what}, continues on {edge.id}: {error}"
            log.warning("cluster %s: %s; from step %d", plan.cluster_id, why, self._done)
            self.suspects.quarantined[plan.edge] = str(error)
            return Interruption(
                reason=why,
                lost=(plan.edge,),
                quarantined=answers,
                from_step=self._done,
                noticed_s=noticed_s,
                resumed_s=noticed_s,
            )
        return None

    def _plan_on(self, edge: EdgeProfile, recovery: Recovery, error: LinkError) -> ClusterPlan:
        """Adapt the plan to another edge; raises InfeasibleError where that has no room."""
        plan, profile, model = self.order.plan, recovery.profile, recovery.model()
        need, room = model.decoder, (1.0 - plan.memory_margin) * edge.memory_bytes
        need_bytes = float(count_end_bytes(need, plan.micro_batch_size, plan.warmup_depth[-1]))
        if edge.device_id == profile.control_unit.device_id:
            need_bytes += model.embedding.state_bytes
        if need_bytes > room:
            raise InfeasibleError(f"its part {compare_sizes(need_bytes, room, 'it has')}")
        hops = (*plan.hops[:-1], *(hop.unpaced for hop in plan.hops[-1:]))
        before = next((each for each in profile.edges if each.id == plan.edge), None)
        spent = add_head(add_head(plan.energy_j, plan, before, model, -1.0), plan, edge, model)
        plan = replace(plan, edge=edge.id, hops=hops, energy_j=spent)
        if edge.device_id not in plan.device_ids:
            return plan
        ids = (device.device_id for device in profile.devices)
        present = [n for n in ids if n not in self._lost and n != edge.device_id]
        return self._plan_for(plan, present, recovery, error)

    def _suspect(self, error: LinkError, *, last: bool) -> str:
        untrained = not self._done and (self._buffer is None or not self._buffer.past_first)
        return self.suspects.quarantine(error, self.order.plan, last=last, untrained=untrained)

    def _plan_for(
        self, plan: ClusterPlan, present: Collection[str], recovery: Recovery, error: LinkError
    ) -> ClusterPlan:
        """Plan for the remaining devices; raises InfeasibleError where no plan fits."""
        remains = ReplanInput(
            profile=recovery.profile,
            model=recovery.model(),
            present=present,
        )
        try:
            return drop_lost(plan, remains) or replan(plan, remains)
        except InfeasibleError as short:
            if isinstance(error, AuditFailed):
                raise InfeasibleError(f"{error}; {short}") from error
            raise InfeasibleError(self.suspects.explain(str(short))) from error
