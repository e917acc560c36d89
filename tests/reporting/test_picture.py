"""What is drawn of a cluster is what its round says: with replicas, without a plan, when lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.reporting.live.state import round_picture
from tests.reporting.made_up_runs import MadeUpRun


@pytest.fixture
def event(tmp_path: Path) -> dict[str, Any]:
    return MadeUpRun(tmp_path / "run").event(1).as_json()


def test_a_chain_begins_with_the_control_unit_and_ends_with_the_edge(event: dict[str, Any]) -> None:
    plan = event["plan"]["clusters"][0]
    picture, _ = round_picture(event, {plan["segments"][0]["device_id"]: 3.0})
    names = [device["name"] for stage in picture["stages"] for device in stage["devices"]]
    planned = [segment["device_id"].partition("/")[2] for segment in plan["segments"]]
    assert names == ["control-unit", *planned, "edge"]
    assert [stage["blocks"] for stage in picture["stages"]] == [None, [0, 2], [2, 4], [4, 6], None]
    assert len(picture["hops"]) == 4
    first = picture["stages"][1]["devices"][0]
    assert first["budget_j"] == 3.0
    device = plan["segments"][0]["device_id"]
    assert first["queue_j"] == pytest.approx(event["queues_j"][device], rel=1e-3)


def test_rates_are_those_of_the_round(event: dict[str, Any]) -> None:
    picture, _ = round_picture(event, {})
    latency_s = event["clusters"]["cluster-0"]["latency_s"]
    assert picture["per_s"] == pytest.approx(4 * 8 / latency_s, rel=1e-3)
    stage = event["plan"]["clusters"][0]["segments"][0]["device_id"]
    busy_s = event["clusters"]["cluster-0"]["stages"][stage]["measured_s"]
    share = picture["stages"][1]["devices"][0]["share"]
    assert share == pytest.approx(4 * 8 * busy_s / latency_s, rel=1e-3)
    hop, link = picture["hops"][0], event["links"][0]
    assert hop["forward"]["bit_per_s"] == pytest.approx(link["forward"]["bit_per_s"], rel=1e-3)
    assert hop["bytes"] == 2 * 10**6


def test_replicas_share_a_stage_and_its_micro_batches(event: dict[str, Any]) -> None:
    plan = event["plan"]["clusters"][0]
    first, second, third = plan["segments"]
    alone = round_picture(event, {})[0]["stages"][1]["devices"][0]["share"]
    plan["segments"] = [{**first, "replicas": [second["device_id"]]}, third]
    event["links"][1]["sender"] = "control-unit"  # to the replica
    picture = round_picture(event, {})[0]
    devices = picture["stages"][1]["devices"]
    assert len(devices) == 2
    assert devices[0]["share"] == pytest.approx(alone / 2, rel=1e-3)
    assert [hop["bytes"] for hop in picture["hops"]] == [4 * 10**6, 2 * 10**6, 2 * 10**6]


def test_of_several_edges_the_one_of_the_plan_is_drawn(event: dict[str, Any]) -> None:
    plain = round_picture(event, {})[0]
    stages = event["clusters"]["cluster-0"]["stages"]
    event["plan"]["clusters"][0]["edge"] = "site"
    stages["site"] = stages.pop("edge")
    picture = round_picture(event, {})[0]
    ((before,), (head,)) = (each["stages"][-1]["devices"] for each in (plain, picture))
    assert head == {**before, "name": "edge site"}
    assert picture["hops"] == plain["hops"] and picture["idle"] == plain["idle"]


def test_a_device_without_blocks_is_idle(event: dict[str, Any]) -> None:
    plan = event["plan"]["clusters"][0]
    left = plan["segments"].pop()["device_id"]
    picture = round_picture(event, {})[0]
    assert left.partition("/")[2] in [device["name"] for device in picture["idle"]]


def test_a_lost_cluster_is_drawn_without_numbers(event: dict[str, Any]) -> None:
    del event["clusters"]["cluster-1"]
    event["plan"]["clusters"].pop()
    event["lost"] = ["cluster-1"]
    seen, lost = round_picture(event, {})
    assert (seen["lost"], lost["lost"], lost["stages"]) == (False, True, [])


def test_a_round_without_plan_has_no_picture() -> None:
    bare = {"round_index": 1, "plan": None, "metrics": {}}
    assert round_picture(bare, {}) == []


def test_numbers_that_are_not_finite_are_none(event: dict[str, Any]) -> None:
    event["clusters"]["cluster-0"]["latency_s"] = float("inf")
    assert round_picture(event, {})[0]["latency_s"] is None
