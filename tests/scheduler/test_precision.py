"""Codecs that plans choose: fast links stay exact, slow ones get coarse, the round keeps pace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest

from benchmarks.scheduling.optimality import instance
from collapipe_flwr.core.domain import Plan, Snapshot
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.links import CODECS
from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.radio import NOISE, rank_codecs
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.base import make_solver
from collapipe_flwr.scheduler.decision import MARGIN, SPARED, Lifting, lift_codecs, refine_codecs
from collapipe_flwr.scheduler.planner import PlanSolver, Solution
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.world import make_world
from tests.worlds import equal_ends, planned

AUTO = ("fp32", "bf16", "int8")
SETTINGS = SchedulerConfig(
    schedule="gpipe", micro_batch_sizes=(4,), micro_batches=(4,), codecs=AUTO, bound=False
)


def _snapshot(link_factor: float, clusters: int = 1) -> Snapshot:
    """A world whose radio has that many times its usual bandwidth."""
    kinds = [["raspberry-pi-5", "raspberry-pi-4", "jetson-nano"]] * clusters
    world = make_world(cluster_devices=kinds, examples=[64] * clusters, channel="static", seed=1)
    faster = replace(world.radio, bandwidth_hz=world.radio.bandwidth_hz * link_factor)
    profiles = tuple(
        replace(c, d2d_bandwidth_hz=c.d2d_bandwidth_hz * link_factor) for c in world.clusters
    )
    world = replace(world, radio=faster, clusters=profiles)
    return world.snapshot(1, equal_ends(4, 128, 64, wire_bytes=4))


def _codecs(plan: Plan) -> list[str]:
    return [hop.codec for cluster in plan.clusters for hop in cluster.hops]


def test_fast_links_stay_exact() -> None:
    assert set(_codecs(planned(_snapshot(300.0), SETTINGS))) == {"fp32"}


def test_slow_links_are_coarse() -> None:
    codecs = _codecs(planned(_snapshot(0.02), SETTINGS))
    assert "int8" in codecs and "fp32" not in codecs


def test_one_slow_link_among_fast_ones_is_the_coarse_one() -> None:
    snapshot = _snapshot(300.0)
    slow = replace(snapshot.radio, bandwidth_hz=snapshot.radio.bandwidth_hz * 1e-4)
    # Only the hop to the edge shares this bandwidth.
    plan = planned(replace(snapshot, radio=slow), SETTINGS)
    assert _codecs(plan)[-1] == "int8" and set(_codecs(plan)[:-1]) == {"fp32"}


def test_four_bits_are_for_links_that_are_slow_enough() -> None:
    settings = replace(SETTINGS, codecs=(*AUTO, "int4"))
    assert "int4" in _codecs(planned(_snapshot(0.002), settings))
    assert "int4" not in _codecs(planned(_snapshot(0.1), settings))


def test_four_bits_open_only_where_they_save_more_time_than_their_noise_costs() -> None:
    opened = set()
    for seed in range(12):
        case = _case(seed, (*AUTO, "int4"))
        lifting = Lifting(case.planner, case.coarse, rank_codecs((*AUTO, "int4")))
        used = case.coarse.chain.hops.used
        coarse = case.coarse.chain.hops.codec
        eight = np.where(lifting.movable, CODECS.index("int8"), coarse)
        round_s = case.coarse.priced.latency_s.max()
        times = [
            (1.0 + 2.0 * (NOISE[codec] * used).sum(1))
            * np.maximum(lifting.price(codec)[0], round_s)
            for codec in (coarse, eight)
        ]
        keeps = (lifting.opening == coarse).all(1)
        assert (times[0][keeps] <= times[1][keeps] / (1.0 - SPARED) * (1.0 + 1e-9)).all()
        assert (times[1][~keeps] < times[0][~keeps]).all()
        opened |= set(keeps.tolist())
    assert opened == {True, False}


def test_a_codec_that_is_fixed_holds_everywhere() -> None:
    for name in CODECS:
        plan = planned(_snapshot(1.0), replace(SETTINGS, codecs=(name,)))
        assert set(_codecs(plan)) == {name}


def test_a_cluster_that_is_bound_keeps_its_codec() -> None:
    snapshot = _snapshot(300.0, clusters=2)
    first = snapshot.clusters[0]
    bound = replace(first, profile=replace(first.profile, link_codec="int8"))
    plan = planned(replace(snapshot, clusters=(bound, *snapshot.clusters[1:])), SETTINGS)
    assert {hop.codec for hop in plan.clusters[0].hops} == {"int8"}
    assert {hop.codec for hop in plan.clusters[1].hops} == {"fp32"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A coarse decision with queues as in mid-run."""

    planner: PlanSolver
    coarse: Solution

    @property
    def refined(self) -> Solution:
        return refine_codecs(self.planner, self.coarse)


def _case(seed: int, codecs: tuple[str, ...] = AUTO) -> Case:
    found = instance(seed)
    settings = replace(found.settings, codecs=codecs)
    tables = tabulate(found.snapshot, settings.coarsest)
    planner = make_solver(tables, found.state, settings)
    return Case(planner=planner, coarse=planner.solve())


@pytest.mark.parametrize("seed", range(12))
def test_finer_codecs_cost_no_more_than_the_margins(seed: int) -> None:
    case = _case(seed)
    fine = case.refined
    assert fine.objective <= (1.0 + 2.0 * MARGIN) * case.coarse.objective * (1.0 + 1e-3)
    assert (fine.chain.hops.codec <= case.coarse.chain.hops.codec).all()


@pytest.mark.parametrize("seed", range(12))
def test_no_hop_could_be_lifted_alone(seed: int) -> None:
    case = _case(seed)
    steps = rank_codecs(AUTO)
    lifting = Lifting(case.planner, case.coarse, steps)
    codec = lift_codecs(lifting)
    assert lifting.find_allowed(codec).all()
    for row, hop in np.argwhere(case.coarse.chain.hops.used & (codec > 0)):
        trial = codec.copy()
        trial[row, hop] = steps[steps.index(int(codec[row, hop])) - 1]
        assert not lifting.find_allowed(trial)[row]


def test_greedy_lifting_is_near_the_least_noise() -> None:
    """Brute force over all codecs of every cluster's hops, under the same margins."""
    found, least, coarse = 0.0, 0.0, 0.0
    for seed in range(20):
        case = _case(seed)
        lifting = Lifting(case.planner, case.coarse, rank_codecs(AUTO))
        hops = case.coarse.chain.hops
        ours = NOISE[lift_codecs(lifting)] * hops.used
        best = np.full(len(ours), np.inf)
        for choice in product(rank_codecs(AUTO), repeat=hops.used.shape[1]):
            trial = np.where(hops.used, np.array(choice)[None, :], hops.codec)
            noise = (NOISE[trial] * hops.used).sum(1)
            best = np.minimum(best, np.where(lifting.find_allowed(trial), noise, np.inf))
        assert (ours.sum(1) >= best - 1e-15).all()
        found, least = found + ours.sum(), least + best.sum()
        coarse += float((NOISE[hops.codec] * hops.used).sum())
    assert (found - least) / (coarse - least) < 0.05  # of the noise that could be spared


def test_plans_with_codecs_are_priced_as_predicted() -> None:
    snapshot = _snapshot(0.5)
    plan = planned(snapshot, SETTINGS)
    assert price(plan, snapshot).latency_s == pytest.approx(plan.latency_s, rel=1e-6)


def test_a_codec_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"links\.codecs"):
        SchedulerConfig(codecs=("zip",))
