"""A ClientApp that knows nothing of CollaPipe."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import EXAMPLES, Net
from quickstart.task import test as test_model
from quickstart.task import train as train_model

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the global model on this node's partition."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    config = context.run_config
    partition = context.node_config["partition-id"]
    loss = train_model(net, partition, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": EXAMPLES})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the global model on points that nobody trains on."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss, accuracy = test_model(net, 500 + context.node_config["partition-id"])
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": EXAMPLES})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
