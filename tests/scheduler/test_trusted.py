"""The first blocks stay on trusted devices, in every plan and after every loss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from collapipe_flwr.core.domain import ClusterPlan, ClusterProfile, Plan, Snapshot
from collapipe_flwr.core.errors import InfeasibleError, ScheduleError
from collapipe_flwr.costs.replicas import ReplicatedPricing
from collapipe_flwr.costs.tables import Tables, tabulate
from collapipe_flwr.costs.work import fits
from collapipe_flwr.scheduler import search
from collapipe_flwr.scheduler.initial_layouts import all_layouts, rows_for
from collapipe_flwr.scheduler.plans import check_privacy, list_strangers
from collapipe_flwr.scheduler.policies import POLICIES, make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.replan import ReplanInput, drop_lost, replan
from tests.thorough import examples
from tests.worlds import draw_world, planned

PLAIN = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(2,), schedule="gpipe")
SCHEDULES = st.sampled_from(["gpipe", "1f1b"])
WORLDS = {
    "seed": st.integers(0, 10_000),
    "devices": st.integers(2, 4),
    "blocks": st.integers(2, 5),
    "share": st.floats(0.2, 1.0),
    "room": st.floats(0.3, 2.0),
}
property_of_worlds = examples(5, 20)


def guarded(snapshot: Snapshot, blocks: int, trusted: dict[str, bool]) -> Snapshot:
    """The snapshot that keeps so many blocks on these devices."""

    def marked(profile: ClusterProfile) -> ClusterProfile:
        devices = (replace(d, trusted=trusted.get(d.device_id, False)) for d in profile.devices)
        return replace(profile, devices=tuple(devices), trusted_blocks=blocks)

    clusters = tuple(replace(c, profile=marked(c.profile)) for c in snapshot.clusters)
    return replace(snapshot, clusters=clusters)


def depth_of(snapshot: Snapshot) -> int:
    """How many blocks its clusters keep on trusted devices."""
    return snapshot.clusters[0].profile.trusted_blocks


def unguarded(snapshot: Snapshot) -> Snapshot:
    clusters = (replace(c, profile=replace(c.profile, trusted_blocks=0)) for c in snapshot.clusters)
    return replace(snapshot, clusters=tuple(clusters))


def drawn(
    seed: int, devices: int, blocks: int, share: float, room: float, clusters: int = 1
) -> Snapshot:
    """A guarded snapshot with devices that have about ``room`` of the blocks' memory together."""
    rng = np.random.default_rng(seed)
    world, model = draw_world(seed, clusters=clusters, devices=devices, blocks=blocks)
    whole = sum(block.state_bytes + 16 * block.stash_bytes for block in model.blocks)
    sized = tuple(
        cluster.with_members(
            lambda d: replace(d, memory_bytes=int(whole * 2 * room / devices * rng.random()))
        )
        for cluster in world.clusters
    )
    units = [cluster.control_unit for cluster in world.clusters]
    sized = tuple(replace(c, control_unit=unit) for c, unit in zip(sized, units, strict=True))
    names = [d.device_id for cluster in sized for d in cluster.devices]
    trusted = {name: bool(rng.random() < share) for name in names}
    snapshot = replace(world, clusters=sized).snapshot(1, model)
    return guarded(snapshot, int(rng.integers(1, blocks + 1)), trusted)


def plan_if_any(
    snapshot: Snapshot, options: SchedulerConfig, policy: str = "latency-only"
) -> Plan | None:
    try:
        return planned(snapshot, options, policy)
    except InfeasibleError:
        return None


def broken(plan: Plan | None, snapshot: Snapshot) -> list[str]:
    """Devices that hold what they must not."""
    known = {c.profile.cluster_id: c.profile for c in snapshot.clusters}
    plans = () if plan is None else plan.clusters
    return [name for each in plans for name in list_strangers(each, known[each.cluster_id])]


def some_cut_fits(snapshot: Snapshot, options: SchedulerConfig) -> bool:
    """By brute force over all orders of devices and all cuts, in every cluster.

    Which of them break the rule is told by names, not by the tables that plans are made with.
    """
    free = tabulate(unguarded(snapshot))
    return all(any(_keepers(snapshot, free, m, options)) for m in range(free.num_clusters))


def _keepers(snapshot: Snapshot, free: Tables, m: int, options: SchedulerConfig) -> Iterator[bool]:
    devices = snapshot.clusters[m].profile.devices
    layouts = all_layouts(len(devices), free.num_blocks)
    rows = rows_for(m, *layouts, np.array(options.batches))
    for row in np.flatnonzero(fits(free, rows, options)):
        first = dict(zip(rows.member_rs[row].tolist(), rows.first_rs[row].tolist(), strict=True))
        early = [n for n, at in first.items() if n > 0 and at < depth_of(snapshot)]
        yield all(devices[n - 1].trusted for n in early)


@property_of_worlds
@given(
    **WORLDS,
    policy=st.sampled_from(POLICIES),
    schedule=SCHEDULES,
    cap=st.sampled_from([1.0, 0.4]),
    replicas=st.booleans(),
)
def test_no_plan_gives_a_first_block_to_a_device_that_is_not_trusted(
    policy: str, schedule: str, cap: float, replicas: bool, **shape: float
) -> None:
    snapshot = drawn(**shape)  # type: ignore[arg-type]
    options = replace(PLAIN, schedule=schedule, max_model_share=cap, replicas=replicas)
    plan = plan_if_any(snapshot, options, policy)
    assert not broken(plan, snapshot)
    if policy in ("dssda", "static", "latency-only"):
        assert (plan is not None) == some_cut_fits(snapshot, options)


@property_of_worlds
@given(**WORLDS, schedule=SCHEDULES)
def test_where_not_all_is_tried_a_plan_is_found_if_there_is_one(
    schedule: str, **shape: float
) -> None:
    snapshot = drawn(**shape)  # type: ignore[arg-type]
    options = replace(PLAIN, schedule=schedule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "ENUMERATED_ROWS", 0)
        plan = plan_if_any(snapshot, options)
    assert not broken(plan, snapshot)
    assert (plan is not None) == some_cut_fits(snapshot, options)


def test_many_clusters_keep_it_in_every_round() -> None:
    """Also where rows come from the search for many clusters, and from plans in place."""
    snapshot = drawn(3, devices=3, blocks=3, share=0.6, room=4.0, clusters=21)
    trusting = {c.profile.devices[0].device_id: True for c in snapshot.clusters}
    named = {d.device_id: d.trusted for c in snapshot.clusters for d in c.profile.devices}
    snapshot = guarded(snapshot, 2, named | trusting)
    scheduler = make_scheduler("latency-only", replace(PLAIN, schedule="1f1b"))
    state = scheduler.init(snapshot)
    for _ in range(2):
        plan, state = scheduler.step(state, snapshot)
        assert len(plan.clusters) == 21 and not broken(plan, snapshot)


def test_a_plan_in_place_goes_when_its_device_is_no_longer_trusted() -> None:
    """Kept, spare and repeated plans too."""
    snapshot = drawn(1, devices=3, blocks=4, share=1.0, room=4.0)
    names = [d.device_id for d in snapshot.clusters[0].profile.devices]
    for policy in ("latency-only", "static", "uniform"):
        scheduler = make_scheduler(policy, PLAIN)
        before = guarded(snapshot, 2, dict.fromkeys(names, True))
        plan, state = scheduler.step(scheduler.init(before), before)
        first = plan.clusters[0].segments[0].device_id
        now = guarded(snapshot, 2, {n: n != first for n in names})
        after, state = scheduler.step(state, now)
        assert not broken(after, now)
        nobody = guarded(snapshot, 2, {})
        with pytest.raises(InfeasibleError, match=r"trusted-blocks"):  # nor is a plan repeated
            scheduler.step(state, nobody)


@property_of_worlds
@given(**WORLDS, schedule=SCHEDULES, lost=st.integers(0, 3))
def test_no_loss_of_a_device_moves_a_first_block_to_one_that_is_not_trusted(
    schedule: str, lost: int, **shape: float
) -> None:
    snapshot = drawn(**shape)  # type: ignore[arg-type]
    options = replace(PLAIN, schedule=schedule)
    plan = plan_if_any(snapshot, options, "random")
    assume(plan is not None)
    assert plan is not None
    before, profile = plan.clusters[0], snapshot.clusters[0].profile
    gone = before.device_ids[lost % len(before.device_ids)]
    names = [d.device_id for d in profile.devices if d.device_id != gone]
    rest = ReplanInput(profile=profile, model=snapshot.model, present=names)
    try:
        after = drop_lost(before, rest) or replan(before, rest)
    except InfeasibleError as error:
        first = {d.device_id: d.trusted for d in rest.devices}
        assert any(first.values()) or not first or "no trusted device is left" in str(error)
    else:
        assert not list_strangers(after, profile)


def test_more_devices_than_all_orders_allow_keep_it_after_a_loss() -> None:
    snapshot = drawn(5, devices=11, blocks=4, share=0.0, room=9.0)
    profile = snapshot.clusters[0].profile
    slowest = min(profile.devices, key=lambda d: d.speed_flop_per_s).device_id
    snapshot = guarded(snapshot, 1, {slowest: True})
    profile = snapshot.clusters[0].profile
    plan = plan_if_any(snapshot, PLAIN)
    assert plan is not None
    gone = next(d.device_id for d in profile.devices if d.device_id != slowest)
    names = [d.device_id for d in profile.devices if d.device_id != gone]
    rest = ReplanInput(profile=profile, model=snapshot.model, present=names)
    after = replan(plan.clusters[0], rest)
    assert after.segments[0].device_id == slowest


def test_without_trusted_blocks_trust_changes_no_plan() -> None:
    snapshot = guarded(drawn(2, devices=4, blocks=5, share=0.5, room=3.0), 0, {})
    names = [d.device_id for d in snapshot.clusters[0].profile.devices]
    for policy in ("latency-only", "memory"):
        marked = guarded(snapshot, 0, dict.fromkeys(names[:2], True))
        assert plan_if_any(marked, PLAIN, policy) == plan_if_any(snapshot, PLAIN, policy)


@pytest.mark.parametrize("seed", range(3))
def test_every_further_trusted_block_costs_time_if_anything(seed: int) -> None:
    snapshot = drawn(seed, devices=4, blocks=5, share=0.0, room=6.0)
    slow = min(snapshot.clusters[0].profile.devices, key=lambda d: d.speed_flop_per_s)
    seconds = []
    for blocks in range(6):
        plan = plan_if_any(guarded(snapshot, blocks, {slow.device_id: True}), PLAIN, "latency-only")
        if plan is not None:
            seconds.append(plan.latency_s)
    assert len(seconds) > 1
    assert all(b >= 0.999 * a for a, b in pairwise(seconds))


@property_of_worlds
@given(**WORLDS, schedule=SCHEDULES)
def test_what_a_refusal_proposes_fits(schedule: str, **shape: float) -> None:
    snapshot = drawn(**shape)  # type: ignore[arg-type]
    options = replace(PLAIN, schedule=schedule)
    try:
        planned(snapshot, options, "latency-only")
        return
    except InfeasibleError as error:
        said = str(error)
    devices = snapshot.clusters[0].profile.devices
    found = re.search(r"trust (.+), too, or set privacy.trusted-blocks to (\d+) at most", said)
    if found is None:  # then trust is not what is missing
        assert not some_cut_fits(guarded(snapshot, 0, {}), options)
        return
    named = {d.device_id: d.trusted for d in devices}
    assert plan_if_any(guarded(snapshot, int(found[2]), named), options) is not None
    more = dict.fromkeys(found[1].split(" and "), True)
    assert plan_if_any(guarded(snapshot, depth_of(snapshot), named | more), options)


def test_a_replica_is_trusted_as_the_device_beside_it() -> None:
    snapshot = drawn(4, devices=3, blocks=2, share=0.0, room=9.0)
    first, second = [d.device_id for d in snapshot.clusters[0].profile.devices][:2]
    plan = plan_if_any(guarded(snapshot, 2, {first: True}), PLAIN)
    assert plan is not None
    cluster = plan.clusters[0]
    segments = (replace(cluster.segments[0], replicas=(second,)),)
    both = {**cluster.tx_power_w, second: 0.1}, {**cluster.gradient_power_w, second: 0.1}
    shared = replace(cluster, segments=segments, tx_power_w=both[0], gradient_power_w=both[1])
    for trusted, allowed in (({first: True}, False), ({first: True, second: True}, True)):
        tables = tabulate(guarded(snapshot, 2, trusted))
        assert ReplicatedPricing(tables, 0, shared, PLAIN).price().fits == allowed


def test_a_plan_that_breaks_it_is_refused_by_name() -> None:
    snapshot = drawn(1, devices=3, blocks=4, share=1.0, room=4.0)
    plan = plan_if_any(guarded(snapshot, 0, {}), PLAIN)
    assert plan is not None
    cluster: ClusterPlan = plan.clusters[0]
    profile = guarded(snapshot, 0, {}).clusters[0].profile
    check_privacy(cluster, profile)
    with pytest.raises(ScheduleError, match=re.escape(cluster.segments[0].device_id)):
        check_privacy(cluster, replace(profile, trusted_blocks=1))
