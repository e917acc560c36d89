"""The ServerApp: FedAvg over adapters, with a learning rate that falls from round to round."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import get_peft_model_state_dict

from collapipe_flwr import CollaPipe, OptimizerConfig, SplitModel  # CollaPipe
from flowertune_example.task import BATCH_SIZE, MAX_LENGTH, cosine_annealing, get_model  # CollaPipe

app = ServerApp()


class FlowerTune(FedAvg):
    """FedAvg that gives every round its learning rate."""

    def __init__(self, rates: list[float]) -> None:
        super().__init__(fraction_train=1.0)
        self.rates = rates

    def configure_train(self, server_round, arrays, config, grid):
        """Add the learning rate to the round's config."""
        config = ConfigRecord({**config, "lr": self.rates[server_round - 1]})
        return super().configure_train(server_round, arrays, config, grid)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured rounds and save the adapters."""
    config = context.run_config
    model = get_model(config["model-name"])
    rounds = config["num-server-rounds"]
    ends = config["learning-rate-max"], config["learning-rate-min"]
    strategy = FlowerTune([cosine_annealing(number, rounds, *ends) for number in range(rounds)])
    split = SplitModel(model, batch_size=BATCH_SIZE, length=MAX_LENGTH)  # CollaPipe
    optimizer = OptimizerConfig(name="adamw", eps=1e-4)  # CollaPipe
    strategy = CollaPipe(strategy, model=split, optimizer=optimizer)  # CollaPipe
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(get_peft_model_state_dict(model)),
        num_rounds=rounds,
    )
    torch.save(result.arrays.to_torch_state_dict(), config["output"])
