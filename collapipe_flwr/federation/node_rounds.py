"""One round of a node: through the planned pipeline, or on the unsplit model.

Both kinds of round are made from a message (`round_of`), train on a cluster's examples and
evaluate its share of the test set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flwr.app import MetricRecord, RecordDict
from torch import Tensor

from collapipe_flwr.cluster.evaluation import (
    EvalResult,
    TestPart,
    prediction_config,
    tally_of,
)
from collapipe_flwr.cluster.local_data import LocalData, RoundExamples
from collapipe_flwr.cluster.unsplit import evaluate_unsplit, train_unsplit
from collapipe_flwr.federation import records
from collapipe_flwr.federation.arrays import take_record
from collapipe_flwr.federation.node import Node
from collapipe_flwr.federation.node_state import OptimizerMemory
from collapipe_flwr.federation.pipeline_round import (
    PipelineRound,
    Weights,
    splitter_for,
    telemetry,
)
from collapipe_flwr.federation.records import UnsplitTask
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.state import between_rounds, load_optimizer_state, optimizer_state_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRound(PipelineRound):
    """A planned round on the examples of a node."""

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

    def evaluate(self, node: Node, weights: Weights, data: LocalData) -> MetricRecord:
        """Loss and metric counts of the pipeline on the cluster's share of the test set."""
        splitter = splitter_for(self.task.model_spec_json)
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
        splitter = splitter_for(self.task.model_spec_json)
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
        splitter = splitter_for(self.task.model_spec_json)
        steps = list(data.test_steps(**self.sizes))
        batches = [[part.tensors for part in step] for step in steps]
        model, wanted = splitter.build_whole(weights), prediction_config(data.task)
        return _test_record(data, steps, evaluate_unsplit(splitter, model, batches, wanted))


def round_of(content: RecordDict) -> NodeRound | WholeRound:
    """The round that a message asks for; raises ProtocolError where it asks for none."""
    whole = records.read_unsplit_task(content)
    if whole is not None:
        return WholeRound(server_round=records.flower_round(content), task=whole)
    return NodeRound.of(content)


def reply(weights: dict[str, Tensor], losses: Sequence[float], examples: int) -> RecordDict:
    """``weights`` are handed over: the dictionary is empty afterwards."""
    loss = sum(losses) / max(len(losses), 1)
    metrics = MetricRecord({"loss": loss, records.EXAMPLES: examples})
    return RecordDict({records.ARRAYS: take_record(weights), records.METRICS: metrics})


def _test_record(
    data: LocalData, steps: Sequence[Sequence[TestPart]], tested: EvalResult
) -> MetricRecord:
    """The mean loss and its weight, and the counts of every metric."""
    parts = [part for step in steps for part in step] if tested.predictions else []
    predictions = [ids for step in tested.predictions for ids in step]
    counts = records.tally_metrics(tally_of(data.task, parts, predictions))
    return MetricRecord({"loss": tested.loss, records.EXAMPLES: tested.targets, **counts})
