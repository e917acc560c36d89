"""Under 1F1B plans are compared by what a replay says of them, not by the search's lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scheduling.search_gaps import SearchSize, search_planner
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import (
    compute_full_power_times,
    make_chain,
    price_rows,
    replay_rows,
    schedule_rows,
)
from collapipe_flwr.costs.layouts import make_key, replace_rows
from collapipe_flwr.scheduler import planner as planning
from collapipe_flwr.scheduler import runners_up as playing
from collapipe_flwr.scheduler.planner import Solution
from collapipe_flwr.scheduler.radio.interior_point import share_equally
from collapipe_flwr.scheduler.runners_up import CandidateRows, Incumbent
from collapipe_flwr.scheduler.search import Search

SIZE = SearchSize(clusters=4, devices=6, blocks=12, seeds=range(1), schedule="1f1b")
EIGHT = SearchSize(clusters=8, devices=5, blocks=24, seeds=range(1), schedule="1f1b")
SEEDS = range(61000, 61006)


def quick_and(all_of_them: Sequence[int], *few: int) -> pytest.MarkDecorator:
    """These seeds always, and all of them with the slow tests."""
    every = pytest.param(all_of_them, marks=pytest.mark.slow, id="all")
    return pytest.mark.parametrize("seeds", [pytest.param(few, id="few"), every])


def test_a_decision_is_priced_as_it_will_be_played() -> None:
    found = search_planner(SIZE, SEEDS[0], queues=True).solve()
    _, step_s = schedule_rows(found.chain, found.allocation.times)
    latency_s = found.chain.fixed_s + found.chain.steps_r * step_s
    assert found.priced.latency_s == pytest.approx(latency_s)
    bounded = price_rows(found.chain, found.allocation.times, found.powers)
    assert (found.priced.latency_s >= bounded.latency_s * (1 - 1e-12)).all()


@quick_and(SEEDS, 61001, 61005)
def test_plans_are_better_for_it(monkeypatch: pytest.MonkeyPatch, seeds: Sequence[int]) -> None:
    """By rho T as played: in the mean, and on no seed worse by more than 1 %."""
    ours = np.array([cost_of(search_planner(SIZE, seed, queues=False).solve()) for seed in seeds])
    with monkeypatch.context() as patch:
        patch.setattr(planning.PlanSolver, "few", False)  # as in the rounds of many clusters
        planners = [search_planner(SIZE, seed, queues=False) for seed in seeds]
        found = [planner.solve() for planner in planners]
    before = np.array([cost_of(solution) for solution in found])
    assert (ours <= 1.01 * before).all(), ours / before
    assert ours.mean() < 0.995 * before.mean()


@pytest.mark.parametrize("queues", [False, True])
def test_no_radio_is_worse_than_full_power_over_equal_or_given_bandwidth(*, queues: bool) -> None:
    """On some of these seeds the radio program alone is."""
    for seed in SEEDS[:4]:
        planner = search_planner(SIZE, seed, queues=queues)
        rows = Search(planner).choose(planner.make_opening_prices(), None)
        chain = make_chain(planner.tables, rows, planner.settings)
        rho = planner.learning.compute_rho(planner.tables, rows)
        equal = share_equally(chain, planner.tables.snapshot.radio.bandwidth_hz)
        hz_m = equal.edge_hz_r * np.array([1.6, 0.4, 1.3, 0.7])
        uneven = replace(equal, edge_hz_r=hz_m, times=compute_full_power_times(chain, hz_m))
        for given, plain in ((None, equal), (hz_m, uneven)):
            most = planner.price(chain, plain, rho).objective
            assert planner.optimize_radio(rows, given).objective <= most * (1 + 1e-12)


@quick_and(range(61000, 61005), 61001)
def test_rows_of_all_clusters_are_chosen_together(
    monkeypatch: pytest.MonkeyPatch, seeds: Sequence[int]
) -> None:
    """Where several clusters are about as slow, no change of a single one shortens the round."""

    def objectives() -> Array:
        found = [search_planner(EIGHT, seed, queues=True).solve() for seed in seeds]
        return np.array([solution.objective for solution in found])

    ours = objectives()
    monkeypatch.setattr(CandidateRows, "combine", lambda self: self.plan.rows)
    before = objectives()
    assert (ours <= before * (1 + 1e-9)).all(), ours / before
    assert (ours / before).mean() < 0.993


def test_what_a_runner_up_costs_can_be_had() -> None:
    """Rows chosen together cost no more, once their radio is solved, than they promised."""
    planner = search_planner(SIZE, SEEDS[0], queues=True)
    rows = Search(planner).choose(planner.make_opening_prices(), None)
    now = planner.optimize_radio(rows)
    near = planner.keep_fitting(planner.list_neighbours(rows))
    own, hz_m = planner.estimate(now.chain, now.priced), now.allocation.edge_hz_r
    found = Incumbent(planner, rows, own, hz_m).play_rows(near, joint=True)
    near = found.near
    for r in (0, len(near) // 2, len(near) - 1, int(found.value_alone().argmin())):
        changed = replace_rows(rows, near.cluster_r[[r]], near.take(np.array([r])))
        energy = float(own.worth.sum())
        assert planner.optimize_radio(changed, hz_m).objective <= (
            found.value_alone()[r] + energy
        ) * (1 + 1e-9)


def cost_of(found: Solution) -> float:
    """rho T in seconds."""
    priced = replay_rows(found.chain, found.allocation.times, found.priced)
    return found.rho * float(priced.latency_s.max())


def test_rows_that_are_left_out_are_not_among_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of each cluster alone, and the best choice for all, are those of playing all."""
    for seed in SEEDS[:2]:
        planner = search_planner(SIZE, seed, queues=True)
        now = planner.optimize_radio(Search(planner).choose(planner.make_opening_prices(), None))
        near = planner.keep_fitting(planner.list_neighbours(now.rows))
        own, hz_m = planner.estimate(now.chain, now.priced), now.allocation.edge_hz_r
        found = Incumbent(planner, now.rows, own, hz_m).play_rows(near, joint=True)
        with monkeypatch.context() as patch:
            patch.setattr(playing, "WIDTH", len(near))
            every = Incumbent(planner, now.rows, own, hz_m).play_rows(near, joint=True)
        assert len(found.near) < 0.8 * len(every.near) == 0.8 * len(near)
        for m in range(SIZE.clusters):
            best, all_ = (
                np.sort(each.value_alone()[each.near.cluster_r == m]) for each in (found, every)
            )
            assert (best[: playing.WIDTH] == all_[: playing.WIDTH]).all()
        assert make_key(found.combine()) == make_key(every.combine())
