"""Every hop inside a cluster is as wide as the narrower of its two radios."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.oracles.brute_force import optimal_plan
from benchmarks.scheduling.radio import radio_instance
from collapipe_flwr.core.domain import Snapshot
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.chain import compute_full_power_times, make_chain
from collapipe_flwr.costs.layouts import make_plan_rows
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.devices import FleetCluster, device_preset
from collapipe_flwr.simulation.setting import ModelShape, Setting
from tests.worlds import equal_ends, first_round, planned, with_devices

WIDE_HZ = 20e6  # of the preset
ONE = SchedulerConfig(schedule="gpipe", micro_batch_sizes=(4,), micro_batches=(4,), bound=False)


def narrowed(widths: tuple[float | None, ...]) -> Snapshot:
    """One cluster whose devices have radios of those widths."""
    kinds = ["raspberry-pi-5", *["raspberry-pi-4"] * len(widths)]
    snapshot = first_round([kinds], equal_ends(4, 256, 64), 64)
    cluster = snapshot.clusters[0]
    pairs = zip(cluster.profile.devices, widths, strict=True)
    devices = (replace(device, d2d_bandwidth_hz=width) for device, width in pairs)
    return replace(snapshot, clusters=(with_devices(cluster, devices),))


def test_the_narrower_radio_decides() -> None:
    width = tabulate(narrowed((None, 5e6, 80e6))).d2d_hz_mij[0]
    assert width[1, 0] == width[0, 3] == WIDE_HZ  # no hop is wider than the cluster allows
    assert width[1, 2] == width[2, 3] == width[2, 0] == 5e6


def test_a_hop_takes_as_long_as_its_own_width_says() -> None:
    snapshot = narrowed((None, 5e6, None))
    plan = planned(snapshot, ONE, "uniform")
    tables = tabulate(snapshot)
    chain = make_chain(tables, make_plan_rows(tables, plan.clusters), ONE)
    times = compute_full_power_times(chain, np.array([snapshot.radio.bandwidth_hz]))[0, :, 0]
    order = [0, *(int(s.device_id[-1]) for s in plan.clusters[0].segments)]
    bits = 8 * 4 * 64 * 256 * 2
    for hop in range(3):
        sender, receiver = order[hop], order[hop + 1]
        width = 5e6 if 2 in (sender, receiver) else WIDE_HZ
        watt = 0.1 * tables.gain_mij[0, sender, receiver] / snapshot.radio.noise_w_per_hz
        assert times[hop] == pytest.approx(bits / (width * np.log2(1 + watt / width)))


def test_dssda_matches_brute_force_where_hops_differ() -> None:
    snapshot = narrowed((0.2e6, None, 0.5e6))
    ours = planned(snapshot, ONE)
    best = optimal_plan(snapshot, ONE)
    assert ours.latency_s == pytest.approx(best.latency_s, rel=1e-3)
    wide = narrowed((None, None, None))
    assert best.latency_s > 1.01 * optimal_plan(wide, ONE).latency_s


def test_both_radio_solvers_agree_where_hops_differ() -> None:
    board = device_preset("raspberry-pi-4")
    members = (board, *(replace(board, d2d_bandwidth_hz=w) for w in (1e6, 3e6, None)))
    fleet = tuple(FleetCluster(cluster_id=f"c{m}", members=members, examples=200) for m in range(3))
    case = radio_instance(
        Setting(fleet=fleet, model=ModelShape(blocks=4, width=256), settings=ONE), 0
    )
    assert case.value(case.fast()) == pytest.approx(case.reference().objective, rel=1e-3)


def test_an_unusable_width_is_refused() -> None:
    with pytest.raises(ScheduleError, match="d2d_bandwidth_hz must be finite and > 0, got 0"):
        tabulate(narrowed((0.0, None, None)))
