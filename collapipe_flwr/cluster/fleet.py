"""The order of one round, and the interface of the fleet that executes it.

A fleet (threads of this process, or daemons on boards) turns a planned round into a chain of stages
that is joined to the edge and waits for the first step. Its user sees one link, and at its end the
trained segments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from collapipe_flwr.cluster.wires import CONTROL_UNIT, Wires
from collapipe_flwr.core.domain import ClusterPlan, Segment
from collapipe_flwr.core.errors import CollaPipeError, LinkError, LinkTimeout
from collapipe_flwr.core.links import Heartbeat, LinkConfig
from collapipe_flwr.core.turns import ALONE, Turn, turns
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.pipeline.compute import CPU, hold, home
from collapipe_flwr.pipeline.config import Execution, StageConfig
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.roles import MiddleStage
from collapipe_flwr.pipeline.state import (
    OptimizerState,
    PartState,
    load_optimizer_state,
    optimizer_state_of,
)
from collapipe_flwr.transport.weights import TransferStats

PATIENCE_PER_STAGE = 0.5  # upstream waits longer, so that the neighbour of a silent stage speaks


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings:
    """How a cluster learns in one round; the server owns it so that all clusters agree."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: str = "gpipe"
    deadline_s: float = 60.0  # longest silence of a neighbour inside a step
    seed: int = 0
    execution: Execution = field(default_factory=Execution)
    snapshot_every: int = 0  # steps; 0: a loss replays the round
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    run_id: str = ""  # the same for a run that is resumed
    keep_optimizer: bool = False  # its state continues in the next round


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrder:
    """What the server asks of one cluster; ``weights`` are those of embedding and blocks."""

    plan: ClusterPlan
    weights: Mapping[str, Tensor]
    learning: LearningSettings
    idle_s: float = 600.0  # longest pause between steps
    dropout_seed: int | None = None  # the same dropout for every cut; None where there is none
    slots: OptimizerState = field(default_factory=dict)  # empty: the optimizer starts anew
    keep_optimizer: bool = False  # give the slots back at the end of the round
    first_step: int = 0  # the number of the first step; not 0 in the middle of a round
    updates: int = 0  # optimizer steps of the round so far
    batches: int = 0  # of the whole round; 0: not known in advance
    compute: torch.device = CPU  # of all parts in this process
    server_round: int = 0  # for the logs of devices

    @property
    def hops(self) -> tuple[LinkConfig, ...]:
        """How every hop behaves: as planned, else as the run says."""
        execution = self.learning.execution
        planned = self.plan.hops or (LinkConfig(codec=execution.codec),) * (
            1 + len(self.plan.segments)
        )
        return planned if execution.paced else tuple(hop.unpaced for hop in planned)

    @property
    def holders(self) -> tuple[Holder, ...]:
        """The planned devices in pipeline order, replicas next to each other."""
        return tuple(
            Holder(stage=stage, turn=turn, segment=segment)
            for stage, segment in enumerate(self.plan.segments, start=1)
            for turn in turns(len(segment.device_ids))
        )

    @property
    def without_replicas(self) -> RoundOrder:
        """The same over the first device of every stage."""
        segments = tuple(replace(segment, replicas=()) for segment in self.plan.segments)
        return replace(self, plan=replace(self.plan, segments=segments))

    def placed(self, part: nn.Module) -> tuple[nn.Module, Optimizer]:
        """A part where it is to compute, and its optimizer, which goes on from the slots."""
        part = hold(part, self.compute)
        optimizer = Optimizer(self.learning.optimizer, part.named_parameters())
        load_optimizer_state(optimizer, self.slots)
        return part, optimizer

    def settings(self, stage: int, turn: Turn = ALONE) -> StageConfig:
        """How stage ``stage``, or a replica of it, runs; 0 is the control unit."""
        learning, segments = self.learning, self.plan.segments
        patience = 1 + PATIENCE_PER_STAGE * (len(segments) - stage)
        return StageConfig(
            name=segments[stage - 1].device_ids[turn.replica] if stage else CONTROL_UNIT,
            schedule=learning.schedule,
            depth=self.plan.warmup_depth[stage],
            deadline_s=learning.deadline_s * patience,
            idle_s=self.idle_s,
            seed=self.dropout_seed,
            execution=learning.execution if stage else learning.execution.without_recompute,
            turn=turn,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A planned device: one replica of a stage; the first device is stage 1."""

    stage: int
    turn: Turn
    segment: Segment

    @property
    def device_id(self) -> str:
        """The device that holds the segment."""
        return self.segment.device_ids[self.turn.replica]

    def lane_to(self, receiver: Turn) -> tuple[int, int]:
        """Which of the links that ``receiver`` takes micro-batches from is ours, of how many."""
        senders = receiver.meets(self.turn.replicas)
        return senders.index(self.turn.replica), len(senders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """What the devices give back; ``reports`` stand in pipeline order."""

    state: PartState
    reports: tuple[StageReport, ...]
    moved: TransferStats = field(default_factory=TransferStats)  # to place and to collect them


class Chain(Protocol):
    """Device 1 -> ... -> device K -> edge, ready for steps."""

    @property
    def link(self) -> Link:
        """The control unit's link to device 1."""
        ...

    def collect(self, *, keep_optimizer: Callable[[], bool] = lambda: False) -> Segments:
        """The segments, after the END frame went down ``link``; optimiser slots where asked for.

        Waits for every device and the edge to end; raises the LinkError of one that failed or
        went on.
        """
        ...


class Fleet(Protocol):
    """The devices of one cluster."""

    def chain(self, splitter: AnySplitter, order: RoundOrder) -> AbstractContextManager[Chain]:
        """Place the segments of ``order`` and join them; nothing of it is left afterwards.

        Raises LinkError when a device or the edge cannot be reached or refuses. ``order`` is
        never changed, so a round that fails can be tried again.
        """
        ...

    def missing(self, device_ids: Collection[str]) -> frozenset[str]:
        """Those that do not answer now; asks all of them at once, for a second or two."""
        ...


Connect = Callable[[LinkConfig], AbstractContextManager[Link]]
MakeStage = Callable[..., MiddleStage]


class ThreadFleet:
    """A `Fleet` in this process; ``connect`` makes a new link as asked to the cluster's decoder.

    A thread that ends by an error other than a CollaPipeError has crashed: its device is missing
    from then on. ``make_stage`` is the seam for tests that crash one on purpose.
    """

    def __init__(self, connect: Connect, make_stage: MakeStage = MiddleStage) -> None:
        self._connect = connect
        self._make_stage = make_stage
        self._crashed: set[str] = set()

    @contextmanager
    def chain(self, splitter: AnySplitter, order: RoundOrder) -> Iterator[ThreadChain]:
        """See `Fleet.chain`; every thread has ended afterwards."""
        with ExitStack() as edge:
            last = order.plan.replicas[-2]
            edges = [
                edge.enter_context(self._connect(replace(order.hops[-1], lane=lane, lanes=last)))
                for lane in range(last)
            ]
            link, stages = join(splitter, order, edges, self._make_stage)
            threads = [DeviceThread(stage) for stage in stages]
            deadline_s = order.learning.deadline_s
            try:
                yield ThreadChain(link, threads, deadline_s, edge)
            except BaseException as error:
                link.close(str(error) or type(error).__name__)
                raise
            finally:
                for thread in threads:
                    thread.wait(deadline_s)
                self._crashed |= {t.stage.settings.name for t in threads if t.crashed}

    def missing(self, device_ids: Collection[str]) -> frozenset[str]:
        return frozenset(self._crashed.intersection(device_ids))


class ThreadChain:
    """The running threads; see `Chain`."""

    def __init__(
        self, link: Link, devices: Sequence[DeviceThread], deadline_s: float, edge: ExitStack
    ) -> None:
        self.link = link
        self._devices = devices
        self._deadline_s = deadline_s
        self._edge = edge

    def collect(self, *, keep_optimizer: Callable[[], bool] = lambda: False) -> Segments:
        for device in self._devices:
            device.join(self._deadline_s)
        self._edge.close()
        stages = [device.stage for device in self._devices]
        firsts = [stage for stage in stages if stage.settings.turn.replica == 0]
        kept = firsts if keep_optimizer() else ()
        return Segments(
            state=PartState(
                weights={
                    key: tensor.detach()
                    for stage in firsts
                    for key, tensor in home(stage.part.state_dict()).items()
                },
                optimizer={k: t for s in kept for k, t in optimizer_state_of(s.optimizer).items()},
            ),
            reports=tuple(stage.report() for stage in stages),
        )


class DeviceThread:
    """A thread that runs one stage; its failure reaches both neighbours by their links."""

    def __init__(self, stage: MiddleStage) -> None:
        self.stage = stage
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._serve, name=f"device {stage.settings.name}", daemon=True
        )
        self._thread.start()

    def wait(self, deadline_s: float) -> None:
        """Wait until it has ended, normally or not."""
        self._thread.join(deadline_s)

    def join(self, deadline_s: float) -> None:
        """Wait for the end; raises what the stage raised, LinkTimeout when it goes on."""
        self.wait(deadline_s)
        if self._thread.is_alive():
            raise LinkTimeout(
                f"device {self.stage.settings.name} did not stop within {deadline_s:g} s"
            )
        if self.crashed:
            name = self.stage.settings.name
            raise LinkError(f"device {name} crashed: {self._failure!r}") from self._failure
        if self._failure is not None:
            raise self._failure

    @property
    def crashed(self) -> bool:
        """Whether it ended by an error that is no CollaPipeError."""
        return self._failure is not None and not isinstance(self._failure, CollaPipeError)

    def _serve(self) -> None:
        # `join` raises whatever ended the thread.
        try:
            self.stage.serve()
        except BaseException as error:
            self._failure = error


def join(
    splitter: AnySplitter, order: RoundOrder, edges: Sequence[Link], make_stage: MakeStage
) -> tuple[Link, list[MiddleStage]]:
    """The control unit's link, and a stage per holder with its links.

    ``edges`` are those of the last stage's replicas to the edge.
    """
    wires = Wires(order.plan, order.hops, edges)
    stages = []
    for holder in order.holders:
        segment, stage, turn = holder.segment, holder.stage, holder.turn
        part, optimizer = order.placed(
            splitter.build_segment(segment.first_block, segment.stop_block, order.weights)
        )
        links: dict[str, object] = {
            "upstream": wires.up(stage, turn),
            "downstream": wires.down(stage, turn),
        }
        if turn.replicas > 1:
            links["siblings"] = wires.beside(stage, turn)
        stages.append(make_stage(part, optimizer, order.settings(stage, turn), **links))
    return wires.down(0, ALONE), stages
