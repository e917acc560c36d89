"""A planned round of one cluster: devices here, the decoder at the edge.

What a user's `Cluster` and our own ClientApp share; it knows neither tasks nor data sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

from flwr.app import RecordDict
from torch import Tensor

from collapipe_flwr.cluster.control_unit import RoundResult, evaluate_batches, train_round
from collapipe_flwr.cluster.evaluation import EvalResult, PredictionConfig
from collapipe_flwr.cluster.fleet import RoundOrder
from collapipe_flwr.cluster.loader import Batches
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.federation import records
from collapipe_flwr.federation.node_state import OPTIMIZER, NodeState, recall_optimizer
from collapipe_flwr.federation.records import SplitTask
from collapipe_flwr.federation.site import Site
from collapipe_flwr.federation.telemetry import ClusterTelemetry
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.module_splitter import ModuleSplitter
from collapipe_flwr.models.splitter import Splitter, splitter_of
from collapipe_flwr.pipeline.step import MicroBatch
from collapipe_flwr.pipeline.stowed import Lookup

Weights = Mapping[str, Tensor]
Steps = Iterable[Sequence[Mapping[str, Tensor]]]  # each of micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRound:
    """What the server asks of a cluster in one round."""

    server_round: int
    plan: ClusterPlan
    task: SplitTask

    @property
    def sizes(self) -> tuple[int, int]:
        """Examples of a step and of a micro-batch."""
        size = self.plan.micro_batch_size
        return size * self.plan.micro_batches, size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The largest tensors of an example that are planned for, without pictures."""
        splitter = splitter_of(self.task.model_spec_json)
        if isinstance(splitter, ModuleSplitter):
            return {name: shape[1:] for name, _, shape in splitter.spec.example if shape[1:]}
        texts = isinstance(splitter, Splitter) and splitter.input_name == "input_ids"
        return {"input_ids": (self.task.shape.source_length,)} if texts else {}

    @staticmethod
    def of(content: RecordDict) -> PipelineRound:
        """The round that a message asks for; raises ProtocolError where it asks for none."""
        assignment = records.read_assignment(content)
        if assignment.split is None or assignment.plan is None:
            raise ProtocolError(
                "the server sent neither a plan with an edge nor a whole task: its strategy needs "
                "a model to split, CollaPipe(..., model=SplitModel(...))"
            )
        return PipelineRound(
            server_round=assignment.server_round, plan=assignment.plan, task=assignment.split
        )

    def run(
        self,
        site: Site,
        weights: Weights,
        batches: Batches,
        state: NodeState | None,
    ) -> tuple[RoundResult, tuple[str, ...]]:
        """One optimizer step per batch; also the devices absent at the end.

        The optimizer goes on from ``state``, or starts anew without one. Raises as `train_round`.
        """
        splitter = splitter_of(self.task.model_spec_json)
        with site.devices(self.task, splitter) as devices:
            order = replace(
                self._order(splitter, weights, site), batches=batches.num_batches(self.sizes[0])
            )
            if state is not None:
                order = replace(order, slots=recall_optimizer(state), keep_optimizer=True)
            result = train_round(
                splitter,
                order,
                _micro_batches(splitter, batches.steps(*self.sizes)),
                devices.fleet,
                _micro_batches(splitter, batches.probe(*self.sizes)),
                recovery=devices.recovery,
            )
            if state is not None:
                state.remember(OPTIMIZER, result.slots)
            if self.task.whole:
                edge = devices.edge.fetch_weights()
                result = replace(result, weights=Lookup.of(edge, result.weights))
            return result, devices.absent()

    def completed(self, sent: Weights, trained: Lookup[Tensor]) -> Lookup[Tensor]:
        """What the reply holds: what was trained, or all that was ``sent``, brought up to date."""
        if not self.task.whole:
            return trained
        aliases = splitter_of(self.task.model_spec_json).aliases
        changed = {key: name for key in sent if (name := aliases.get(key, key)) in trained}
        fresh = {key: partial(trained.__getitem__, name) for key, name in changed.items()}
        return Lookup.of(sent, Lookup(fresh))

    def test(
        self,
        site: Site,
        weights: Weights,
        steps: Steps,
        wanted: PredictionConfig | None,
    ) -> EvalResult:
        """Loss of the chain on batches of micro-batches, and predictions where ``wanted``.

        A model whose embedding holds borrowed rows only cannot generate, so it predicts nothing.
        """
        splitter = splitter_of(self.task.model_spec_json)
        if wanted is not None and wanted.generates(splitter.decodes) and splitter.ties:
            wanted = None
        with site.devices(self.task, splitter) as devices:
            return evaluate_batches(
                splitter,
                self._order(splitter, weights, site),
                _micro_batches(splitter, steps),
                devices.fleet,
                recovery=devices.recovery,
                wanted=wanted,
            )

    def _order(self, splitter: AnySplitter, weights: Weights, site: Site) -> RoundOrder:
        return RoundOrder(
            plan=self.plan,
            weights=weights,
            learning=self.task.learning,
            dropout_seed=self._dropout_seed(splitter),
            server_round=self.server_round,
            compute=site.place,
        )

    def _dropout_seed(self, splitter: AnySplitter) -> int | None:
        """One per run, cluster and round; None for a model that drops nothing, which is faster."""
        if not splitter.drops:
            return None
        place = f"{self.task.learning.seed}/{self.plan.cluster_id}/{self.server_round}"
        return int.from_bytes(sha256(place.encode()).digest()[:6], "big")


def _micro_batches(splitter: AnySplitter, steps: Steps) -> Iterator[list[MicroBatch]]:
    for step in steps:
        yield [
            MicroBatch(
                inputs=tensors,
                context=splitter.context(tensors),
                weight=splitter.weight_of(tensors),
            )
            for tensors in step
        ]


def telemetry(
    result: RoundResult, batches: Batches, absent: tuple[str, ...], *, wall_s: float
) -> ClusterTelemetry:
    """What a round of ``wall_s`` seconds measured, from its message to its reply."""
    replanned = any(incident.lost for incident in result.incidents)
    return ClusterTelemetry(
        cluster_id=result.plan.cluster_id,
        examples=batches.examples * batches.epochs,
        wall_s=wall_s,
        losses=result.losses,
        reports=result.reports,
        moved=result.moved,
        replanned=result.plan if replanned else None,
        incidents=tuple(str(incident) for incident in result.incidents),
        absent=absent,
        quarantined=result.quarantined,
        fresh_examples=batches.fresh_examples,
        prequential_loss=result.probe.loss if batches.fresh_examples else None,
    )
