"""Decisions: never worse than alternatives, monotone, near the brute-force optimum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.oracles.brute_force import exhaustive
from collapipe_flwr.core.domain import Snapshot
from collapipe_flwr.core.errors import InfeasibleError, ScheduleError
from collapipe_flwr.costs.layouts import stack_layouts
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.base import make_initial_state, make_solver
from collapipe_flwr.scheduler.initial_layouts import all_layouts, count_layouts, rows_for
from collapipe_flwr.scheduler.local_search import Moves
from collapipe_flwr.scheduler.planner import PlanSolver
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.scorer import Scorer
from collapipe_flwr.scheduler.search import Search
from tests.worlds import draw_snapshot, with_devices

SMALL = SchedulerConfig(schedule="gpipe", micro_batch_sizes=(2, 8), micro_batches=(2, 8))


def a_planner(
    snapshot: Snapshot, settings: SchedulerConfig = SMALL, queue_seed: int | None = None
) -> PlanSolver:
    state = make_initial_state(snapshot, settings)
    if queue_seed is not None:
        rng = np.random.default_rng(queue_seed)
        queues = {
            cluster: {device: float(rng.exponential(2.0)) * budget for device, budget in b.items()}
            for cluster, b in state.budget_j.items()
        }
        state = replace(state, energy_queue_j=queues)
    return make_solver(tabulate(snapshot), state, settings)


@pytest.mark.parametrize("seed", range(12))
def test_close_to_brute_force(seed: int) -> None:
    shape = {"clusters": 1, "devices": 3, "blocks": 4}
    if seed % 2:
        shape = {"clusters": 2, "devices": 2, "blocks": 3}
    settings = replace(SMALL, micro_batches=(4,), bound=bool(seed % 3))
    planner = a_planner(draw_snapshot(seed, **shape), settings, queue_seed=seed)
    best, mine = exhaustive(planner).objective, planner.solve().objective
    assert best * (1 - 1e-6) <= mine <= best * 1.05


def test_alternation_never_gets_worse() -> None:
    for seed in range(5):
        planner = a_planner(draw_snapshot(seed, clusters=3, devices=3, blocks=5), queue_seed=seed)
        now = planner.optimize_radio(Search(planner).choose(planner.make_opening_prices(), None))
        for _ in range(4):
            after = planner.improve(now)
            assert after.objective <= now.objective * (1 + 1e-12)
            now = after
        assert planner.polish(now).objective <= now.objective * (1 + 1e-12)


def test_enumeration_counts_and_validity() -> None:
    for devices, blocks in ((1, 1), (2, 3), (3, 5), (4, 2)):
        members, stops = all_layouts(devices, blocks)
        assert len(members) == count_layouts(devices, blocks)
        assert len(
            {(*m, *s) for m, s in zip(members.tolist(), stops.tolist(), strict=True)}
        ) == len(members)


def test_moves_stay_valid_and_reach_every_layout() -> None:
    devices, blocks = 3, 4
    batches = np.array([[1, 1]])
    every = rows_for(0, *all_layouts(devices, blocks), batches)
    seen = {_name(every, r) for r in range(len(every))}
    reached, frontier = set(), [every.take(np.array([0]))]
    while frontier:
        row = frontier.pop()
        near = Moves(row, np.array([[np.inf, 1.0, 1.0, 1.0]]), 4).all()
        for r in range(len(near)):
            name = _name(near, r)
            assert name in seen
            if name not in reached:
                reached.add(name)
                frontier.append(near.take(np.array([r])))
    assert reached == seen


def _name(rows: object, r: int) -> tuple[tuple[int, int], ...]:
    pairs = zip(rows.member_rs[r].tolist(), rows.stop_rs[r].tolist(), strict=True)
    return tuple((m, s) for m, s in pairs if m > 0)


def test_no_memory_is_infeasible_with_a_way_out() -> None:
    snapshot = draw_snapshot(1, clusters=2, devices=2, blocks=3)
    poor = snapshot.clusters[1]
    devices = tuple(replace(d, memory_bytes=1000) for d in poor.profile.devices)
    broken = with_devices(poor, devices)
    planner = a_planner(replace(snapshot, clusters=(snapshot.clusters[0], broken)))
    with pytest.raises(InfeasibleError, match=r"cluster-1.*add a device"):
        planner.solve()


def test_brute_force_refuses_large_instances() -> None:
    with pytest.raises(ScheduleError, match="tiny"):
        exhaustive(a_planner(draw_snapshot(0, clusters=2, devices=4, blocks=12)))


def test_scores_rank_like_priced_rows() -> None:
    """The fast score of the chosen rows is what the cost model says at the same hop times."""
    planner = a_planner(draw_snapshot(3, clusters=3, devices=3, blocks=5))
    best = planner.solve()
    prices = planner.make_dual_prices(best)
    scorer = Scorer(planner, prices)
    value = scorer.score(best.rows, best.rows)
    near = stack_layouts([best.rows, planner.list_neighbours(best.rows)])
    others = scorer.score(near, best.rows)
    assert np.isfinite(value).all()
    assert (others >= value[near.cluster_r] - 0.05 * np.abs(value[near.cluster_r])).all()


def test_all_clusters_change_their_batches_together() -> None:
    """Where the slowest learner decides the rounds, one cluster alone gains nothing."""
    planner = a_planner(draw_snapshot(5, clusters=3, devices=2, blocks=3))
    start = planner.optimize_radio(Search(planner).choose(planner.make_opening_prices(), None))
    for size, count in planner.list_batches():
        rows = start.rows.with_batches(np.full(3, size), np.full(3, count))
        found = planner.solve(planner.optimize_radio(rows))
        best = min(
            planner.optimize_radio(start.rows.with_batches(np.full(3, b), np.full(3, j))).objective
            for b, j in planner.list_batches()
        )
        assert found.objective <= best * 1.02


def test_alternation_never_gets_worse_with_many_clusters() -> None:
    for seed in range(2):
        planner = a_planner(draw_snapshot(seed, clusters=40, devices=6, blocks=8), queue_seed=seed)
        now = planner.optimize_radio(Search(planner).choose(planner.make_opening_prices(), None))
        for _ in range(2):
            after = planner.solve(now)
            assert after.objective <= now.objective * (1 + 1e-12)
            now = after
