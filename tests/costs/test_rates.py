"""Planned rates are Shannon's, and price and rates speak of the same link."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from collapipe_flwr.core.domain import ClusterPlan, Plan, Snapshot
from collapipe_flwr.costs.price import price, set_planned_rates
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from tests.planned_step import replay_plan
from tests.worlds import equal_ends, first_round, planned

SETTINGS = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(2,), codecs=("fp32",))


def _planned(codec: str = "fp32") -> tuple[Plan, Snapshot]:
    kinds = [["raspberry-pi-5", "raspberry-pi-4", "jetson-nano"], ["phone", "phone", "phone"]]
    snapshot = first_round(kinds, equal_ends(4, 32, 16, wire_bytes=4), [40, 60], seed=3)
    return set_planned_rates(
        planned(snapshot, replace(SETTINGS, codecs=(codec,))), snapshot
    ), snapshot


def _shannon(hz: float, watt: float, gain: float, noise: float) -> float:
    return hz * math.log2(1.0 + watt * gain / (hz * noise))


def _expected(plan: ClusterPlan, snapshot: Snapshot, m: int) -> list[tuple[float, float]]:
    cluster, noise = snapshot.clusters[m], snapshot.radio.noise_w_per_hz
    profile, channel = cluster.profile, cluster.channel
    place = {d.device_id: i + 1 for i, d in enumerate(profile.devices)}
    names = [profile.control_unit.device_id, *(s.device_id for s in plan.segments)]
    at = [0, *(place[name] for name in names[1:])]
    rates = []
    for k in range(len(at) - 1):
        gain = channel.d2d_gain[at[k]][at[k + 1]]
        hz = profile.d2d_bandwidth_hz
        ahead = _shannon(hz, plan.tx_power_w[names[k]], gain, noise)
        rates.append((ahead, _shannon(hz, plan.gradient_power_w[names[k + 1]], gain, noise)))
    gain = channel.edge_gain[at[-1]]
    ahead = _shannon(plan.bandwidth_hz, plan.tx_power_w[names[-1]], gain, noise)
    back = _shannon(plan.bandwidth_hz, snapshot.edge.tx_power_w, gain, noise)
    return [*rates, (ahead, back)]


def test_rates_are_those_of_the_planned_power_and_bandwidth():
    plan, snapshot = _planned()
    for m, cluster in enumerate(plan.clusters):
        found = [(hop.forward_bit_per_s, hop.backward_bit_per_s) for hop in cluster.hops]
        for seen, wanted in zip(found, _expected(cluster, snapshot, m), strict=True):
            assert seen == pytest.approx(wanted)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_payload_over_its_rate_is_the_time_of_the_price(codec: str):
    plan, snapshot = _planned(codec)
    cluster = plan.clusters[0]
    trace = replay_plan(cluster, snapshot)
    share = 1.0 if codec == "fp32" else 0.25 + 1 / 128
    bits = 8 * cluster.micro_batch_size * snapshot.model.embedding.output_bytes * share
    first = next(span for span in trace.spans if span.resource == "hop 0 forward")
    assert first.end_s - first.start_s == pytest.approx(bits / cluster.hops[0].forward_bit_per_s)


def test_coarser_links_are_faster_and_cost_less_energy():
    (exact, snapshot), (coarse, _) = _planned(), _planned("int8")
    assert coarse.latency_s < exact.latency_s
    slower = price(exact, snapshot)
    lighter = replace(
        exact,
        clusters=tuple(
            replace(c, hops=tuple(replace(hop, codec="int8") for hop in c.hops))
            for c in exact.clusters
        ),
    )
    faster = price(lighter, snapshot)
    assert faster.latency_s < slower.latency_s
    assert sum(faster.clusters[0].energy_j.values()) < sum(slower.clusters[0].energy_j.values())


def test_a_plan_is_priced_as_it_was_predicted():
    plan, snapshot = _planned("int8")
    assert price(plan, snapshot).latency_s == pytest.approx(plan.latency_s)
