"""A round on the unsplit model in this process, for plain strategies: every comparison's peer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict

from collapipe_flwr.cluster.unsplit import evaluate_unsplit, train_unsplit
from collapipe_flwr.federation import records
from collapipe_flwr.federation.arrays import take_record, take_tensors
from collapipe_flwr.federation.node import Node
from collapipe_flwr.federation.node_state import OPTIMIZER, recall_optimizer
from collapipe_flwr.federation.records import UnsplitTask
from collapipe_flwr.models.splitter import splitter_of
from collapipe_flwr.pipeline.compute import hold, home
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.state import between_rounds, load_optimizer_state, optimizer_state_of


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsplitRound:
    """What a plain strategy's message asks of a node."""

    node: Node
    message: Message
    task: UnsplitTask

    @staticmethod
    def of(message: Message, context: Context) -> UnsplitRound | None:
        """The round that ``message`` asks for; None where its model is split."""
        task = records.read_unsplit_task(message.content)
        if task is None:
            return None
        node = Node.of(context)
        torch.set_num_threads(node.config.train.threads)
        return UnsplitRound(node=node, message=message, task=task)

    def train(self) -> Message:
        """A reply with trained weights and the mean loss."""
        config, asked = self.node.config, self.task
        state = self.node.state(self.message)
        keeps = config.train.optimizer_state == "keep"
        examples = self.node.examples(self.message)
        splitter = splitter_of(asked.model_spec_json)
        weights = take_tensors(self.message.content.array_records[records.ARRAYS])
        model = hold(splitter.build_whole(weights, trains=True), self.node.site.place)
        optimizer = Optimizer(asked.optimizers[state.server_round - 1], model.named_parameters())
        load_optimizer_state(optimizer, recall_optimizer(state) if keeps else {})
        steps = examples.steps(asked.batch_size, asked.micro_batch_size)
        rates = optimizer.settings.rates(batches=examples.num_batches(asked.batch_size))
        losses = train_unsplit(splitter, model, optimizer, steps, asked.execution, rates)
        if keeps:
            state.remember(OPTIMIZER, between_rounds(optimizer_state_of(optimizer)))
        loss = sum(losses) / max(len(losses), 1)
        metrics = MetricRecord({"train_loss": loss, records.EXAMPLES: examples.examples})
        arrays = take_record(dict(home(splitter.trained_weights(model))))
        content = RecordDict({records.ARRAYS: arrays, records.METRICS: metrics})
        return Message(content, reply_to=self.message)

    def evaluate(self) -> Message:
        """A reply with loss and metric counts of the cluster's share of the test set."""
        splitter = splitter_of(self.task.model_spec_json)
        test = self.node.test(self.message)
        batches = test.steps(self.task.batch_size, self.task.micro_batch_size)
        weights = take_tensors(self.message.content.array_records[records.ARRAYS])
        model = hold(splitter.build_whole(weights), self.node.site.place)
        found = evaluate_unsplit(splitter, model, batches, test.wanted)
        metrics = MetricRecord({"eval_loss": found.loss, **test.scores(found)})
        return Message(RecordDict({records.METRICS: metrics}), reply_to=self.message)
