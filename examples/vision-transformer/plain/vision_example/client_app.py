"""The ClientApp: trains and tests the global model on the data of its node."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from vision_example.task import VisionTransformer, load_data
from vision_example.task import test as test_fn
from vision_example.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    trainloader, _ = load_data(context.node_config["partition-id"])
    epochs = context.run_config["local-epochs"]
    model = VisionTransformer()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss = train_fn(model, trainloader, epochs, msg.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainloader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the model on local data."""
    _, testloader = load_data(context.node_config["partition-id"])
    model = VisionTransformer()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss, accuracy = test_fn(model, testloader)
    metrics = {"eval_loss": loss, "accuracy": accuracy, "num-examples": len(testloader.dataset)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
