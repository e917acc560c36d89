"""The ServerApp: FedAvg by itself, or within CollaPipe; writes when what happened."""

import json
import time
from functools import partial
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from rounds_app.task import LEARNING_RATE, example, get_model

app = ServerApp()


class Timed(FedAvg):
    """FedAvg that notes the ends of its phases."""

    def __init__(self) -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=1,
                         min_available_nodes=1)  # fmt: skip
        self.rounds: list[dict[str, float]] = []

    def configure_train(self, *args, **kwargs):
        """See `FedAvg`."""
        sent = super().configure_train(*args, **kwargs)
        self.rounds.append({"planned_s": time.time()})
        return sent

    def aggregate_train(self, server_round, replies):
        """See `FedAvg`."""
        self.rounds[-1]["received_s"] = time.time()
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.rounds[-1] |= {k: v for k, v in (metrics or {}).items() if k.endswith("_s")}
        return arrays, metrics


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured rounds."""
    config = context.run_config
    model = get_model(config["size"])
    timed = strategy = Timed()
    if config["edge"]:
        from collapipe_flwr import CollaPipe, EdgeConfig, SplitModel

        folder = Path(config["certs"])
        files = {
            "tls_ca": folder / "ca.pem",
            "tls_cert": folder / "server.pem",
            "tls_key": folder / "server.key",
        }
        edge = EdgeConfig(address=config["edge"], certificate_name="edge", **files)
        split = SplitModel(model, **example(config["size"]))
        optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=1e-6)
        strategy = CollaPipe(timed, model=split, optimizer=optimizer, edge=edge)
    ends_s: list[float] = []
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=lambda *_: ends_s.append(time.time()),
    )
    Path(config["marks"]).write_text(json.dumps({"ends_s": ends_s, "rounds": timed.rounds}))
