"""The sinks of a user's own project: the same object, called by the strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import Context, Message
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


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), "stopped"),
        (SystemExit(0), "stopped"),
        (SystemExit(128 + 15), "stopped"),
        (SystemExit(1), "failed"),
        (SystemExit("no such file"), "failed"),
        (ValueError(), "failed"),
    ],
)
def test_a_block_that_a_signal_ends_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: str
) -> None:
    endings: list[str] = []
    monkeypatch.setattr(Sinks, "close", lambda _sinks, status: endings.append(status))
    with pytest.raises(type(error)), Sinks("", tmp_path):
        raise error
    assert endings == [status]


def test_the_training_loss_of_clusters_is_written_under_the_name_that_flower_keeps(
    floats, drifting
) -> None:
    answer, losses = drifting(0.1, examples=4), []

    def cluster(message: Message, context: Context) -> Message:
        reply = answer(message, context)
        metrics = reply.content["metrics"]
        metrics["train_loss"] = metrics.pop("loss")  # as `Cluster` names it
        return reply

    for client in (answer, cluster):
        told = CollaPipe(FedAvg(), on_round=lambda r: losses.append(r.event(1.0).loss))
        told.start(LocalGrid({1: client, 2: client}), floats, num_rounds=1)
    assert losses == [0.25, 0.25]
