"""The two apps together: what a run leaves behind, and what it refuses to start."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

from collapipe_flwr.core.errors import CollaPipeError, RunError
from collapipe_flwr.core.keys import Value
from tests.closeness import assert_near
from tests.integration.conftest import RunApp, events_of


def _summary(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def test_a_run_leaves_summary_events_and_a_model_that_transformers_loads(
    shared_run: RunApp,
) -> None:
    run_dir = shared_run()
    summary = _summary(run_dir)
    assert summary["status"] == "completed"
    assert summary["rounds"] == len(summary["loss"]) == 2
    assert summary["loss"][1] < summary["loss"][0]
    assert summary["metric"]["name"] == "exact_match"
    assert all(latency_s > 0 for latency_s in summary["predicted_latency_s"])
    assert all(summary["bytes"][link] > 0 for link in ("d2d", "d2e", "flower"))
    assert set(summary["energy"]["mean_j"]) == set(summary["energy"]["budget_j"])
    events = events_of(run_dir)
    assert [event["round_index"] for event in events] == [1, 2]
    _check_plans_against_memory(events)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(run_dir / "model")
    inputs = tokenizer(["forty two"], return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3).shape[0] == 1


def _check_plans_against_memory(events: list[dict[str, Any]]) -> None:
    """Every block once per cluster, and a device holds memory exactly if it has a segment."""
    for event in events:
        for cluster in event["plan"]["clusters"]:
            segments = cluster["segments"]
            covered = [b for s in segments for b in range(s["first_block"], s["stop_block"])]
            assert covered == [0, 1, 2, 3]
            assert len(segments) > 1  # no device can hold the whole encoder in this world
            measured = {r for r in event["memory_bytes"] if r.startswith(cluster["cluster_id"])}
            devices = {s["device_id"] for s in segments}
            roles = {f"{cluster['cluster_id']}/{role}" for role in ("control-unit", "edge")}
            assert measured == devices | roles


def test_one_cluster_one_device_one_micro_batch_is_fedavg_of_the_whole_model(
    run_app: RunApp,
) -> None:
    alone: dict[str, Value] = {
        "clusters": 1,
        "world.memory-share": 1.0,
        "scheduler.micro-batch-sizes": "8",
        "scheduler.micro-batches": "1",
        "scheduler.policy": "latency-only",
    }
    split = run_app({**alone, "run-name": "split"})
    whole = run_app({**alone, "run-name": "whole", "runtime": "whole"})
    assert all(
        len(p["clusters"][0]["segments"]) == 1 for p in (e["plan"] for e in events_of(split))
    )
    _assert_same_model(split, whole)


def test_two_planned_clusters_learn_what_two_whole_clients_learn(run_app: RunApp) -> None:
    batch: dict[str, Value] = {
        "scheduler.micro-batch-sizes": "3",
        "scheduler.micro-batches": "3",
        "scheduler.policy": "dssda",
    }
    split = run_app({**batch, "run-name": "split"})
    whole = run_app({**batch, "run-name": "whole", "runtime": "whole"})
    _assert_same_model(split, whole, depth=4)


def _assert_same_model(left: Path, right: Path, *, depth: int = 1) -> None:
    first, second = (load_file(d / "model" / "model.safetensors") for d in (left, right))
    assert_near(first, second, depth=depth)


def test_own_csv_by_run_config_alone(run_app: RunApp, tmp_path: Path) -> None:
    rows = [("good and fine", "up"), ("bad and sad", "down"), ("fine day", "up"), ("sad", "down")]
    with (tmp_path / "moods.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("words", "mood"), *rows * 15])
    run_dir = run_app(
        {
            "data.task": "classification",
            "data.train": str(tmp_path / "moods.csv"),
            "data.text-column": "words",
            "data.label-column": "mood",
            "data.train-examples": 0,
            "data.test-examples": 0,
            "model.type": "bert",
            "model.overrides": "hidden_size=16 num_hidden_layers=4 num_attention_heads=2 "
            "intermediate_size=24 max_position_embeddings=64",
            "train.learning-rate": 0.01,
        }
    )
    assert _summary(run_dir)["metric"]["name"] == "accuracy"
    model = AutoModelForSequenceClassification.from_pretrained(run_dir / "model")
    assert set(model.config.id2label.values()) == {"up", "down"}


@pytest.mark.parametrize(
    ("overrides", "nodes", "sentence"),
    [
        ({"train.learning-rat": 0.1}, 2, "train.learning-rat is unknown; did you mean"),
        ({"clusters": 0}, 0, "clusters must be at least 1, got 0"),
        ({"node-timeout-s": 0.2}, 0, "2 clusters expected (run-config `clusters`), 0 connected"),
        ({"data.task": "classification"}, 2, "data.train is empty"),
        ({"model.type": "martian"}, 2, "model.type, model.overrides: unknown model type 'martian'"),
        ({"model.overrides": "d_modell=8"}, 2, "model.overrides"),
        (
            {"world.memory-share": 1e-6, "scheduler.policy": "dssda"},
            2,
            "world.devices, world.memory-share: cluster 'cluster-0': no plan",
        ),
        ({"world.devices": "toaster"}, 2, "world.devices: unknown device kind 'toaster'"),
        ({"scheduler.policy": "astrology"}, 2, "scheduler.policy"),
        (
            {"edge.address": "127.0.0.1:1", "edge.timeout-s": 2.0, "round-retries": 0},
            2,
            "edge at 127.0.0.1:1",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    run_app: RunApp, tmp_path: Path, overrides: dict[str, Value], nodes: int, sentence: str
) -> None:
    with pytest.raises(CollaPipeError) as refusal:
        run_app(overrides, nodes)
    message = str(refusal.value)
    assert sentence in message
    assert "\n" not in message
    assert not list(tmp_path.glob("runs/run/model*"))
    summary = tmp_path / "runs" / "run" / "summary.json"
    assert not summary.exists() or _summary(summary.parent)["status"] == "failed"


@pytest.mark.parametrize("place", ["server", "cluster"])
def test_a_run_that_ends_by_an_unknown_error_says_what_and_where(
    run_app: RunApp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("x")

    owner = (
        "server_app.app._save_model"
        if place == "server"
        else "collapipe_flwr.federation.client.pipeline_round.train_round"
    )
    monkeypatch.setattr(owner, broken)
    told = r"unexpected KeyError \('x'\) in \w+/(\w+/)*\w+\.py, line \d+"
    with pytest.raises(RunError, match=told):
        run_app({"num-server-rounds": 1, "round-retries": 1})
    reason = _summary(tmp_path / "runs" / "run")["reason"]
    assert re.search(told, reason)


@pytest.mark.parametrize("end", [SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_a_run_that_a_signal_ends_says_that_it_was_stopped(
    run_app: RunApp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: BaseException
) -> None:
    """Flower's own handler of SIGINT and SIGTERM ends the ServerApp by ``sys.exit(0)``."""

    def stopped(*_: object) -> None:
        raise end

    monkeypatch.setattr("server_app.app._train", stopped)
    with pytest.raises(type(end)):
        run_app()
    summary = _summary(tmp_path / "runs" / "run")
    assert (summary["status"], summary["reason"]) == ("stopped", "stopped by a signal")
