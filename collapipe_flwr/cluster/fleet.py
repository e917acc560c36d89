"""The order of one round, and the interface of the fleet that executes it.

A fleet (threads of this process, or daemons on boards) turns a planned round into a chain of stages
that is joined to the edge and waits for the first step. Its user sees one link, and at its end the
trained segments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import Execution, StageConfig
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.optimizer import OptimizerSettings
from collapipe_flwr.pipeline.state import OptimizerState, PartState
from collapipe_flwr.transport.weights import TransferStats

CONTROL_UNIT = "control-unit"
PATIENCE_PER_STAGE = 0.5  # upstream waits longer, so that the neighbour of a silent stage speaks


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrder:
    """What the server asks of one cluster; ``weights`` are those of embedding and blocks."""

    plan: ClusterPlan
    weights: Mapping[str, Tensor]
    optimizer: OptimizerSettings
    schedule: str
    deadline_s: float  # longest silence of a neighbour inside a step
    idle_s: float = 600.0  # longest pause between steps
    dropout_seed: int | None = None  # the same dropout for every cut; None where there is none
    execution: Execution = field(default_factory=Execution)
    slots: OptimizerState = field(default_factory=dict)  # empty: the optimizer starts anew
    keep_optimizer: bool = False  # give the slots back at the end of the round
    first_step: int = 0  # the number of the first step; not 0 in the middle of a round

    @property
    def hops(self) -> tuple[LinkConfig, ...]:
        """How every hop behaves: as planned, else as the run says."""
        planned = self.plan.hops or (LinkConfig(codec=self.execution.codec),) * len(self.names)
        return planned if self.execution.paced else tuple(hop.unpaced for hop in planned)

    @property
    def names(self) -> tuple[str, ...]:
        """The stages in front of the edge: the control unit, then the planned devices."""
        return (CONTROL_UNIT, *(segment.device_id for segment in self.plan.segments))

    def settings(self, stage: int) -> StageConfig:
        """How stage ``stage`` runs; 0 is the control unit, n + 1 the n-th planned device."""
        stages_between_here_and_edge = len(self.names) - 1 - stage
        return StageConfig(
            name=self.names[stage],
            schedule=self.schedule,
            depth=self.plan.warmup_depth[stage],
            deadline_s=self.deadline_s * (1 + PATIENCE_PER_STAGE * stages_between_here_and_edge),
            idle_s=self.idle_s,
            seed=self.dropout_seed,
            execution=self.execution if stage else self.execution.without_recompute,
        )


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

    def chain(self, splitter: Splitter, order: RoundOrder) -> AbstractContextManager[Chain]:
        """Place the segments of ``order`` and join them; nothing of it is left afterwards.

        Raises LinkError when a device or the edge cannot be reached or refuses. ``order`` is
        never changed, so a round that fails can be tried again.
        """
        ...

    def missing(self, device_ids: Collection[str]) -> frozenset[str]:
        """Those that do not answer now; asks all of them at once, for a second or two."""
        ...
