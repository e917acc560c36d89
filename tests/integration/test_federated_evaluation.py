"""Clusters evaluate by the path that training takes: their mean loss is the server's loss."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from collapipe_flwr.cluster.local_data import DataPlace, LocalData
from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.errors import DataError
from collapipe_flwr.core.keys import Value
from tests.integration.conftest import RunApp, events_of
from tests.tiny_tasks import TASKS, task_values

FEDERATED: dict[str, Value] = {"evaluation.federated": True}
SHARES: dict[str, Value] = {
    **FEDERATED,
    "num-server-rounds": 1,
    "data.train-examples": 0,
    "data.test-examples": 7,
    "data.test-answers": 0,  # which the server generates alone
    "data.max-target-length": 12,
    "train.examples-per-round": 8,
    "train.learning-rate": 0.01,
    "scheduler.micro-batch-sizes": "2",
    "scheduler.micro-batches": "2",
    "world.memory-share": 1.0,
    "scheduler.policy": "random",
}


@pytest.mark.parametrize("runtime", ["pipeline", "whole"])
def test_the_clusters_find_the_loss_that_the_server_finds(run_app: RunApp, runtime: str) -> None:
    found = events_of(run_app({**FEDERATED, "runtime": runtime, "data.test-examples": 13}))
    assert len(found) == 2
    for event in found:
        assert event["clusters_loss"] == pytest.approx(event["metrics"]["loss"], rel=1e-5)
    assert found[0]["clusters_loss"] != pytest.approx(found[1]["clusters_loss"], rel=1e-3)


# A whole model is evaluated in one way for all tasks that neither generate nor cut their texts
# into blocks; and so are parts of one.
QUICK = {
    ("pipeline", "token-classification"),
    ("pipeline", "causal-lm"),
    ("pipeline", "translation"),
    ("whole", "classification"),
}


@pytest.mark.parametrize(
    ("runtime", "task"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(("pipeline", "whole"), TASKS)
    ],
)
def test_the_clusters_find_the_metrics_that_the_server_finds(
    run_app: RunApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, runtime: str
) -> None:
    """On shares of unlike sizes, so that an average of averages would be another number."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    values = {**task_values(task, tmp_path), **SHARES, "runtime": runtime}
    if task in ("translation", "summarisation"):  # until the model says something
        values |= {"train.examples-per-round": 100, "train.learning-rate": 0.03}
    (event,) = events_of(run_app(values))
    found, expected = event["clusters_metrics"], event["metrics"]
    assert set(found) == set(expected) - {"loss"}
    if task == "causal-lm":  # blocks are cut within a share, so some tokens are other targets
        assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=0.05)
        return
    assert event["clusters_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-5), name
    assert any(found.values())


def test_clusters_are_not_asked_by_default(shared_run: RunApp) -> None:
    assert [event["clusters_loss"] for event in events_of(shared_run())] == [None, None]


def test_evaluating_changes_nothing_that_is_learnt(run_app: RunApp, shared_run: RunApp) -> None:
    plain = events_of(shared_run())
    asked = events_of(run_app(FEDERATED))
    assert [e["metrics"] for e in plain] == [e["metrics"] for e in asked]


def test_too_few_test_examples() -> None:
    data = LocalData(parse({"data.test-examples": 1}), DataPlace(index=0, count=2), None)
    with pytest.raises(DataError, match="1 test examples are too few for 2 clusters"):
        list(data.cut_test_steps(batch_size=4, micro_batch_size=2))
