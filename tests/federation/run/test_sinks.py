"""The sinks of a user's own project: the same object, called by the strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr import CollaPipe, LocalGrid, Sinks


def test_sinks_are_a_callback_of_any_wrapped_strategy(floats, drifting, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    grid = LocalGrid({n: drifting(0.1, examples=n) for n in (1, 2)})
    with Sinks("tensorboard", tmp_path / "mine", settings={"lr": 0.1}) as sinks:
        strategy = CollaPipe(FedAvg(), on_round=sinks)
        strategy.start(grid, floats, num_rounds=3)
        sinks.log(3, {"accuracy": 0.5})
    accumulator = EventAccumulator(str(tmp_path / "mine" / "tensorboard"))
    accumulator.Reload()
    assert [e.step for e in accumulator.Scalars("traffic/flower_bytes")] == [1, 2, 3]
    assert all(e.value > 0 for e in accumulator.Scalars("traffic/flower_bytes"))
    assert [(e.step, e.value) for e in accumulator.Scalars("test/accuracy")] == [(3, 0.5)]
