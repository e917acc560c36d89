"""The ClientApp: one Flower client is one cluster of devices. Decode, train, encode."""

from __future__ import annotations

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from collapipe_flwr.core.errors import unexpected_as_run_error
from collapipe_flwr.federation import records
from collapipe_flwr.federation.arrays import take_tensors
from collapipe_flwr.federation.node import Node
from collapipe_flwr.federation.node_rounds import round_of
from collapipe_flwr.federation.node_state import OptimizerMemory
from collapipe_flwr.host.allocator import configured_malloc

app = ClientApp()


@app.query("describe")
@unexpected_as_run_error()
def describe(message: Message, context: Context) -> Message:
    """Tell the server what this cluster is made of, or that the run has no place for it."""
    node = Node.of(context)
    content = records.write_spare() if node.is_spare else records.write_profile(node.profile())
    return Message(content, reply_to=message)


@app.train()
@unexpected_as_run_error()
@configured_malloc()
def train(message: Message, context: Context) -> Message:
    """One round: through the planned pipeline, or the whole model for a plain strategy."""
    node = Node.of(context)
    config = node.config
    torch.set_num_threads(config.train.threads)
    weights = take_tensors(message.content.array_records[records.ARRAYS])
    asked = round_of(message.content)
    progress = records.read_progress(message.content)
    state = node.state(asked.server_round, progress, asked.task.run_id)
    data = node.data(asked.task.vocabulary_json)
    memory = OptimizerMemory(state=state, keep=config.train.optimizer_state == "keep")
    examples = node.examples(data, state)
    return Message(asked.train(node, weights, examples, memory), reply_to=message)


@app.evaluate()
@unexpected_as_run_error()
@configured_malloc()
def evaluate(message: Message, context: Context) -> Message:
    """The loss on the cluster's share of the test set, by the path that training takes."""
    node = Node.of(context)
    torch.set_num_threads(node.config.train.threads)
    weights = take_tensors(message.content.array_records[records.ARRAYS])
    asked = round_of(message.content)
    found = asked.evaluate(node, weights, node.data(asked.task.vocabulary_json))
    return Message(RecordDict({records.METRICS: found}), reply_to=message)
