"""The ServerApp: FedAvg, tested by the clients."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr import CollaPipe, OptimizerConfig, SplitModel  # CollaPipe
from huggingface_example.task import BATCH_SIZE, MAX_LENGTH, get_model  # CollaPipe

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured rounds and save the model."""
    model = get_model(context.run_config["model-name"])
    strategy = FedAvg(fraction_train=1.0)
    split = SplitModel(model, batch_size=BATCH_SIZE, length=MAX_LENGTH)  # CollaPipe
    optimizer = OptimizerConfig(name="adamw", eps=1e-6)  # CollaPipe
    strategy = CollaPipe(strategy, model=split, optimizer=optimizer)  # CollaPipe
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), context.run_config["output"])
