"""Runs whose model is tied across machines learn what whole tied models learn."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from collapipe_flwr.core.keys import Value
from collapipe_flwr.reporting.run_directory import read_events
from tests.closeness import assert_near
from tests.integration.conftest import RunApp

T5 = (
    "d_model=16 num_layers=4 num_decoder_layers=1 num_heads=2 d_kv=8 d_ff=24 dropout_rate=0.0 "
    "initializer_factor=0.3"
)


@pytest.mark.parametrize(
    ("model", "choices"),
    [
        ("marian", {"model.ties": "rows"}),
        ("t5", {"model.type": "t5", "model.overrides": T5, "model.shared": "sum"}),
    ],
)
def test_a_tied_model_learns_as_in_one_piece(
    model: str, choices: dict[str, Value], run_app: RunApp
) -> None:
    batch: dict[str, Value] = {
        **choices,
        "num-server-rounds": 1,
        "scheduler.policy": "dssda",
        "scheduler.micro-batch-sizes": "3",
        "scheduler.micro-batches": "3",
    }
    if model == "t5":
        batch["world.memory-share"] = 0.00012
    split = run_app({**batch, "run-name": "split"})
    whole = run_app({**batch, "run-name": "whole", "runtime": "whole"})
    assert _segments(split) > 1
    found, expected = (load_file(run / "model/model.safetensors") for run in (split, whole))
    assert_near(found, expected, depth=16)


def _segments(run_dir: Path) -> int:
    first = read_events(run_dir)[0]
    return max(len(cluster["segments"]) for cluster in first["plan"]["clusters"])
