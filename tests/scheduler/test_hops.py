"""Hops of a plan survive JSON, are checked, and follow the devices that are left."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import InfeasibleError, ScheduleError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.scheduler.plans import check_cluster_plan
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.replan import ReplanInput, replan
from collapipe_flwr.simulation.world import make_world
from tests.worlds import equal_ends, planned

KINDS = ["raspberry-pi-5", "raspberry-pi-4", "raspberry-pi-4", "raspberry-pi-4"]
WORLD = make_world(cluster_devices=[KINDS], examples=[32])
MODEL = equal_ends(6, 64, 16)
CODECS = ("fp32", "bf16", "int8", "fp16")


@pytest.fixture(scope="module")
def plan() -> ClusterPlan:
    """Over all three devices, with a codec of its own on every hop."""
    settings = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(2,))
    found = planned(WORLD.snapshot(1, MODEL), settings, "uniform").clusters[0]
    assert len(found.segments) == 3
    return replace(found, hops=tuple(LinkConfig(codec=c, forward_bit_per_s=1e6) for c in CODECS))


def test_hops_survive_json(plan: ClusterPlan) -> None:
    assert from_json(ClusterPlan, to_json(plan), "plan") == plan


@pytest.mark.parametrize(
    ("hops", "says"),
    [
        ((LinkConfig(),), "one entry per hop"),
        ((LinkConfig(codec="zip"),) * 4, "codec must be one of"),
        ((LinkConfig(forward_bit_per_s=-1.0),) * 4, "finite and > 0"),
        ((LinkConfig(backward_bit_per_s=float("nan")),) * 4, "finite and > 0"),
    ],
)
def test_hops_that_make_no_sense_are_refused(
    plan: ClusterPlan, hops: tuple[LinkConfig, ...], says: str
) -> None:
    with pytest.raises(ScheduleError, match=says):
        check_cluster_plan(replace(plan, hops=hops))


def test_hops_between_old_neighbours_stay_and_new_ones_are_coarse(plan: ClusterPlan) -> None:
    lost = plan.segments[1].device_id
    kept = [segment.device_id for segment in plan.segments if segment.device_id != lost]
    after = replan(
        plan,
        ReplanInput(profile=WORLD.clusters[0], model=MODEL, present=kept),
    )
    check_cluster_plan(after, len(MODEL.blocks))
    names = ["", *(segment.device_id for segment in after.segments), ""]
    before = ["", *(segment.device_id for segment in plan.segments), ""]
    known = dict(zip(pairwise(before), plan.hops, strict=True))
    for pair, hop in zip(pairwise(names), after.hops, strict=True):
        assert hop == known.get(pair, LinkConfig(codec="int8"))  # of unknown rate: not paced


def test_a_cluster_that_lost_all_its_devices_hears_the_way_out(plan: ClusterPlan) -> None:
    rest = ReplanInput(profile=WORLD.clusters[0], model=MODEL, present=())
    with pytest.raises(InfeasibleError) as refused:
        replan(plan, rest)
    said = str(refused.value)
    assert all(segment.device_id in said for segment in plan.segments)
    assert "MiB" not in said and "collapipe cluster check" in said
