"""Clusters whose nodes name files of their own: nothing is shared out."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import pytest

from client_app.app import app as client_app
from collapipe_flwr.cluster.local_data import read_own_data
from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import Value
from collapipe_flwr.federation.local_grid import LocalGrid
from server_app.app import run
from tests.integration.conftest import TINY, events_of
from tests.thorough import few

UP, DOWN = ("good and fine", "up"), ("bad and sad", "down")
ROWS = {"a": [UP] * 20 + [DOWN] * 10, "b": [DOWN] * 14 + [("fine day", "up")] * 6}
TEST = [UP, DOWN, DOWN, ("fine day", "up")]
MOODS: dict[str, Value] = {
    **TINY,
    "data.task": "classification",
    "data.train-examples": 0,
    "data.test-examples": 0,
    "train.examples-per-round": 0,
    "model.type": "bert",
    "model.overrides": "hidden_size=16 num_hidden_layers=4 num_attention_heads=2 "
    "intermediate_size=24 max_position_embeddings=64 hidden_dropout_prob=0 "
    "attention_probs_dropout_prob=0",
    "train.learning-rate": 0.01,
}


def table(path: Path, *rows: tuple[str, ...], head: tuple[str, ...] = ("text", "label")) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return str(path)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    sites = [(*row, site) for site, rows in ROWS.items() for row in rows]
    together = table(tmp_path / "all.csv", *sites, head=("text", "label", "site"))
    own = {site: table(tmp_path / f"{site}.csv", *rows) for site, rows in ROWS.items()}
    return {**own, "all": together, "test": table(tmp_path / "test.csv", *TEST)}


def outcome(folder: Path, values: Mapping[str, Value], *own: Mapping[str, Value]) -> bytes:
    """The model of a run whose nodes say this of their data."""
    values = {**MOODS, **values, "output-dir": str(folder)}
    places = {
        node: {"partition-id": node - 1, "num-partitions": 2, **more}
        for node, more in enumerate(own, 1)
    }
    grid = LocalGrid(dict.fromkeys(places, client_app), node_configs=places, run_config=values)
    run(grid, parse(values))
    return (folder / "run" / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("runtime", few(["pipeline", "whole"], 0))
def test_own_files_train_what_one_file_cut_by_site_trains(
    tmp_path: Path, files: dict[str, str], runtime: str
) -> None:
    """No node is told the name of the other's file."""
    both: dict[str, Value] = {"runtime": runtime, "data.test": files["test"]}
    by_site = {"data.partition": "natural", "data.partition-column": "site"}
    shared = outcome(tmp_path / "1", {**both, **by_site, "data.train": files["all"]}, {}, {})
    test = {"data.test": files["test"]}
    own = ({"data.train": files[site], **test} for site in ("a", "b"))
    apart = outcome(tmp_path / "2", {**both, "data.train": files["all"]}, *own)
    assert apart == shared


def test_clusters_test_on_their_own_files(tmp_path: Path, files: dict[str, str]) -> None:
    values = {"data.train": files["all"], "evaluation.federated": True}
    lonely = {"data.train": files["a"], "data.test": table(tmp_path / "ups.csv", *[UP] * 7)}
    outcome(tmp_path / "runs", values, lonely, {"data.train": files["b"]})
    ninths = [9 * e["clusters_metrics"]["accuracy"] for e in events_of(tmp_path / "runs" / "run")]
    assert len(ninths) == 2  # of 7 of the first, and 2 of 20 that the second holds out
    assert ninths == pytest.approx([round(n) for n in ninths])


def test_a_label_that_the_server_does_not_know_is_named(
    tmp_path: Path, files: dict[str, str]
) -> None:
    strange = table(tmp_path / "strange.csv", *[("so so", "level"), UP] * 10)
    values = {"data.train": files["all"], "train.examples-per-round": 16}
    outcome(tmp_path / "runs", values, {"data.train": files["a"]}, {"data.train": strange})
    for event in events_of(tmp_path / "runs" / "run"):  # the other cluster trains on
        (failure,) = event["failures"]
        assert failure.startswith("cluster-1: data.train has 1 labels that the training data lacks")
        assert '"level"' in failure


def test_a_file_with_one_label_only_is_trained_on(tmp_path: Path, files: dict[str, str]) -> None:
    ups = table(tmp_path / "ups.csv", *[UP] * 20)
    values = {"data.train": files["all"], "train.examples-per-round": 16}
    assert outcome(tmp_path / "runs", values, {"data.train": files["a"]}, {"data.train": ups})


@pytest.mark.parametrize(
    ("node_config", "sentence"),
    [
        ({"data.train": 3}, "node-config data.train must be the name of a file or folder: 3"),
        ({"data.test": "t.csv"}, 'node-config data.test "t.csv" needs a data.train beside it'),
    ],
)
def test_a_node_config_that_makes_no_sense_is_refused(
    node_config: dict[str, Value], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_own_data(node_config)
