"""Centralised training by run-config alone: one cluster with all the data, others stay idle."""

from __future__ import annotations

import pytest

from collapipe_flwr.cluster.local_data import DataPlace, LocalData
from collapipe_flwr.config.schema import parse
from tests.integration.conftest import TINY, RunApp, events_of
from tests.thorough import few

ALONE = {"clusters": 1, "world.memory-share": 1.0, "scheduler.micro-batches": "2"}


@pytest.mark.parametrize("runtime", few(["pipeline", "whole"], 0))
def test_spare_nodes_change_nothing(run_app: RunApp, shared_run: RunApp, runtime: str) -> None:
    alone = shared_run({**ALONE, "runtime": runtime}, nodes=1)
    beside = run_app({**ALONE, "runtime": runtime}, nodes=3)
    found, expected = events_of(beside), events_of(alone)
    assert [e["metrics"] for e in found] == [e["metrics"] for e in expected]
    assert [e["loss"] for e in found] == [e["loss"] for e in expected]


def test_a_plain_run_tells_its_training_loss_and_what_it_sent(shared_run: RunApp) -> None:
    plain = events_of(shared_run({**ALONE, "runtime": "whole"}, nodes=1))
    split = events_of(shared_run({**ALONE, "runtime": "pipeline"}, nodes=1))
    for ours, theirs in zip(plain, split, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        flower = ours["bytes"]["flower"]
        assert 0 < flower < theirs["bytes"]["flower"] < 1.1 * flower  # a plan and measurements more


def test_one_cluster_has_all_the_data() -> None:
    def rows(clusters: int, index: int) -> int:
        config = parse({**TINY, "clusters": clusters, "train.examples-per-round": 0})
        return LocalData(config, DataPlace(index=index, count=clusters), None).examples_per_round

    assert rows(1, 0) == rows(2, 0) + rows(2, 1) == 120
