"""What a cluster is asked to do in one round, and where each of its stages stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from collapipe_flwr.core.domain import ClusterPlan, HopPlan
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.pipeline.config import Execution, StageConfig
from collapipe_flwr.pipeline.optimizer import OptimizerSettings
from collapipe_flwr.pipeline.state import Slots

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
    slots: Slots = field(default_factory=dict)  # of the optimiser; without them it starts anew
    keep_optimizer: bool = False  # give the slots back at the end of the round
    first_step: int = 0  # the number of the first step; not 0 in the middle of a round

    @property
    def hops(self) -> tuple[LinkConfig, ...]:
        """How every hop behaves: as planned, else as the run says."""
        planned = self.plan.hops or (HopPlan(codec=self.execution.codec),) * len(self.names)
        return tuple(self._hop(hop) for hop in planned)

    def _hop(self, hop: HopPlan) -> LinkConfig:
        if not self.execution.paced:
            return LinkConfig(codec=hop.codec)
        return LinkConfig(
            codec=hop.codec,
            forward_bit_per_s=hop.forward_bit_per_s or None,
            backward_bit_per_s=hop.backward_bit_per_s or None,
        )

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
