"""More clusters than time allows to search thoroughly in every round."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scheduling.search_gaps import SearchSize, search_case, search_planner
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import compute_full_power_times, compute_latency_s
from collapipe_flwr.scheduler.base import USUAL_WEIGHT
from collapipe_flwr.scheduler.dssda import Dssda, fit_accounts
from collapipe_flwr.scheduler.multipliers import PART, guess_weight
from collapipe_flwr.scheduler.planner import PlanSolver, Solution
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerState
from collapipe_flwr.scheduler.radio.equal_ends import equalize_hz
from collapipe_flwr.simulation.episode import run_episode
from collapipe_flwr.simulation.setting import ModelShape, Setting

MANY = SearchSize(clusters=24, devices=5, blocks=12, seeds=range(2), schedule="1f1b")
SEED = 62001
BAND_HZ = 8e6  # scarce


@pytest.fixture(scope="module")
def planner() -> PlanSolver:
    return search_planner(MANY, SEED, queues=False)


@pytest.fixture(scope="module")
def found(planner: PlanSolver) -> Solution:
    return planner.solve()


def late_s(solution: Solution, hz_m: Array) -> Array:
    """Seconds of every cluster at full power, by the lower bound."""
    return compute_latency_s(solution.chain, compute_full_power_times(solution.chain, hz_m))


def test_no_split_of_the_bandwidth_ends_sooner(found: Solution) -> None:
    rows, rng = len(found.rows), np.random.default_rng(SEED)
    even = np.full(rows, BAND_HZ / rows)
    level = equalize_hz(found.chain, even, BAND_HZ)
    assert level.sum() == pytest.approx(BAND_HZ)
    ends = late_s(found, level)
    assert ends.max() < 0.99 * late_s(found, even).max()
    for spread in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(50):
            other = level * np.exp(spread * rng.standard_normal(rows))
            other *= BAND_HZ / other.sum()
            assert ends.max() <= late_s(found, other).max() * (1 + 2e-3)


def test_clusters_that_computing_holds_up_get_no_more_than_helps(found: Solution) -> None:
    rows = len(found.rows)
    level = equalize_hz(found.chain, np.full(rows, BAND_HZ / rows), BAND_HZ)
    ends, ample = late_s(found, level), late_s(found, 8.0 * level)
    waiting = ample < 0.9 * ends.max()
    assert waiting.any()
    assert ends[waiting] == pytest.approx(np.full(waiting.sum(), ends.max()), rel=0.03)


def test_the_bound_that_many_clusters_are_decided_by_is_nearly_met(
    planner: PlanSolver, found: Solution
) -> None:
    played = planner.play(found)
    longer = played.priced.latency_s / found.priced.latency_s
    assert (longer >= 1.0 - 1e-12).all()
    assert np.quantile(longer, 0.9) < 1.005
    assert longer.max() < 1.05
    assert (played.priced.energy_j == found.priced.energy_j).all()


@pytest.mark.slow
@pytest.mark.parametrize("queues", [False, True])
def test_no_rival_finds_a_better_plan(queues: bool) -> None:
    case = search_case(MANY, SEED + 1, queues)
    assert case.gap <= 0.01, case


def test_rounds_that_follow_are_about_as_short() -> None:
    """Nearly every cluster's rows in place spend more than accounts hold now; a decision that
    tries only some of them leaves a few that hold all others up."""
    setting = Setting(clusters=60, devices=8, rounds=3, model=ModelShape(blocks=24))
    profile = setting.model.profile()
    world, scheduler = setting.world(SEED, profile), make_scheduler("dssda", setting.settings)
    done = list(run_episode(world, scheduler, profile, setting.rounds))
    lengths = np.array([each.plan.rho * each.plan.latency_s for each in done])
    assert (lengths[1:] < 1.6 * lengths[0]).all(), lengths


@pytest.mark.parametrize(
    ("seed", "rounds"), [(SEED, 2), pytest.param(SEED + 1, 3, marks=pytest.mark.slow)]
)
def test_rounds_that_follow_are_decided_nearly_as_well_as_from_scratch(
    seed: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a fraction of the time, and whatever the last round has left in the accounts."""
    setting = Setting(clusters=21, devices=4, rounds=rounds)
    ratios: list[float] = []
    settle = Dssda._settle

    def compared(self: Dssda, planner: PlanSolver, state: SchedulerState) -> Solution:
        found = settle(self, planner, state)
        if state.last_plan is not None:
            ratios.append(found.objective / fit_accounts(planner, planner.solve()).objective)
        return found

    monkeypatch.setattr(Dssda, "_settle", compared)
    profile = setting.model.profile()
    scheduler = make_scheduler("dssda", setting.settings)
    list(run_episode(setting.world(seed, profile), scheduler, profile, setting.rounds))
    assert len(ratios) == setting.rounds - 1
    assert max(ratios) < 1.02, ratios


def test_a_queue_weighs_less_the_more_devices_share_the_price_of_a_second() -> None:
    """Where no multipliers are learned: the mean of those that sum to one latency."""
    setting = Setting(clusters=60, devices=2, rounds=1, model=ModelShape(blocks=4))
    profile = setting.model.profile()
    scheduler = make_scheduler("dssda", setting.settings)
    (done,) = run_episode(setting.world(SEED, profile), scheduler, profile, 1)
    assert done.state.weight == pytest.approx(120 / PART)
    assert guess_weight(3) == USUAL_WEIGHT
