"""A run of the apps in a tool is the run of its folder, also when it died and was resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from collapipe_flwr.core.keys import Value
from collapipe_flwr.federation.strategy import CollaPipe
from tests.integration.conftest import RunApp, events_of
from tests.integration.test_resume import _dying
from tests.power_cuts import Killed


def test_a_run_that_was_trained_again_after_it_died_is_in_tensorboard_once(
    run_app: RunApp, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[str, Value] = {
        "num-server-rounds": 2,
        "train.examples-per-round": 20,
        "checkpoint-every": 2,  # the first round is lost with the second
        "reporting.sinks": "tensorboard",
    }
    folder = tmp_path / "runs" / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        _dying(patch, CollaPipe, "aggregate_train", 2)
        run_app(values)
    run_app({**values, "resume": str(folder)})
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    shown = {
        tag: {e.step: e.value for e in accumulator.Scalars(tag)}
        for tag in accumulator.Tags()["scalars"]
    }
    events = events_of(folder)
    losses = {event["round_index"]: event["loss"] for event in events}
    assert [e.step for e in accumulator.Scalars("train/loss")] == [1, 2]
    assert shown["train/loss"] == pytest.approx(losses)
    assert [e.step for e in accumulator.Scalars("test/loss")] == [0, 1, 2]
    for event in events:
        for device, joules in event["energy_j"].items():
            path = f"device/energy_joules/{device}"
            assert shown[path][event["round_index"]] == pytest.approx(joules)
