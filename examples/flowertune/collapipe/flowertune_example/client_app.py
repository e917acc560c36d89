"""The ClientApp: tunes and tests the global adapters on the dialogs of its node."""

from flwr.app import Context, Message  # CollaPipe
from flwr.clientapp import ClientApp

from collapipe_flwr import Cluster  # CollaPipe
from flowertune_example.task import load_data  # CollaPipe

app = ClientApp()
cluster = Cluster(app)  # CollaPipe


def load_partition(context: Context):
    """The loaders of this node's partition."""
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    return load_data(partition_id, num_partitions, context.run_config["model-name"])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the adapters on local data."""
    trainloader, _ = load_partition(context)
    epochs = context.run_config["local-epochs"]
    return cluster.train(msg, context, trainloader, epochs=epochs)  # CollaPipe


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the adapters on local data."""
    _, testloader = load_partition(context)
    return cluster.evaluate(msg, context, testloader)  # CollaPipe
