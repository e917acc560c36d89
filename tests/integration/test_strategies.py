"""Strategies by run-config, on the split model and on the unsplit one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from collapipe_flwr.config.schema import STRATEGIES
from collapipe_flwr.core.keys import Value
from tests.integration.conftest import RunApp, events_of
from tests.rounds import largest_difference

ALONE: dict[str, Value] = {
    "clusters": 1,
    "world.memory-share": 1.0,
    "scheduler.micro-batches": "2",
    "num-server-rounds": 1,
    "train.decay": "none",
}


def _weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "model.safetensors")


def test_fedprox_pulls_every_part_as_it_pulls_the_unsplit_model(run_app: RunApp) -> None:
    prox: dict[str, Value] = {
        **ALONE,
        "strategy": "fedprox",
        "strategy-arguments": "proximal_mu=20.0",
    }
    split = _weights(run_app({**prox, "run-name": "split"}))
    whole = _weights(run_app({**prox, "run-name": "whole", "runtime": "whole"}))
    plain = _weights(run_app({**ALONE, "run-name": "plain"}))
    assert largest_difference(split, whole) < 1e-5
    assert largest_difference(split, plain) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"fedavg", "fedprox"}))
def test_every_strategy_trains_a_split_model(run_app: RunApp, name: str) -> None:
    private = {"noise_multiplier": 0.01}
    if name == "dp-fixed-clipping":
        private["clipping_norm"] = 1.0
    arguments = " ".join(f"{k}={v}" for k, v in private.items()) if "dp-" in name else ""
    run_dir = run_app(
        {
            "strategy": name,
            "strategy-arguments": arguments,
            "clusters": 3,
            "world.devices": "raspberry-pi-4,jetson-nano,phone;" * 3,
            "train.examples-per-round": 16,
        }
    )
    events = events_of(run_dir)
    assert len(events) == 2
    assert all(0 < event["metrics"]["loss"] < 50 for event in events)
