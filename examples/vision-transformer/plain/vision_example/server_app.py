"""The ServerApp: FedAvg, tested by the clients and on images of its own."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from vision_example.task import VisionTransformer, load_data
from vision_example.task import test as test_fn

app = ServerApp()


def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the global model on images that no client has."""
    model = VisionTransformer()
    model.load_state_dict(arrays.to_torch_state_dict())
    _, testloader = load_data(1000)
    loss, accuracy = test_fn(model, testloader)
    return MetricRecord({"loss": loss, "accuracy": accuracy})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured rounds and save the model."""
    torch.manual_seed(0)
    model = VisionTransformer()
    strategy = FedAvg(fraction_train=1.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    torch.save(result.arrays.to_torch_state_dict(), context.run_config["output"])
