"""Runs whose clusters train privately: accounts are kept, and the run ends in time."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from collapipe_flwr.config.schema import AppConfig, parse
from collapipe_flwr.core.keys import Value
from collapipe_flwr.federation.privacy_account import Charge, count_epsilon, read_charges
from collapipe_flwr.federation.run.learner import make_learner
from collapipe_flwr.federation.strategy import CollaPipe
from collapipe_flwr.pipeline.private_activations import PrivateActivations
from tests.integration.conftest import RunApp, events_of
from tests.integration.test_resume import die_and_resume
from tests.integration.test_tasks import QUICK
from tests.tiny_tasks import task_values

pytest.importorskip("dp_accounting")

DELTA = 1e-3
PRIVATE: dict[str, Value] = {
    "privacy.labels": "home",
    "privacy.clip-norm": 1.0,
    "privacy.noise-multiplier": 4.0,
    "privacy.delta": DELTA,
    "train.examples-per-round": 12,
    "scheduler.micro-batch-sizes": "3",
    "data.partition": "iid",
    "num-server-rounds": 4,
    "evaluation.every": 4,
}


def spent(batches: list[int], examples: int) -> float:
    """The epsilon of rounds with these batches."""
    charges = [
        Charge(examples=examples, batch=size, noise_multiplier=4.0, steps=-(-12 // size))
        for size in batches
    ]
    return count_epsilon(charges, DELTA)


def batches_of(event: dict[str, Any], cluster: int) -> int:
    plan = event["plan"]["clusters"][cluster]
    assert plan["micro_batch_size"] == 1
    count: int = plan["micro_batches"]
    return count


@pytest.mark.slow
def test_a_run_ends_before_a_round_that_its_budget_does_not_allow(
    run_app: RunApp, tmp_path: Path
) -> None:
    budget = spent([9, 9], 60) * 1.01
    state = tmp_path / "state"
    folder = run_app({**PRIVATE, "privacy.max-epsilon": budget, "train.state-dir": str(state)})
    summary, events = json.loads((folder / "summary.json").read_text()), events_of(folder)
    assert summary["status"] == "completed"
    assert 2 <= len(events) < 4
    assert any("privacy.max-epsilon" in note for note in summary["notes"])
    assert (folder / "model").is_dir()
    for done, event in enumerate(events, start=1):
        assert event["loss"] is None
        for index, (cluster, epsilon) in enumerate(sorted(event["epsilon"].items())):
            wanted = spent([batches_of(each, index) for each in events[:done]], 60)
            assert epsilon == pytest.approx(wanted), cluster
            assert epsilon <= budget
    accounts = [read_charges(path) for path in sorted(state.rglob("privacy.jsonl"))]
    assert [len(account) for account in accounts] == [len(events)] * 2


def test_a_run_that_is_resumed_goes_on_with_its_accounts(run_app: RunApp, tmp_path: Path) -> None:
    """The order whose round came to nothing stays charged: the server may have seen the reply."""
    state = tmp_path / "state"
    values: dict[str, Value] = {**PRIVATE, "num-server-rounds": 2, "train.state-dir": str(state)}
    moment = (CollaPipe, "aggregate_train", 2)  # clusters have replied, the server dies
    folder = die_and_resume(run_app, tmp_path / "runs", values, moment)
    events = events_of(folder)
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    accounts = [read_charges(path) for path in sorted(state.rglob("privacy.jsonl"))]
    assert [len(account) for account in accounts] == [3, 3]  # two rounds, one of them twice
    for index, (cluster, account) in enumerate(
        zip(sorted(events[1]["epsilon"]), accounts, strict=True)
    ):
        first, again, last = (charge.batch for charge in account)
        assert first == batches_of(events[0], index)
        assert again == last == batches_of(events[1], index)
        for event, batches in zip(events, ([first], [first, again, last]), strict=True):
            assert event["epsilon"][cluster] == pytest.approx(spent(batches, 60)), cluster


def noised(folder: Path, **values: Value) -> dict[str, Value]:
    """A run whose clusters, of 9 examples each, use 12 a round: each of them up to twice."""
    return {
        **task_values("classification", folder),
        **QUICK,
        "privacy.noise-on": "activations",
        "privacy.trusted-blocks": 1,
        "model.frozen-blocks": 1,
        "privacy.clip-norm": 4.0,
        "privacy.noise-multiplier": 4.0,
        "privacy.delta": DELTA,
        "world.trusted": 1,
        "train.examples-per-round": 12,
        "train.state-dir": str(folder / "state"),
        "data.partition": "iid",
        "num-server-rounds": 4,
        **values,
    }


def test_a_run_with_noise_on_activations_counts_visits_and_ends_in_time(
    run_app: RunApp, tmp_path: Path
) -> None:
    visits = Charge(examples=9, batch=9, noise_multiplier=4.0, steps=2)
    budget = count_epsilon([visits] * 3, DELTA) * 1.01
    values = noised(tmp_path, **{"privacy.max-epsilon": budget})
    folder = run_app(values)
    summary, events = json.loads((folder / "summary.json").read_text()), events_of(folder)
    assert summary["status"] == "completed"
    assert any("privacy.max-epsilon" in note for note in summary["notes"])
    assert len(events) == 3
    for done, event in enumerate(events, start=1):
        assert event["loss"] > 0  # of noised states, so it tells no more
        spent_s = [count_epsilon([visits] * done, DELTA)] * 2
        assert list(event["epsilon"].values()) == pytest.approx(spent_s)
    assert summary["epsilon"] == events[-1]["epsilon"]
    learner, seed = make_learner(config := parse(values)), config.run.seed
    before, after = (
        learner.splitter.initial_weights(seed),
        load_file(folder / "model" / "model.safetensors"),
    )
    kept = {key for key in after if torch.equal(before[key], after[key])}
    assert kept == {key for key in after if "embeddings" in key or ".layer.0." in key}


def test_a_server_that_has_clusters_test_with_noise_on_activations_is_refused(
    run_app: RunApp,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(AppConfig, "_check_noise", lambda _: None)
    with caplog.at_level(logging.INFO, logger="flwr"):
        run_app(noised(tmp_path, **{"evaluation.federated": True, "num-server-rounds": 1}))
    assert "aggregate_evaluate: Received 0 results and 2 failures" in caplog.text
    assert "covers examples of training alone" in caplog.text


def test_a_control_unit_that_keeps_frozen_blocks_adds_noise_to_what_it_kept(
    run_app: RunApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no device is trusted; and what is read from the disk gets new noise at every visit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seen, perturb = [], PrivateActivations.__call__

    def note(self: PrivateActivations, *given: Any) -> torch.Tensor:
        seen.append((self._noise.behind, self._noise.secret, *self.at))
        return perturb(self, *given)

    monkeypatch.setattr(PrivateActivations, "__call__", note)
    kept: dict[str, Value] = {"cache.max-gb": 1.0, "cache.dropout": "off"}
    untrusted: dict[str, Value] = {"privacy.trusted-blocks": 0, "world.trusted": 0}
    run_app(noised(tmp_path, **kept, **untrusted, **{"num-server-rounds": 2}))
    assert len(set(seen)) == len(seen) > 0
    assert {behind for behind, *_ in seen} == {0}
    assert len({secret for _, secret, *_ in seen}) == 4  # of two clusters in two rounds
