"""The price of replicas: that of any plan where there are none, else what is simulated."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.domain import ClusterPlan, Plan, Snapshot
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.replay import StepTimes, build_unchecked, replay
from collapipe_flwr.core.schedule import (
    PIECE_BYTES,
    Action,
    Op,
    ReplicaIndex,
    compute_textbook_depths,
    count_pieces_ahead,
    list_turns,
)
from collapipe_flwr.costs.price import price, set_planned_rates
from collapipe_flwr.costs.replicas import ReplicatedPricing, compute_exchange_s
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.work import OPTIMISER_FLOP_PER_BYTE, PricingOptions
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.setting import ModelShape
from tests.scheduler.test_overheads import beginning
from tests.thorough import examples
from tests.worlds import first_round, planned

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda r: (1, *r, 1))


@given(replica=st.integers(0, 5), replicas=st.integers(1, 6), others=st.integers(1, 6))
def test_micro_batches_meet_the_replicas_that_lanes_say(
    replica: int, replicas: int, others: int
) -> None:
    turn = ReplicaIndex(replica=replica % replicas, replicas=replicas)
    met = turn.list_met(others)
    assert len(met) == others // gcd(replicas, others)
    for m in turn.list_own(5 * replicas * others):
        assert met[turn.find_lane(m, len(met))] == m % others
    assert all(
        turn.replica in ReplicaIndex(replica=o, replicas=others).list_met(replicas) for o in met
    )


@given(replicas=shapes, count=st.integers(1, 12), name=st.sampled_from(["gpipe", "1f1b"]))
def test_the_textbooks_depths_never_block_whatever_the_replicas(
    replicas: tuple[int, ...], count: int, name: str
) -> None:
    depths = compute_textbook_depths(replicas)
    schedule = build_unchecked(name, depths, count, replicas)
    schedule.dry_run()
    for worker, actions in zip(schedule.workers, schedule.actions, strict=True):
        own = list(worker.turn.list_own(count))
        for op in Op:
            assert [a.micro_batch for a in actions if a.op is op] == own


def _simulated(times: StepTimes, depths: tuple[int, ...], count: int) -> float:
    """The makespan by relaxation: links serve by arrival, until no time changes any more.

    Shares no code with `replay`; what happens first is right after one pass, and so on.
    """
    schedule = build_unchecked("1f1b", depths, count, times.replicas)
    last = len(times.replicas) - 1
    end: dict[tuple[int, Action], float] = {}  # of passes, by stage
    sent: dict[tuple[int, Action], float] = {}  # ends of transmissions, by hop
    while True:
        before = (dict(end), dict(sent))
        for number, (worker, actions) in enumerate(
            zip(schedule.workers, schedule.actions, strict=True)
        ):
            free = 0.0
            for action in actions:
                k, ready = worker.stage, 0.0
                if action.op is Op.FORWARD and k > 0:
                    ready = sent.get((k - 1, action), 0.0)
                elif action.op is Op.BACKWARD and k < last:
                    ready = sent.get((k, action), 0.0)
                free = max(free, ready) + times.stage_s[action.op][number]
                end[k, action] = free
        for hop in range(last):
            for op in Op:
                stage = hop if op is Op.FORWARD else hop + 1
                asked = sorted((end[stage, Action(op, m)], m) for m in range(count))
                free = 0.0
                for at, m in asked:
                    free = max(free, at) + times.hop_s[op][hop]
                    sent[hop, Action(op, m)] = free
        if before == (end, sent):
            return max(end.values())


@examples(20, 60)
@given(seed=st.integers(0, 10**6), replicas=shapes, count=st.integers(1, 9), deep=st.booleans())
def test_a_replay_with_replicas_is_what_another_simulation_says(
    seed: int, replicas: tuple[int, ...], count: int, deep: bool
) -> None:
    rng = np.random.default_rng(seed)

    def draw(size: int) -> tuple[float, ...]:
        return tuple((rng.choice([0.1, 1.0], size) * rng.uniform(0.1, 1.0, size)).tolist())

    workers, hops = sum(replicas), len(replicas) - 1
    times = StepTimes(
        stage_s=(draw(workers), draw(workers)), hop_s=(draw(hops), draw(hops)), replicas=replicas
    )
    depths = (count,) * len(replicas) if deep else compute_textbook_depths(replicas)
    found = replay(times, depths, count).makespan_s
    assert found == pytest.approx(_simulated(times, depths, count), rel=1e-12)


def _exchanged_s(up: list[float], down: list[float], pieces: int) -> float:
    """When the last replica of a line has the last total; a leg carries one piece at a time."""
    last = len(up)
    todo = {
        replica: [
            (way, number)
            for turn in range(pieces + count_pieces_ahead(replica))
            for way, number in (("up", turn), ("down", turn - count_pieces_ahead(replica)))
            if 0 <= number < pieces
        ]
        for replica in range(last + 1)
    }
    there: dict[tuple[str, int, int], float] = {}  # way, receiver, piece
    now, free = dict.fromkeys(todo, 0.0), {}
    while any(todo.values()):
        for replica, work in todo.items():
            while work:
                way, number = work[0]
                source, target = (1, -1) if way == "up" else (-1, 1)
                if 0 <= replica + source <= last:
                    if (way, replica, number) not in there:
                        break
                    now[replica] = max(now[replica], there[way, replica, number])
                if 0 <= replica + target <= last:
                    leg = (way, min(replica, replica + target))
                    free[leg] = max(free.get(leg, 0.0), now[replica])
                    free[leg] += (up if way == "up" else down)[leg[1]]
                    there[way, replica + target, number] = free[leg]
                work.pop(0)
    return max(now.values())


@given(
    legs=st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=4),
    pieces=st.integers(1, 40),
)
def test_the_exchange_takes_as_long_as_its_price(
    legs: list[tuple[float, float]], pieces: int
) -> None:
    """Exactly for two replicas, at most for more, by a simulation of what every replica does."""
    up, down = ([leg[way] for leg in legs] for way in (0, 1))
    price = compute_exchange_s([pieces * s for s in (*up, *down)], pieces * PIECE_BYTES)
    found = _exchanged_s(up, down, pieces)
    if len(legs) == 1:
        assert found == pytest.approx(price, rel=1e-9)
    least = sum(up) + sum(down) + (pieces - 1) * max(*up, *down)
    assert least * (1 - 1e-9) <= found <= price * (1 + 1e-9)
    assert price <= least + (len(legs) - 1) ** 2 * max(*up, *down) + 1e-9


SETTINGS = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(8,), schedule="1f1b")


def replicated(
    kinds: list[list[str]], seed: int = 3, *, on_devices: bool = False
) -> tuple[Plan, Snapshot]:
    """A plan, for clusters whose last device is the edge if it is to be ``on_devices``."""
    shape = ModelShape(blocks=6, decoder_blocks=4, width=32, tokens=16, wire_bytes=4)
    snapshot = first_round(kinds, shape.profile(), 40, seed)
    if on_devices:
        clusters = (c.with_edge(c.profile.devices[-1].as_edge) for c in snapshot.clusters)
        snapshot = replace(snapshot, clusters=tuple(clusters))
    return set_planned_rates(planned(snapshot, SETTINGS), snapshot), snapshot


MIXED = [["raspberry-pi-5", "raspberry-pi-4", "jetson-nano"], ["phone", "phone", "phone"]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("recompute", "on_devices"), [(False, True), (True, False)])
def test_without_replicas_it_is_the_price_of_any_plan(
    schedule: str, recompute: bool, on_devices: bool
) -> None:
    plan, snapshot = replicated(MIXED, on_devices=on_devices)
    count = sum(len(c.profile.members) for c in snapshot.clusters)
    snapshot = beginning(snapshot, *np.random.default_rng(1).uniform(0.5, 2.0, count))
    options = PricingOptions(schedule=schedule, recompute=recompute)
    if schedule == "gpipe":
        deep = tuple(replace(c, warmup_depth=(8,) * len(c.warmup_depth)) for c in plan.clusters)
        plan = replace(plan, clusters=deep)
    priced, rated = price(plan, snapshot, options), set_planned_rates(plan, snapshot)
    for m, (cluster, expected) in enumerate(zip(plan.clusters, priced.clusters, strict=True)):
        found = ReplicatedPricing(tabulate(snapshot), m, cluster, options).price()
        assert found.latency_s == pytest.approx(expected.latency_s, rel=1e-12)
        assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
        assert found.exchange_s == 0.0 and found.fits
        for name, joule in found.energy_j.items():
            assert joule == pytest.approx(expected.energy_j[name], rel=1e-12)
        assert found.memory_bytes == expected.memory_bytes
        rates = [(h.forward_bit_per_s, h.backward_bit_per_s) for h in rated.clusters[m].hops]
        assert found.rates.tolist() == [pytest.approx(pair, rel=1e-12) for pair in rates]


def alone(blocks: int = 6) -> tuple[ClusterPlan, Plan, Snapshot]:
    """All blocks on the first of three phones, all of which are as far from everybody."""
    plan, snapshot = replicated([["phone"] * 4])
    (cluster,), gain = plan.clusters, 1e-7
    (one,) = snapshot.clusters
    even = tuple((gain,) * 4 for _ in range(4))
    channel = replace(one.channel, d2d_gain=even, edge_gain=(gain,) * 4)
    snapshot = replace(snapshot, clusters=(replace(one, channel=channel),))
    names = [d.device_id for d in one.profile.devices]
    cluster = replace(
        cluster,
        segments=(
            replace(cluster.segments[0], device_id=names[0], first_block=0, stop_block=blocks),
        ),
        warmup_depth=(8, 8, 8),
        hops=(),
        tx_power_w=dict.fromkeys([one.profile.control_unit.device_id, *names], 0.1),
        gradient_power_w=dict.fromkeys(names, 0.1),
    )
    return cluster, plan, snapshot


def test_of_equal_replicas_each_does_its_share_and_all_of_the_optimiser() -> None:
    single, plan, snapshot = alone()
    names = [d.device_id for d in snapshot.clusters[0].profile.devices]
    double = replace(single, segments=(replace(single.segments[0], replicas=(names[1],)),))
    one, two = (
        price(replace(plan, clusters=(c,)), snapshot, PricingOptions()).clusters[0]
        for c in (single, double)
    )
    cost = ReplicatedPricing(tabulate(snapshot), 0, double, PricingOptions()).price()
    late = price(replace(plan, clusters=(double,)), beginning(snapshot, 1.0, 3.0, 7.0, 9.0))
    assert late.clusters[0].latency_s == pytest.approx(two.latency_s + 3.0)  # as of both at once
    device = snapshot.clusters[0].profile.devices[0]
    weights = sum(block.parameter_bytes for block in snapshot.model.blocks)
    profile, noise = snapshot.clusters[0].profile, snapshot.radio.noise_w_per_hz
    hz = min(profile.d2d_bandwidth_hz, device.d2d_bandwidth_hz or np.inf)
    rate = hz * np.log2(1.0 + device.tx_power_max_w * 1e-7 / (hz * noise))
    once_s = 8.0 * weights / rate
    assert cost.exchange_s == pytest.approx(2 * once_s)
    assert (two.memory_bytes[names[0]], two.memory_bytes[names[1]]) == (
        cost.memory_bytes[names[1]],
    ) * 2
    assert two.memory_bytes[names[0]] < one.memory_bytes[names[0]]  # half as many in flight
    steps, watt = single.local_steps, device.tx_power_max_w
    optimiser = steps * OPTIMISER_FLOP_PER_BYTE * weights * device.energy_per_flop_j
    first, second = two.energy_j[names[0]], two.energy_j[names[1]]
    expected = one.energy_j[names[0]] + optimiser + 2 * steps * watt * once_s
    assert first + second == pytest.approx(expected, rel=1e-9)
    assert first - second == pytest.approx(watt * once_s, rel=1e-6)  # the first is collected
    assert two.step_s < one.step_s


@pytest.mark.parametrize("replicas", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_nothing_costs_less_than_what_is_refused_unseen(replicas: int, schedule: str) -> None:
    single, _, snapshot = alone()
    names = tuple(d.device_id for d in snapshot.clusters[0].profile.devices)
    shared = replace(single.segments[0], replicas=names[1 : replicas + 1])
    plan, options = replace(single, segments=(shared,)), PricingOptions(schedule=schedule)
    costs = ReplicatedPricing(tabulate(snapshot), 0, plan, options).price()
    least_s, joule = ReplicatedPricing(tabulate(snapshot), 0, plan, options).bound_costs()
    assert 0.3 * costs.latency_s < least_s <= costs.latency_s
    assert joule == costs.spent_j


def test_a_slow_replica_holds_the_others_up_by_its_own_share() -> None:
    """Micro-batches alternate whatever the speeds: the step is as long as the slowest's share."""
    times = StepTimes(
        stage_s=((0.0, 1.0, 3.0, 0.0), (0.0, 2.0, 6.0, 0.0)),
        hop_s=((0.0, 0.0), (0.0, 0.0)),
        replicas=(1, 2, 1),
    )
    assert replay(times, (8, 8, 8), 8).makespan_s == pytest.approx(4 * (3.0 + 6.0))


def test_a_planned_replica_that_is_gone_is_refused() -> None:
    single, plan, snapshot = alone()
    gone = replace(single, segments=(replace(single.segments[0], replicas=("nobody",)),))
    with pytest.raises(ScheduleError, match=r"uses devices \['nobody'\] that are not"):
        price(replace(plan, clusters=(gone,)), snapshot)


def test_all_turns_of_a_stage() -> None:
    assert [turn.list_own(7) for turn in list_turns(3)] == [
        range(0, 7, 3),
        range(1, 7, 3),
        range(2, 7, 3),
    ]
