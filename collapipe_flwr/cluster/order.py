"""The order of one round for one cluster, and the results of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from collapipe_flwr.core.domain import ClusterPlan, Segment
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import between, check, one_of
from collapipe_flwr.core.links import UPDATE_CODECS, Heartbeat, LinkConfig
from collapipe_flwr.core.measurements import StageMeasurement, TransferStats
from collapipe_flwr.core.schedule import ALONE, ReplicaIndex, list_turns
from collapipe_flwr.pipeline.compute import CPU, hold
from collapipe_flwr.pipeline.config import (
    LONGEST_WAIT_S,
    ActivationNoise,
    CacheConfig,
    ExamplePrivacy,
    Execution,
    NoiseConfig,
    StageConfig,
)
from collapipe_flwr.pipeline.offload import LazyMapping
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.state import OptimizerState, PartState, load_optimizer_state

CONTROL_UNIT, EDGE = "control-unit", "edge"  # the first and the last stage, beside device ids
PATIENCE_PER_STAGE = 0.5  # upstream waits longer, so that the neighbour of a silent stage reports


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings:
    """How a cluster learns in one round, set by the server for all clusters.

    Raises ConfigError for numbers that no round could run with.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    deadline_s: float = 60.0  # longest silence of a neighbour inside a step
    seed: int = 0
    execution: Execution = field(default_factory=Execution)
    snapshot_every: int = 0  # steps; 0: a lost device replays the whole round
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    run_id: str = ""  # the same for a run that is resumed
    keep_optimizer: bool = False  # its state continues in the next round
    labels_at_home: bool = False  # the control unit is the edge, and no link carries labels
    trusted_blocks: int = 0  # the first so many are on trusted devices alone
    privacy: NoiseConfig = field(default_factory=NoiseConfig)  # of examples, towards the server
    audit_share: float = 0.0  # of replay intervals, which the control unit computes again
    updates: str = "fp32"  # the codec in which a cluster replies how its model changed
    cache: CacheConfig = field(default_factory=CacheConfig)  # of frozen lower blocks

    def count_kept_bytes(self, parameters: Mapping[str, tuple[torch.Size, torch.dtype]]) -> int:
        """Count the bytes kept for such parameters, besides themselves and their gradients.

        Private training keeps a second gradient, the sum over the examples so far.
        """
        kept = self.optimizer.state_bytes(parameters)
        if self.privacy.on_gradients:
            kept += sum(shape.numel() * dtype.itemsize for shape, dtype in parameters.values())
        return kept

    def __post_init__(self) -> None:
        if not 0 < self.deadline_s <= LONGEST_WAIT_S:
            raise ConfigError(
                f"deadline_s must be > 0 and <= {LONGEST_WAIT_S:g}, got {self.deadline_s}"
            )
        check("updates", self.updates, one_of(*UPDATE_CODECS))
        check("audit_share", self.audit_share, between(0, 1))
        for name in ("snapshot_every", "trusted_blocks"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{name} must be >= 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOrder:
    """The order of one cluster's round; ``weights`` are those of the whole model."""

    plan: ClusterPlan
    weights: Mapping[str, Tensor]
    learning: LearningSettings
    idle_s: float = 600.0  # longest pause between steps
    dropout_seed: int | None = None  # the same dropout for every cut; None where there is none
    slots: OptimizerState = field(default_factory=dict)  # empty: the optimizer starts anew
    keep_optimizer: bool = False  # return the slots at the end of the round
    first_step: int = 0  # the number of the first step; not 0 in the middle of a round
    updates: int = 0  # optimizer steps of the round so far
    batches: int = 0  # of the whole round; 0: not known in advance
    compute: torch.device = CPU  # of all parts in this process
    server_round: int = 0  # for the logs of devices
    attempt: int = 0  # the order's number, by which the edge tells its progress
    privacy: ExamplePrivacy | None = None  # of every example's gradient
    activations: ActivationNoise | None = None  # of every example's hidden states

    @property
    def hops(self) -> tuple[LinkConfig, ...]:
        """The link of every hop: as planned, else as the run says."""
        execution = self.learning.execution
        planned = self.plan.hops or (LinkConfig(codec=execution.codec),) * (
            1 + len(self.plan.segments)
        )
        return planned if execution.paced else tuple(hop.unpaced for hop in planned)

    @property
    def holders(self) -> tuple[StageReplica, ...]:
        """The planned devices in pipeline order, replicas next to each other."""
        return tuple(
            StageReplica(stage=stage, turn=turn, segment=segment)
            for stage, segment in enumerate(self.plan.segments, start=1)
            for turn in list_turns(len(segment.device_ids))
        )

    def place(self, part: nn.Module) -> tuple[nn.Module, Optimizer]:
        """Move a part to ``compute`` and make its optimizer, which continues from the slots."""
        part = hold(part, self.compute)
        optimizer = Optimizer(self.learning.optimizer, part.named_parameters())
        load_optimizer_state(optimizer, self.slots)
        return part, optimizer

    @property
    def edge_settings(self) -> StageConfig:
        """The configuration of the last stage, which has no replicas."""
        learning = self.learning
        return StageConfig(
            name=EDGE,
            schedule=self.plan.execution.schedule,
            depth=self.plan.warmup_depth[-1],
            deadline_s=learning.deadline_s,
            idle_s=self.idle_s,
            execution=learning.execution.without_recompute,
            privacy=self.privacy,
            audited=self.learning.audit_share > 0,
        )

    def configure_stage(self, stage: int, turn: ReplicaIndex = ALONE) -> StageConfig:
        """Configure a stage, or a replica of it; 0 is the control unit."""
        learning, segments = self.learning, self.plan.segments
        patience = 1 + PATIENCE_PER_STAGE * (len(segments) - stage)
        recompute = stage > 0 and self.plan.execution.recompute
        return StageConfig(
            name=segments[stage - 1].device_ids[turn.replica] if stage else CONTROL_UNIT,
            schedule=self.plan.execution.schedule,
            depth=self.plan.warmup_depth[stage],
            deadline_s=learning.deadline_s * patience,
            idle_s=self.idle_s,
            seed=self.dropout_seed,
            execution=replace(learning.execution, recompute=recompute),
            turn=turn,
            privacy=self.privacy,
            activations=self._noise_of(stage),
            audited=self.learning.audit_share > 0,
        )

    def _noise_of(self, stage: int) -> ActivationNoise | None:
        """Return the noise of hidden states, whose secret only the stage that adds it is told."""
        noise = self.activations
        if noise is None or stage == 0:
            return noise if noise is not None and not noise.behind else None
        segment = self.plan.segments[stage - 1]
        own = noise.behind - segment.first_block
        return (
            replace(noise, behind=own) if own > 0 and noise.behind <= segment.stop_block else None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReplica:
    """A planned device: one replica of a stage; the first device is stage 1."""

    stage: int
    turn: ReplicaIndex
    segment: Segment

    @property
    def device_id(self) -> str:
        return self.segment.device_ids[self.turn.replica]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The results of neighbouring stages; ``reports`` are in pipeline order."""

    state: PartState
    reports: tuple[StageMeasurement, ...]
    moved: TransferStats = field(default_factory=TransferStats)  # placed and collected

    def __add__(self, behind: Segments) -> Segments:
        """Join the stages ahead with those behind."""
        return Segments(
            state=PartState(
                weights=LazyMapping.join(self.state.weights, behind.state.weights),
                optimizer=LazyMapping.join(self.state.optimizer, behind.state.optimizer),
            ),
            reports=self.reports + behind.reports,
            moved=self.moved + behind.moved,
        )
