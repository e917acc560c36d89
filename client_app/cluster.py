"""One Flower client is one cluster of devices, described by the run-config."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from collapipe_flwr import Cluster
from collapipe_flwr.core.errors import wrap_unexpected
from collapipe_flwr.federation.client.node import Node, evaluate_whole, train_whole
from collapipe_flwr.federation.records import read_unsplit_task
from collapipe_flwr.host.allocator import use_one_heap

app = ClientApp()
cluster = Cluster(app, site=Node.site_of, examples=Node.examples_of)


@app.train()
@wrap_unexpected()
@use_one_heap()
def train(message: Message, context: Context) -> Message:
    """Train one round: through the planned pipeline, or the whole model for a plain strategy."""
    node, whole = Node.of(context), read_unsplit_task(message.content)
    if whole is not None:
        return train_whole(node, message, whole)
    return cluster.train(message, context, node.examples(message))


@app.evaluate()
@wrap_unexpected()
@use_one_heap()
def evaluate(message: Message, context: Context) -> Message:
    """Test on the cluster's share of the test set, along the path that training takes."""
    node, whole = Node.of(context), read_unsplit_task(message.content)
    if whole is not None:
        return evaluate_whole(node, message, whole)
    return cluster.evaluate(message, context, node.test(message))
