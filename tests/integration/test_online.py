"""A run on a stream: what arrived is tested first, then trained on once, beside replay."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from client_app.app import app as client_app
from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.errors import CollaPipeError
from collapipe_flwr.core.keys import Value
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.run.learner import Evaluator, make_learner
from server_app.app import run
from tests.integration.conftest import TINY, RunApp, events_of
from tests.thorough import few

TEST_EXAMPLES = 12  # TINY holds out as many
# 12 fresh examples in a round
FRESH: dict[str, Value] = {"data.stream-replay": 0.7, "train.examples-per-round": 40}


@cache
def _test_set() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = make_learner(parse(TINY)).task.test.to_list()
    return [{"source": row["source"], "target": row["target"]} for row in rows]


def _untrained_loss() -> float:
    config = parse(TINY)
    learner = make_learner(config)
    evaluate = Evaluator(learner.splitter, learner.task, config.evaluation.batch_size)
    return evaluate(learner.splitter.initial_weights(config.run.seed))["loss"]


def _arrive(stream: Path, name: str, rows: list[dict[str, str]]) -> None:
    for cluster in ("0", "1"):
        (stream / cluster).mkdir(parents=True, exist_ok=True)
        (stream / cluster / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "stream"


def test_the_loss_before_training_is_that_of_the_model_as_it_came(
    run_app: RunApp, stream: Path
) -> None:
    _arrive(stream, "1.jsonl", _test_set())
    _arrive(stream, "2.jsonl", _test_set()[:5])
    run_dir = run_app({**FRESH, "data.stream": str(stream), "num-server-rounds": 3})
    first, second, third = events_of(run_dir)
    untrained = _untrained_loss()
    assert first["prequential_loss"] == pytest.approx(untrained, rel=1e-5)
    assert (first["fresh_examples"], second["fresh_examples"]) == (2 * TEST_EXAMPLES, 2 * 5)
    assert second["prequential_loss"] < untrained  # the first round taught these very examples
    assert (third["fresh_examples"], third["prequential_loss"]) == (0, None)


def test_a_cluster_without_a_folder_is_told_so(run_app: RunApp, stream: Path) -> None:
    with pytest.raises(CollaPipeError, match=r"data\.stream has no folder"):
        run_app({"data.stream": str(stream)})


class Renewed(LocalGrid):
    """A new SuperNode answers every message."""

    def send_and_receive(self, messages, *, timeout=None):
        for node in (1, 2):
            self.add(node, client_app)
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.parametrize(
    ("state_dir", "fresh"), few([("state", [12, 12, 12, 4]), ("", [12, 0, 0, 0])], 0)
)
def test_with_a_state_dir_new_nodes_and_a_resumed_run_read_on_where_they_were(
    stream: Path, tmp_path: Path, caplog, state_dir: str, fresh: list[int]
) -> None:
    rows = _test_set() * 4
    _arrive(stream, "1.jsonl", rows[:18])
    _arrive(stream, "2.jsonl", rows[18:40])
    values: dict[str, Value] = {
        **TINY,
        **FRESH,
        "data.stream": str(stream),
        "train.state-dir": str(tmp_path / state_dir) if state_dir else "",
        "train.decay": "none",
        "output-dir": str(tmp_path),
        "run-name": "run",
    }
    places = {node: {"partition-id": node - 1, "num-partitions": 2} for node in (1, 2)}
    for rounds, resume in ((2, ""), (4, str(tmp_path / "run"))):
        more: dict[str, Value] = {**values, "num-server-rounds": rounds, "resume": resume}
        grid = Renewed(dict.fromkeys(places, client_app), node_configs=places, run_config=more)
        run(grid, parse(more))
    told = [r for r in caplog.records if "no place in data.stream" in r.message]
    assert bool(told) == (not state_dir)
    assert [event["fresh_examples"] for event in events_of(tmp_path / "run")] == [
        2 * n for n in fresh
    ]


class Late(LocalGrid):
    """In its second training round the reply of node 2 does not arrive."""

    trained = 0

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.trained += bool(messages) and messages[0].metadata.message_type == "train"
        replies = super().send_and_receive(messages, timeout=timeout)
        return [r for r in replies if self.trained != 2 or r.metadata.src_node_id != 2]


@pytest.mark.parametrize("state_dir", ["state", pytest.param("", marks=pytest.mark.slow)])
def test_rows_of_a_round_that_was_lost_are_fresh_in_the_next(
    stream: Path, tmp_path: Path, state_dir: str
) -> None:
    _arrive(stream, "1.jsonl", (_test_set() * 3)[:28])
    values: dict[str, Value] = {
        **TINY,
        **FRESH,
        "data.stream": str(stream),
        "train.state-dir": str(tmp_path / state_dir) if state_dir else "",
        "output-dir": str(tmp_path),
        "num-server-rounds": 4,
    }
    places = {node: {"partition-id": node - 1, "num-partitions": 2} for node in (1, 2)}
    run(
        Late(dict.fromkeys(places, client_app), node_configs=places, run_config=values),
        parse(values),
    )
    ours, theirs = [12, 12, 4, 0], [12, 0, 12, 4]  # each of 28 rows once
    assert [event["fresh_examples"] for event in events_of(tmp_path / "run")] == [
        sum(fresh) for fresh in zip(ours, theirs, strict=True)
    ]
