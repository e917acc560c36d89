"""The same ServerApp with its strategy wrapped in CollaPipe."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr import CollaPipe
from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured rounds and save the model."""
    torch.manual_seed(0)
    strategy = CollaPipe(FedAvg())
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), context.run_config["output"])
