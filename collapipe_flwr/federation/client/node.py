"""A node of the app as a cluster: its run-config, its partition, its devices, its rounds.

If it learns from a stream, examples that arrived since the last round are evaluated first, then
trained on. The stream position is part of the node's `NodeState`, so rows of a round that the
server did not accept are fresh again. If the position is missing, all that has arrived counts as
read, so that nothing is fresh twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from collapipe_flwr.cluster.evaluation import (
    EvalResult,
    PredictionConfig,
    TestPart,
    choose_prediction,
    count_metrics,
)
from collapipe_flwr.cluster.local_data import (
    DataPlace,
    LocalData,
    LocalExamples,
    SampledExamples,
    load_local_data,
    read_own_data,
)
from collapipe_flwr.cluster.unsplit import evaluate_unsplit, train_unsplit
from collapipe_flwr.config.schema import AppConfig, parse
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.stream import Stream, StreamPlace, draw_stream_round
from collapipe_flwr.data.tokenizer import Vocabulary
from collapipe_flwr.federation import records
from collapipe_flwr.federation.arrays import take_record, take_tensors
from collapipe_flwr.federation.client import partition_of
from collapipe_flwr.federation.client.node_state import (
    OPTIMIZER,
    NodeState,
    StateCodec,
    recall_optimizer,
)
from collapipe_flwr.federation.client.site import Site
from collapipe_flwr.federation.products import check_rank
from collapipe_flwr.federation.records import UnsplitTask, asked_optimizer
from collapipe_flwr.models.splitter import splitter_of
from collapipe_flwr.pipeline.compute import bring_home, hold
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.state import (
    copy_optimizer_state,
    drop_round_start,
    load_optimizer_state,
)

log = logging.getLogger("flwr.collapipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a run: its configuration, its partition, its devices."""

    config: AppConfig
    place: DataPlace
    site: Site
    context: Context

    @staticmethod
    def of(context: Context) -> Node:
        """Parse run-config and ``--node-config``; raises ConfigError.

        Data files in the node's config take precedence over those of the run.
        """
        own = read_own_data(context.node_config)
        config = parse({**context.run_config, **own})
        index = partition_of(context.node_config)
        if index is None:
            raise ConfigError(
                "this node has no 'partition-id': start the SuperNode with "
                '--node-config "partition-id=0 num-partitions=2"'
            )
        place = DataPlace(index=index, count=config.run.clusters, own_data=bool(own))
        site = Site.of(context, config.world, config.edge, config.train)
        name = site.cluster.id if site.cluster else str(index)
        check_rank(site.rank, config.lora.rank, config.lora.aggregate, name)
        return Node(config=config, place=place, site=site, context=context)

    @staticmethod
    def site_of(context: Context) -> Site | None:
        """Return the node's devices; None for a node beyond the run's clusters."""
        node = Node.of(context)
        return node.site if node.place.index < node.place.count else None

    @staticmethod
    def examples_of(context: Context) -> int:
        """Count the examples in one of the node's rounds."""
        node = Node.of(context)
        return load_local_data(node.config, node.place, None).examples_per_round

    @property
    def sizes(self) -> tuple[int, int]:
        """Batch and micro-batch of the unsplit model: the largest that a plan may have."""
        grid = self.config.scheduler.settings
        size = max(grid.micro_batch_sizes)
        return size * max(grid.micro_batches), size

    def state(self, message: Message) -> NodeState:
        """Return the state that the node brings into the round of ``message``."""
        return self.site.state(message, self.context)

    def examples(self, message: Message) -> LocalExamples | SampledExamples:
        """Choose the examples of a round, from the node's partition or from its stream."""
        data, state = self._data(message), self.state(message)
        if self.config.data.stream:
            return _from_stream(self.config, data, state)
        if self.config.noise.on_gradients:
            return SampledExamples(
                data=data,
                round_index=state.server_round,
                largest_batch=self.config.largest_batch,
                examples=data.examples_per_round,
            )
        done = state.progress.rounds
        return LocalExamples(
            data=data,
            round_index=state.server_round,
            chosen=data.draw_examples(done),
            seen_share=data.seen_share(done + 1),
        )

    def test(self, message: Message) -> NodeTest:
        return NodeTest(data=self._data(message))

    def _data(self, message: Message) -> LocalData:
        """Load the node's examples, tokenized with the server's vocabulary."""
        vocabulary = _vocabulary(records.read_vocabulary(message.content))
        return load_local_data(self.config, self.place, vocabulary)


@dataclass(slots=True, kw_only=True)
class NodeTest:
    """A node's share of the test set, and the scores of predictions for it."""

    data: LocalData
    _parts: list[TestPart] = field(default_factory=list)

    @property
    def wanted(self) -> PredictionConfig:
        return choose_prediction(self.data.task)

    def cut_steps(
        self, batch_size: int, micro_batch_size: int
    ) -> Iterator[list[dict[str, Tensor]]]:
        """Yield the micro-batches of each batch; raises DataError if there is no example."""
        for step in self.data.cut_test_steps(batch_size, micro_batch_size):
            self._parts += step
            yield [dict(part.tensors) for part in step]

    def scores(self, found: EvalResult) -> dict[str, float | list[float]]:
        """Return the number of labels, which weighs the loss, and the counts of every metric."""
        predictions = [ids for step in found.predictions for ids in step]
        tally = count_metrics(self.data.task, self._parts if predictions else (), predictions)
        counts = {records.TALLY + name: value for name, value in tally.items()}
        return {records.EXAMPLES: found.targets, **counts}


_vocabulary = lru_cache(maxsize=4)(Vocabulary.from_json)


def _from_stream(config: AppConfig, data: LocalData, state: NodeState) -> LocalExamples:
    stream = data.open_stream(config.data.stream)
    rng = np.random.default_rng([config.run.seed, state.index, state.server_round])
    found = draw_stream_round(
        stream,
        _place(stream, state),
        data.past,
        limit=data.examples_per_round,
        replay_share=config.data.stream_replay,
        rng=rng,
    )
    state.remember(STREAM, found.place)
    fresh: list[Example] = found.fresh.to_list()
    chosen: list[Example] = fresh + found.replayed.to_list()
    return LocalExamples(
        data=data,
        round_index=state.server_round,
        chosen=[chosen[row] for row in rng.permutation(len(chosen))],
        fresh=fresh,
    )


def _place(stream: Stream, state: NodeState) -> StreamPlace:
    """Find the stream position after the cluster's accepted rounds."""
    place = state.recall(STREAM)
    if place is not None:
        return place
    if not state.progress.rounds:
        return ()
    place = stream.find_end()
    log.warning(
        "no place in data.stream of an earlier round here (a new SuperNode, or a resumed "
        "run): all %d examples that have arrived count as read%s",
        sum(file.read for file in place),
        state.advice,
    )
    return place


_parse_place = partial(from_json, StreamPlace, what="the place in data.stream")
STREAM: StateCodec[StreamPlace] = StateCodec(
    name="collapipe.stream",
    suffix=".json",
    write=lambda place, path: path.write_text(to_json(place), encoding="utf-8"),
    read=lambda path: _parse_place(path.read_text(encoding="utf-8")),
    encode=lambda place: ConfigRecord({"place": to_json(place)}),
    decode=lambda record: _parse_place(str(record["place"])),
)


def train_whole(node: Node, message: Message, asked: UnsplitTask) -> Message:
    """Train the unsplit model, as a plain strategy asks."""
    torch.set_num_threads(node.config.train.threads)
    state = node.state(message)
    keeps = node.config.train.optimizer_state == "keep"
    examples = node.examples(message)
    splitter = splitter_of(asked.model_spec_json)
    weights = take_tensors(message.content.array_records[records.ARRAYS])
    model = hold(splitter.build_whole(weights, trains=True), node.site.place)
    settings = asked_optimizer(message.content, node.config.optimizer(state.server_round))
    optimizer = Optimizer(settings, model.named_parameters())
    load_optimizer_state(optimizer, recall_optimizer(state) if keeps else {})
    steps = examples.cut_steps(*node.sizes)
    rates = settings.rates(batches=examples.count_batches(node.sizes[0]))
    losses = train_unsplit(splitter, model, optimizer, steps, node.config.execution, rates)
    if keeps:
        state.remember(OPTIMIZER, drop_round_start(copy_optimizer_state(optimizer)))
    loss = sum(losses) / max(len(losses), 1)
    metrics = MetricRecord({"train_loss": loss, records.EXAMPLES: examples.examples})
    arrays = take_record(dict(bring_home(splitter.trained_weights(model))))
    content = RecordDict({records.ARRAYS: arrays, records.METRICS: metrics})
    return Message(content, reply_to=message)


def evaluate_whole(node: Node, message: Message, asked: UnsplitTask) -> Message:
    """Evaluate the unsplit model, as a plain strategy asks."""
    torch.set_num_threads(node.config.train.threads)
    splitter, test = splitter_of(asked.model_spec_json), node.test(message)
    batches = test.cut_steps(*node.sizes)
    weights = take_tensors(message.content.array_records[records.ARRAYS])
    model = hold(splitter.build_whole(weights), node.site.place)
    found = evaluate_unsplit(splitter, model, batches, test.wanted)
    metrics = MetricRecord({"eval_loss": found.loss, **test.scores(found)})
    return Message(RecordDict({records.METRICS: metrics}), reply_to=message)
