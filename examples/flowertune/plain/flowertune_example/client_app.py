"""The ClientApp: tunes and tests the global adapters on the dialogs of its node."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from flowertune_example.task import get_model, load_data
from flowertune_example.task import test as test_fn
from flowertune_example.task import train as train_fn

app = ClientApp()


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
    model = get_model(context.run_config["model-name"])
    set_peft_model_state_dict(model, msg.content["arrays"].to_torch_state_dict())
    loss = train_fn(model, trainloader, epochs, msg.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainloader.dataset)})
    arrays = ArrayRecord(get_peft_model_state_dict(model))
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the adapters on local data."""
    _, testloader = load_partition(context)
    model = get_model(context.run_config["model-name"])
    set_peft_model_state_dict(model, msg.content["arrays"].to_torch_state_dict())
    metrics = {"eval_loss": test_fn(model, testloader), "num-examples": len(testloader.dataset)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
