"""One round of a node: through the planned pipeline, or on the unsplit model.

Both kinds of round are made from a message (`round_of`), train on a cluster's examples and
evaluate its share of the test set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256

from flwr.app import MetricRecord, RecordDict
from torch import Tensor

from collapipe_flwr.cluster.control_unit import RoundResult, evaluate_batches, train_round
from collapipe_flwr.cluster.evaluation import (
    EvalResult,
    PredictionConfig,
    TestPart,
    prediction_config,
    tally_of,
)
from collapipe_flwr.cluster.fleet import RoundOrder
from collapipe_flwr.cluster.local_data import LocalData, RoundExamples
from collapipe_flwr.cluster.unsplit import evaluate_unsplit, train_unsplit
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.federation import records
from collapipe_flwr.federation.arrays import take_record
from collapipe_flwr.federation.node import Node
from collapipe_flwr.federation.node_state import OptimizerMemory
from collapipe_flwr.federation.records import SplitTask, UnsplitTask
from collapipe_flwr.federation.site import Site
from collapipe_flwr.federation.telemetry import ClusterTelemetry
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.specs import splitter_of
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.state import between_rounds, load_optimizer_state, optimizer_state_of
from collapipe_flwr.pipeline.step import MicroBatch

Weights = Mapping[str, Tensor]
Batches = Iterable[Sequence[Mapping[str, Tensor]]]  # of micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRound:
    """Devices here, the decoder at the edge."""

    server_round: int
    plan: ClusterPlan
    task: SplitTask

    @property
    def sizes(self) -> dict[str, int]:
        """Examples of a step and of a micro-batch."""
        size = self.plan.micro_batch_size
        return {"batch_size": size * self.plan.micro_batches, "micro_batch_size": size}

    def train(
        self, node: Node, weights: Weights, examples: RoundExamples, memory: OptimizerMemory
    ) -> RecordDict:
        """Trained weights, losses and telemetry."""
        result, absent = self.run(
            node.site,
            weights,
            examples.steps(**self.sizes),
            examples.probe(**self.sizes),
            examples=examples.data.examples_per_round,
            batches=examples.num_batches(self.sizes["batch_size"]),
            memory=memory,
        )
        content = reply(result.weights, result.losses, len(examples.chosen))
        fresh = len(examples.fresh)
        told = telemetry(result, len(examples.chosen), absent)
        loss = result.probe.loss if fresh else None
        return records.write_telemetry(
            content, replace(told, fresh_examples=fresh, prequential_loss=loss)
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
        splitter = _splitter(self.task.model_spec_json)
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
        aliases = _splitter(self.task.model_spec_json).aliases
        return {key: trained.get(aliases.get(key, key), tensor) for key, tensor in sent.items()}

    def evaluate(self, node: Node, weights: Weights, data: LocalData) -> MetricRecord:
        """Loss and metric counts of the pipeline on the cluster's share of the test set."""
        splitter = _splitter(self.task.model_spec_json)
        steps = list(data.test_steps(**self.sizes))
        generates_blind = splitter.decodes and splitter.ties  # its embedding has borrowed rows only
        tested = self.test(
            node.site,
            weights,
            ([dict(part.tensors) for part in step] for step in steps),
            examples=data.examples_per_round,
            wanted=None if generates_blind else prediction_config(data.task),
        )
        return _test_record(data, steps, tested)

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
        splitter = _splitter(self.task.model_spec_json)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRound:
    """The whole model in this process, for a plain strategy."""

    server_round: int
    task: UnsplitTask

    @property
    def sizes(self) -> dict[str, int]:
        """Examples of a step and of a micro-batch."""
        return {"batch_size": self.task.batch_size, "micro_batch_size": self.task.micro_batch_size}

    def train(
        self, node: Node, weights: Weights, examples: RoundExamples, memory: OptimizerMemory
    ) -> RecordDict:
        """Trained weights and losses."""
        del node
        splitter = _splitter(self.task.model_spec_json)
        model = splitter.build_whole(weights, trains=True)
        optimizer = Optimizer(self.task.optimizers[self.server_round - 1], model.named_parameters())
        load_optimizer_state(optimizer, memory.recall())
        steps = examples.steps(**self.sizes)
        rates = optimizer.settings.rates(batches=examples.num_batches(self.task.batch_size))
        losses = train_unsplit(splitter, model, optimizer, steps, self.task.execution, rates)
        memory.remember(between_rounds(optimizer_state_of(optimizer)))
        return reply(splitter.trained_weights(model), losses, len(examples.chosen))

    def evaluate(self, node: Node, weights: Weights, data: LocalData) -> MetricRecord:
        """Loss and metric counts of the model on the cluster's share of the test set."""
        del node
        splitter = _splitter(self.task.model_spec_json)
        steps = list(data.test_steps(**self.sizes))
        batches = [[part.tensors for part in step] for step in steps]
        model, wanted = splitter.build_whole(weights), prediction_config(data.task)
        return _test_record(data, steps, evaluate_unsplit(splitter, model, batches, wanted))


def round_of(content: RecordDict) -> PipelineRound | WholeRound:
    """The round that a message asks for; raises ProtocolError where it asks for none."""
    whole = records.read_unsplit_task(content)
    if whole is not None:
        return WholeRound(server_round=records.flower_round(content), task=whole)
    assignment = records.read_assignment(content)
    if assignment.split is None or assignment.plan is None:
        raise ProtocolError(
            "the server sent neither a plan with an edge nor a whole task: its strategy needs a "
            "model to split, CollaPipe(..., model=SplitModel(...))"
        )
    return PipelineRound(
        server_round=assignment.server_round, plan=assignment.plan, task=assignment.split
    )


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


def reply(weights: dict[str, Tensor], losses: Sequence[float], examples: int) -> RecordDict:
    """``weights`` are handed over: the dictionary is empty afterwards."""
    loss = sum(losses) / max(len(losses), 1)
    metrics = MetricRecord({"loss": loss, records.EXAMPLES: examples})
    return RecordDict({records.ARRAYS: take_record(weights), records.METRICS: metrics})


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


def _test_record(
    data: LocalData, steps: Sequence[Sequence[TestPart]], tested: EvalResult
) -> MetricRecord:
    """The mean loss and its weight, and the counts of every metric."""
    parts = [part for step in steps for part in step] if tested.predictions else []
    predictions = [ids for step in tested.predictions for ids in step]
    counts = records.tally_metrics(tally_of(data.task, parts, predictions))
    return MetricRecord({"loss": tested.loss, records.EXAMPLES: tested.targets, **counts})


@lru_cache(maxsize=4)
def _splitter(model_spec_json: str) -> AnySplitter:
    return splitter_of(model_spec_json)
