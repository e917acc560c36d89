"""Plans survive JSON, and what is no plan is refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collapipe_flwr.core.domain import ClusterPlan, Plan, Segment
from collapipe_flwr.core.errors import ProtocolError, ScheduleError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.scheduler.plans import check_cluster_plan
from tests.worlds import draw_snapshot, planned

PLAN = ClusterPlan(
    cluster_id="a",
    segments=(
        Segment(device_id="x", first_block=0, stop_block=2),
        Segment(device_id="y", first_block=2, stop_block=3),
    ),
    micro_batch_size=4,
    micro_batches=2,
    warmup_depth=(2, 2, 2, 2),
    local_steps=5,
    bandwidth_hz=1e6,
    tx_power_w={"cu": 0.1, "x": 0.1, "y": 0.05},
    gradient_power_w={"x": 0.1, "y": 0.1},
    latency_s=1.5,
    step_s=0.2,
    energy_j={"cu": 1.0, "x": 2.0, "y": 3.0},
    memory_bytes={"cu": 10, "x": 20, "y": 30},
)


def test_round_trip() -> None:
    assert from_json(ClusterPlan, to_json(PLAN), "plan") == PLAN


def test_whole_plan_round_trip() -> None:
    snapshot = draw_snapshot(0)
    plan = planned(snapshot, policy="throughput")
    assert from_json(Plan, to_json(plan), "plan") == plan


def segments(*bounds: tuple[str, int, int]) -> tuple[Segment, ...]:
    return tuple(Segment(device_id=d, first_block=f, stop_block=s) for d, f, s in bounds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": ()}, "no device has a segment"),
        ({"segments": segments(("x", 0, 1), ("y", 2, 3))}, "exactly once"),
        ({"segments": segments(("x", 0, 2), ("y", 1, 3))}, "exactly once"),
        ({"segments": segments(("x", 0, 2), ("y", 2, 2))}, "exactly once"),
        ({"segments": segments(("x", 1, 2), ("y", 2, 3))}, "block 0 comes next"),
        ({"segments": segments(("x", 0, 2), ("x", 2, 3))}, "two segments"),
        ({"micro_batch_size": 0}, "micro_batch_size must be >= 1"),
        ({"local_steps": -1}, "local_steps must be >= 1"),
        ({"bandwidth_hz": 0.0}, "bandwidth_hz must be > 0"),
        ({"warmup_depth": (1, 1)}, "one entry >= 1 per stage"),
    ],
)
def test_broken_plans_are_refused(change: dict[str, object], message: str) -> None:
    broken = replace(PLAN, **change)
    with pytest.raises(ScheduleError, match=message):
        check_cluster_plan(broken)


def test_block_count_must_match() -> None:
    check_cluster_plan(PLAN, 3)
    with pytest.raises(ScheduleError, match="cover 3 blocks, the model has 4"):
        check_cluster_plan(PLAN, 4)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cluster_id": 1}', "not json"])
def test_what_is_no_plan(text: str) -> None:
    with pytest.raises(ProtocolError):
        from_json(ClusterPlan, text, "plan")
