"""The ClientApp: trains and tests the global model on the data of its node."""

from flwr.app import Context, Message  # CollaPipe
from flwr.clientapp import ClientApp

from collapipe_flwr import Cluster  # CollaPipe
from vision_example.task import accuracy, load_data  # CollaPipe

app = ClientApp()
cluster = Cluster(app)  # CollaPipe


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    trainloader, _ = load_data(context.node_config["partition-id"])
    epochs = context.run_config["local-epochs"]
    return cluster.train(msg, context, trainloader, epochs=epochs)  # CollaPipe


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the model on local data."""
    _, testloader = load_data(context.node_config["partition-id"])
    return cluster.evaluate(msg, context, testloader, metrics=accuracy)  # CollaPipe
