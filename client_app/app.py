"""The ClientApp: one Flower client is one cluster of devices. Decode, train, encode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from client_app.data import LocalData, Place, RoundExamples, local_data, own_data
from client_app.fleet import Crew, Site, cluster_file, open_crew
from client_app.node_state import NodeState
from client_app.online import examples_of_round
from client_app.optimizer_memory import OptimizerMemory
from collapipe_flwr.cluster.control_unit import (
    RoundResult,
    evaluate_batches,
    train_round,
)
from collapipe_flwr.cluster.evaluation import EvalResult, TestPart, prediction_config, tally_of
from collapipe_flwr.cluster.fleet import RoundOrder
from collapipe_flwr.cluster.unsplit import evaluate_unsplit, train_unsplit
from collapipe_flwr.core.config import AppConfig, parse
from collapipe_flwr.core.errors import ConfigError, ProtocolError, unexpected_as_run_error
from collapipe_flwr.data.vocabulary import Vocabulary
from collapipe_flwr.edge.allocator import tended_heap
from collapipe_flwr.federation import records
from collapipe_flwr.federation.arrays import take_record, take_tensors
from collapipe_flwr.federation.records import RoundAssignment, SplitTask, UnsplitTask
from collapipe_flwr.federation.telemetry import ClusterTelemetry
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import MicroBatch
from collapipe_flwr.pipeline.state import load_slots, slots_of

app = ClientApp()


@app.query("describe")
@unexpected_as_run_error()
def describe(message: Message, context: Context) -> Message:
    """Tell the server what this cluster is made of, or that the run has no place for it."""
    config, place = _settings(context)
    if place.index >= place.count:
        return Message(records.write_spare(), reply_to=message)
    examples = local_data(config, place, None).examples_per_round
    profile = Site(config=config, place=place, cluster=cluster_file(context)).profile(examples)
    return Message(records.write_profile(profile), reply_to=message)


@app.train()
@unexpected_as_run_error()
@tended_heap()
def train(message: Message, context: Context) -> Message:
    """One round: through the planned pipeline, or the whole model for a plain strategy."""
    config, place = _settings(context)
    torch.set_num_threads(config.train.threads)
    weights = take_tensors(message.content.array_records[records.ARRAYS])
    progress = records.read_progress(message.content)
    whole = records.read_unsplit_task(message.content)
    if whole is not None:
        data = local_data(config, place, _vocabulary(whole.vocabulary_json))
        server_round = records.flower_round(message.content)
        state = NodeState.of(config, place, context, server_round, progress, whole.run_id)
        examples, memory = examples_of_round(config, data, state), _memory(config, state)
        content = _train_whole(whole, memory, examples, weights)
    else:
        assignment, task = _assignment(message)
        data = local_data(config, place, _vocabulary(task.vocabulary_json))
        server_round, run_id = assignment.server_round, task.learning.run_id
        state = NodeState.of(config, place, context, server_round, progress, run_id)
        examples, memory = examples_of_round(config, data, state), _memory(config, state)
        with _crew(context, task, data) as crew:
            content = _train_split(assignment, examples, weights, crew, memory)
    return Message(content, reply_to=message)


@app.evaluate()
@unexpected_as_run_error()
@tended_heap()
def evaluate(message: Message, context: Context) -> Message:
    """The loss on the cluster's share of the test set, by the path that training takes."""
    config, place = _settings(context)
    torch.set_num_threads(config.train.threads)
    weights = take_tensors(message.content.array_records[records.ARRAYS])
    whole = records.read_unsplit_task(message.content)
    if whole is not None:
        data = local_data(config, place, _vocabulary(whole.vocabulary_json))
        found = _evaluate_whole(whole, data, weights)
    else:
        assignment, task = _assignment(message)
        data = local_data(config, place, _vocabulary(task.vocabulary_json))
        with _crew(context, task, data) as crew:
            found = _evaluate_split(assignment, data, weights, crew)
    return Message(RecordDict({records.METRICS: found}), reply_to=message)


def _memory(config: AppConfig, state: NodeState) -> OptimizerMemory:
    return OptimizerMemory(state=state, keep=config.train.optimizer_state == "keep")


def _assignment(message: Message) -> tuple[RoundAssignment, SplitTask]:
    """The plan of a round and its task at the edge; raises ProtocolError without them."""
    assignment = records.read_assignment(message.content)
    if assignment.split is None or assignment.plan is None:
        raise ProtocolError("the server sent neither a plan with an edge nor a whole task")
    return assignment, assignment.split


def _crew(context: Context, task: SplitTask, data: LocalData) -> AbstractContextManager[Crew]:
    """The devices of this node, joined to the edge session of ``task``."""
    config, place = _settings(context)
    site = Site(config=config, place=place, cluster=cluster_file(context))
    return open_crew(site, task, _splitter(task.model_spec_json), data.examples_per_round)


def _evaluate_split(
    assignment: RoundAssignment, data: LocalData, weights: Mapping[str, Tensor], crew: Crew
) -> MetricRecord:
    plan, task = assignment.plan, assignment.split
    assert plan is not None and task is not None
    splitter = _splitter(task.model_spec_json)
    steps = list(
        data.test_steps(
            batch_size=plan.micro_batch_size * plan.micro_batches,
            micro_batch_size=plan.micro_batch_size,
        )
    )
    order = _order(assignment, task, weights)
    batches = _micro_batches(splitter, ([dict(p.tensors) for p in step] for step in steps))
    generates_blind = splitter.decodes and splitter.ties  # its embedding has borrowed rows alone
    wanted = None if generates_blind else prediction_config(data.task)
    tested = evaluate_batches(
        splitter, order, batches, crew.fleet, recovery=crew.recovery, wanted=wanted
    )
    return _test_record(data, steps, tested)


def _evaluate_whole(
    task: UnsplitTask, data: LocalData, weights: Mapping[str, Tensor]
) -> MetricRecord:
    splitter = _splitter(task.model_spec_json)
    sizes = {"batch_size": task.batch_size, "micro_batch_size": task.micro_batch_size}
    steps = list(data.test_steps(**sizes))
    batches = [[part.tensors for part in step] for step in steps]
    model, wanted = splitter.build_whole(weights), prediction_config(data.task)
    return _test_record(data, steps, evaluate_unsplit(model, batches, splitter.task, wanted))


def _test_record(
    data: LocalData, steps: Sequence[Sequence[TestPart]], tested: EvalResult
) -> MetricRecord:
    """The mean loss and its weight, and the counts of every metric."""
    parts = [part for step in steps for part in step] if tested.predictions else []
    predictions = [ids for step in tested.predictions for ids in step]
    counts = records.tally_metrics(tally_of(data.task, parts, predictions))
    return MetricRecord({"loss": tested.loss, records.EXAMPLES: tested.targets, **counts})


def _train_split(
    assignment: RoundAssignment,
    examples: RoundExamples,
    weights: Mapping[str, Tensor],
    crew: Crew,
    memory: OptimizerMemory,
) -> RecordDict:
    """The round of a planned cluster: devices here, the decoder at the edge."""
    plan, task = assignment.plan, assignment.split
    assert plan is not None and task is not None
    splitter = _splitter(task.model_spec_json)
    order = _order(assignment, task, weights)
    order = replace(order, slots=memory.recall(), keep_optimizer=memory.keep)
    sizes = {
        "batch_size": plan.micro_batch_size * plan.micro_batches,
        "micro_batch_size": plan.micro_batch_size,
    }
    steps = _micro_batches(splitter, examples.steps(**sizes))
    probe = _micro_batches(splitter, examples.probe(**sizes))
    result = train_round(splitter, order, steps, crew.fleet, probe, recovery=crew.recovery)
    memory.remember(result.slots)
    content = _reply(result.weights, result.losses, examples)
    telemetry = replace(_telemetry(result, examples), absent=crew.absent())
    return records.write_telemetry(content, telemetry)


def _order(
    assignment: RoundAssignment, task: SplitTask, weights: Mapping[str, Tensor]
) -> RoundOrder:
    assert assignment.plan is not None
    splitter = _splitter(task.model_spec_json)
    return RoundOrder(
        plan=assignment.plan,
        weights=weights,
        optimizer=task.learning.optimizer,
        schedule=task.learning.schedule,
        deadline_s=task.learning.deadline_s,
        dropout_seed=_dropout_seed(splitter, assignment, task.learning.seed),
        execution=task.learning.execution,
    )


def _dropout_seed(splitter: Splitter, assignment: RoundAssignment, seed: int) -> int | None:
    """One seed per run, cluster and round; None for a model that drops nothing, which is faster."""
    settings = splitter.config.to_dict().items()
    lora = splitter.spec.lora
    shares = [p for name, p in settings if "drop" in name and isinstance(p, float)]
    if not any(share > 0 for share in (*shares, lora.dropout if lora else 0.0)):
        return None
    place = f"{seed}/{assignment.cluster_id}/{assignment.server_round}"
    return int.from_bytes(sha256(place.encode()).digest()[:6], "big")


def _train_whole(
    task: UnsplitTask,
    memory: OptimizerMemory,
    examples: RoundExamples,
    weights: Mapping[str, Tensor],
) -> RecordDict:
    """The same round on the unsplit model."""
    splitter = _splitter(task.model_spec_json)
    model = splitter.build_whole(weights)
    model.config.use_cache = False
    steps = examples.steps(batch_size=task.batch_size, micro_batch_size=task.micro_batch_size)
    optimizer = Optimizer(task.optimizers[memory.state.server_round - 1], model.parameters())
    load_slots(model, optimizer, memory.recall())
    losses = train_unsplit(model, optimizer, steps, splitter.task.targets, task.execution)
    memory.remember(slots_of(model, optimizer))
    return _reply(splitter.trained_weights(model), losses, examples)


def _micro_batches(
    splitter: Splitter, steps: Iterator[list[dict[str, Tensor]]]
) -> Iterator[list[MicroBatch]]:
    for step in steps:
        yield [
            MicroBatch(
                inputs=tensors,
                context=splitter.context(tensors),
                weight=splitter.task.targets(tensors["labels"]),
            )
            for tensors in step
        ]


def _reply(
    weights: dict[str, Tensor], losses: Sequence[float], examples: RoundExamples
) -> RecordDict:
    """``weights`` are handed over: the dictionary is empty afterwards."""
    metrics = MetricRecord(
        {"loss": sum(losses) / max(len(losses), 1), records.EXAMPLES: len(examples.chosen)}
    )
    return RecordDict({records.ARRAYS: take_record(weights), records.METRICS: metrics})


def _telemetry(result: RoundResult, examples: RoundExamples) -> ClusterTelemetry:
    replanned = any(incident.lost for incident in result.incidents)
    return ClusterTelemetry(
        cluster_id=result.plan.cluster_id,
        examples=len(examples.chosen),
        fresh_examples=len(examples.fresh),
        prequential_loss=result.probe.loss if examples.fresh else None,
        wall_s=result.wall_s,
        losses=result.losses,
        reports=result.reports,
        moved=result.moved,
        replanned=result.plan if replanned else None,
        incidents=tuple(str(incident) for incident in result.incidents),
    )


def _settings(context: Context) -> tuple[AppConfig, Place]:
    """The run-config, and which of its clusters this node is: ``--node-config`` tells SuperNodes.

    Files that the node names as its own go before those of the run. Raises ConfigError.
    """
    own = own_data(context.node_config)
    config = parse({**context.run_config, **own})
    index = context.node_config.get("partition-id")
    if index is None:
        raise ConfigError(
            "this node has no 'partition-id': start the SuperNode with "
            '--node-config "partition-id=0 num-partitions=2"'
        )
    return config, Place(index=int(index), count=config.run.clusters, own_data=bool(own))


@lru_cache(maxsize=4)
def _splitter(model_spec_json: str) -> Splitter:
    return Splitter(ModelSpec.from_json(model_spec_json))


@lru_cache(maxsize=4)
def _vocabulary(text: str) -> Vocabulary:
    return Vocabulary.from_json(text)
