"""A planned round of one cluster: devices here, the decoder at the edge.

What a user's `Cluster` and our own ClientApp share; it knows neither tasks nor data sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Self

from flwr.app import RecordDict
from torch import Tensor

from collapipe_flwr.cluster.control_unit import RoundResult, evaluate_batches, train_round
from collapipe_flwr.cluster.evaluation import EvalResult, PredictionConfig
from collapipe_flwr.cluster.fleet import RoundOrder
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.federation import records
from collapipe_flwr.federation.records import SplitTask
from collapipe_flwr.federation.site import Site
from collapipe_flwr.federation.telemetry import ClusterTelemetry
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.specs import splitter_of
from collapipe_flwr.pipeline.step import MicroBatch

if TYPE_CHECKING:  # which needs the extra `data`
    from collapipe_flwr.federation.node_state import OptimizerMemory

Weights = Mapping[str, Tensor]
Batches = Iterable[Sequence[Mapping[str, Tensor]]]  # of micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRound:
    """What the server asks of a cluster in one round."""

    server_round: int
    plan: ClusterPlan
    task: SplitTask

    @property
    def sizes(self) -> dict[str, int]:
        """Examples of a step and of a micro-batch."""
        size = self.plan.micro_batch_size
        return {"batch_size": size * self.plan.micro_batches, "micro_batch_size": size}

    @classmethod
    def of(cls, content: RecordDict) -> Self:
        """The round that a message asks for; raises ProtocolError where it asks for none."""
        assignment = records.read_assignment(content)
        if assignment.split is None or assignment.plan is None:
            raise ProtocolError(
                "the server sent neither a plan with an edge nor a whole task: its strategy needs "
                "a model to split, CollaPipe(..., model=SplitModel(...))"
            )
        return cls(
            server_round=assignment.server_round, plan=assignment.plan, task=assignment.split
        )

    def run(
        self,
        site: Site,
        weights: Weights,
        steps: Batches,
        probe: Batches = (),
        *,
        examples: int,
        batches: int = 0,
        memory: OptimizerMemory | None = None,
    ) -> tuple[RoundResult, tuple[str, ...]]:
        """One optimizer step per batch of micro-batches; also the devices absent at the end.

        ``probe`` is evaluated before the first step. ``batches`` are those of the round, 0 where
        their number is not known. Raises as `train_round`.
        """
        splitter = splitter_for(self.task.model_spec_json)
        with site.devices(self.task, splitter, examples) as devices:
            order = replace(self._order(splitter, weights), batches=batches)
            if memory is not None:
                order = replace(order, slots=memory.recall(), keep_optimizer=memory.keep)
            result = train_round(
                splitter,
                order,
                _micro_batches(splitter, steps),
                devices.fleet,
                _micro_batches(splitter, probe),
                recovery=devices.recovery,
            )
            if memory is not None:
                memory.remember(result.slots)
            if self.task.whole:
                edge = devices.edge.fetch_weights()
                result = replace(result, weights={**edge, **result.weights})
            return result, devices.absent()

    def completed(self, sent: Weights, trained: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the reply holds: what was trained, or all that was ``sent``, brought up to date."""
        if not self.task.whole:
            return trained
        aliases = splitter_for(self.task.model_spec_json).aliases
        return {key: trained.get(aliases.get(key, key), tensor) for key, tensor in sent.items()}

    def test(
        self,
        site: Site,
        weights: Weights,
        steps: Batches,
        *,
        examples: int,
        wanted: PredictionConfig | None = None,
    ) -> EvalResult:
        """Loss of the chain on batches of micro-batches, and predictions where ``wanted``."""
        splitter = splitter_for(self.task.model_spec_json)
        with site.devices(self.task, splitter, examples) as devices:
            return evaluate_batches(
                splitter,
                self._order(splitter, weights),
                _micro_batches(splitter, steps),
                devices.fleet,
                recovery=devices.recovery,
                wanted=wanted,
            )

    def _order(self, splitter: AnySplitter, weights: Weights) -> RoundOrder:
        return RoundOrder(
            plan=self.plan,
            weights=weights,
            learning=self.task.learning,
            dropout_seed=self._dropout_seed(splitter),
        )

    def _dropout_seed(self, splitter: AnySplitter) -> int | None:
        """One per run, cluster and round; None for a model that drops nothing, which is faster."""
        if not splitter.drops:
            return None
        place = f"{self.task.learning.seed}/{self.plan.cluster_id}/{self.server_round}"
        return int.from_bytes(sha256(place.encode()).digest()[:6], "big")


@lru_cache(maxsize=4)
def splitter_for(model_spec_json: str) -> AnySplitter:
    """The same splitter for the rounds of one run."""
    return splitter_of(model_spec_json)


def _micro_batches(splitter: AnySplitter, steps: Batches) -> Iterator[list[MicroBatch]]:
    for step in steps:
        yield [
            MicroBatch(
                inputs=tensors,
                context=splitter.context(tensors),
                weight=splitter.weight_of(tensors),
            )
            for tensors in step
        ]


def telemetry(result: RoundResult, examples: int, absent: tuple[str, ...]) -> ClusterTelemetry:
    """What a round of so many examples measured."""
    replanned = any(incident.lost for incident in result.incidents)
    return ClusterTelemetry(
        cluster_id=result.plan.cluster_id,
        examples=examples,
        wall_s=result.wall_s,
        losses=result.losses,
        reports=result.reports,
        moved=result.moved,
        replanned=result.plan if replanned else None,
        incidents=tuple(str(incident) for incident in result.incidents),
        absent=absent,
    )
