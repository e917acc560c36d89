"""The search against exact paths, a hill climb and annealing, and its parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from benchmarks.scheduling.exact_paths import segments
from benchmarks.scheduling.plain_costs import PlainCosts, rows_of
from benchmarks.scheduling.rivals import Budget, climb, promising, random_rows
from benchmarks.scheduling.search_gaps import SearchSize, read_sizes, search_case, search_planner
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.costs.chain import make_chain, price_rows
from collapipe_flwr.costs.layouts import gather_members
from collapipe_flwr.scheduler.planner import PlanSolver
from collapipe_flwr.scheduler.pool import PlanSelector, Pool, Within, pool_of, select_front
from collapipe_flwr.scheduler.problem import Estimates
from collapipe_flwr.scheduler.radio.interior_point import allocate, share_equally
from collapipe_flwr.scheduler.scorer import Scorer
from collapipe_flwr.scheduler.search import Search
from collapipe_flwr.scheduler.segment_dp import any_order, best_path, describe

SIZE = SearchSize(clusters=4, devices=6, blocks=12, seeds=range(1000, 1010))
EIGHT = SearchSize(clusters=8, devices=5, blocks=24, seeds=range(1))
OVERLAPPED = replace(SIZE, schedule="1f1b")


@pytest.mark.parametrize(
    ("seed", "queues"),
    [
        (1000, False),
        pytest.param(1001, False, marks=pytest.mark.slow),
        pytest.param(1004, False, marks=pytest.mark.slow),
        pytest.param(1002, True, marks=pytest.mark.slow),
        pytest.param(1009, True, marks=pytest.mark.slow),
        pytest.param(50168, False, marks=pytest.mark.slow),
        (50133, True),
    ],
)
def test_no_rival_is_better_by_a_hundredth_where_moves_alone_get_stuck(
    seed: int, queues: bool
) -> None:
    """Several devices are the slowest at once: no single move of a block makes a round shorter."""
    case = search_case(SIZE, seed, queues)
    assert len(case.rivals) == 2 + (not queues)
    assert case.gap < 0.01


@pytest.mark.parametrize(
    ("size", "seed", "queues"),
    [
        # A slow cluster needs larger batches than the others, with and without a joint change.
        pytest.param(EIGHT, 60037, False, marks=pytest.mark.slow),
        (EIGHT, 60096, True),
        # Two moves of the slowest cluster, neither of which is worth having alone.
        pytest.param(OVERLAPPED, 63054, False, marks=pytest.mark.slow),
        # A longer round that saves energy, far from a shorter one that is about as good.
        pytest.param(OVERLAPPED, 63140, True, marks=pytest.mark.slow),
        # Bandwidth that neither the radio's program gives nor equal shares do.
        pytest.param(replace(EIGHT, schedule="1f1b"), 66030, False, marks=pytest.mark.slow),
        # Rows that are good over equal bandwidth, while the plan in place has another.
        pytest.param(OVERLAPPED, 66149, True, marks=pytest.mark.slow),
        # Many moves of the slowest cluster, and of all four, as a beam finds them.
        (OVERLAPPED, 67027, False),
        pytest.param(OVERLAPPED, 66047, False, marks=pytest.mark.slow),
        # Bandwidth that is moved once more when the rows are known.
        pytest.param(replace(EIGHT, schedule="1f1b"), 67186, False, marks=pytest.mark.slow),
        # Depths with which a step took longer over a quicker link.
        pytest.param(OVERLAPPED, 83132, False, marks=pytest.mark.slow),
    ],
)
def test_no_rival_is_better_by_a_hundredth_where_several_must_change(
    size: SearchSize, seed: int, queues: bool
) -> None:
    assert search_case(size, seed, queues).gap < 0.01


def test_links_are_not_slowed_for_time_that_1f1b_does_not_take() -> None:
    """Its convex formula takes a cluster for the slowest that is not, and slows another's links."""
    planner = search_planner(replace(SIZE, schedule="1f1b", recompute=True), 70000, queues=False)
    rows = Search(planner).choose(planner.make_opening_prices(), None)
    chain = make_chain(planner.tables, rows, planner.settings)
    rho = planner.learning.compute_rho(planner.tables, rows)
    plain = allocate(
        chain,
        gather_members(planner.price_mi, rows),
        latency_price=planner.latency_price * rho,
        bandwidth_hz=planner.tables.snapshot.radio.bandwidth_hz,
    )
    by_formula = planner.price(chain, plain, rho).objective
    assert planner.optimize_radio(rows).objective < 0.99 * by_formula


def test_many_clusters_are_searched_as_well_as_single_ones() -> None:
    """From scratch and, with the limits of a warm decision, from a poor plan in place."""
    size = SearchSize(clusters=24, devices=6, blocks=12, seeds=range(3, 4))
    planner = search_planner(size, 3, queues=False)
    found = planner.solve()
    costs = PlainCosts(planner)
    pair = promising(costs, Budget(pairs=1))
    rng = np.random.default_rng(3)
    rows = random_rows(costs, np.arange(24), np.repeat(pair, 24, 0), rng)
    while not np.isfinite(costs.price_of(rows)[0]).all():
        bad = ~np.isfinite(costs.price_of(rows)[0])
        rows.put(
            np.flatnonzero(bad),
            random_rows(costs, rows.cluster[bad], np.repeat(pair, bad.sum(), 0), rng),
        )
    poor = planner.optimize_radio(rows.layouts())
    warm = planner.solve(poor)
    assert poor.objective > 1.2 * found.objective
    assert warm.objective < 1.02 * found.objective


def a_planner(queues: bool, seed: int = 5, **mode: Any) -> PlanSolver:
    size = SearchSize(clusters=3, devices=4, blocks=6, seeds=range(1), **mode)
    return search_planner(size, seed, queues)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", [False, True])
def test_rivals_price_as_the_cost_model_does(schedule: str, recompute: bool) -> None:
    """Under 1F1B as its lower bound, which is what the search goes by."""
    for queues in (False, True):
        planner = a_planner(queues, schedule=schedule, recompute=recompute)
        costs = PlainCosts(planner)
        rows = climb(costs, Budget(starts=1, climbs=20, pairs=2), np.random.default_rng(0)).rows
        for start in range(6):
            some = rows.take(np.flatnonzero(rows.cluster == 0)[[start]])
            layouts = some.layouts()
            layouts = layouts.take(np.zeros(3, int))
            layouts = replace(layouts, cluster_r=np.arange(3))
            seconds, energy = costs.price_of(rows_of(layouts, costs.devices))
            chain = make_chain(planner.tables, layouts, planner.settings)
            shares = share_equally(chain, planner.tables.snapshot.radio.bandwidth_hz)
            rho = planner.learning.compute_rho(planner.tables, layouts)
            priced = planner.price(chain, shares, rho)
            bounded = price_rows(chain, shares.times, priced.powers)
            more_s = priced.priced.latency_s.max() - bounded.latency_s.max()  # when played
            fits = np.isfinite(seconds)
            assert bounded.latency_s[fits] == pytest.approx(seconds[fits], rel=1e-12)
            if fits.all():
                batch = (some.size * some.count).repeat(3)[None]
                value = costs.objective(seconds[None], energy[None], batch)
                more = planner.latency_price * rho * more_s
                assert value[0] + more == pytest.approx(priced.objective, rel=1e-12)


def test_exact_paths_price_as_rivals_do_and_no_climb_beats_them() -> None:
    planner = a_planner(queues=True)
    costs = PlainCosts(planner)
    pair, slope = promising(costs, Budget(pairs=1))[0], planner.latency_price
    found = climb(costs, Budget(starts=4, climbs=200, pairs=1), np.random.default_rng(1))
    for m in range(3):
        problem = segments(costs, m, pair, slope)
        mine = np.flatnonzero((found.rows.cluster == m) & np.isfinite(found.seconds))
        values = slope * found.seconds[mine] + found.energy[mine]
        paths = []
        for r in mine:
            used = found.rows.device[r] >= 0
            devices = (found.rows.device[r][used] - 1).tolist()
            stops = np.cumsum(found.rows.blocks[r][used]).tolist()
            paths.append(describe(problem, devices, stops).value(problem))
        # Both differ by what every layout costs, the same for all.
        fixed = values - np.array(paths)
        assert np.ptp(fixed) < 1e-9 * values.max()
        assert best_path(problem, any_order).value(problem) <= min(paths) * (1 + 1e-12)


def a_pool(planner: PlanSolver, rows: int, seed: int) -> Pool:
    costs, rng = PlainCosts(planner), np.random.default_rng(seed)
    clusters = np.repeat(np.arange(3), rows)
    pairs = costs.sizes[rng.integers(0, 6, len(clusters))]
    layouts = random_rows(costs, clusters, pairs, rng).layouts()
    scorer = Scorer(planner, planner.make_opening_prices())
    return pool_of(planner, scorer, layouts)


def a_pool_with_ties(rng: np.random.Generator, seed: int) -> Pool:
    pool = a_pool(a_planner(queues=True), 40, seed)
    worth, latency = rng.integers(1, 9, len(pool)) / 2.0, rng.integers(1, 9, len(pool)) / 2.0
    return replace(pool, costs=Estimates(latency, latency, worth))


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_pick_is_near_the_best_of_all_combinations(queues: bool, seed: int) -> None:
    planner = a_planner(queues, seed)
    pool = a_pool(planner, 40, seed)
    picking = PlanSelector(planner, pool)
    mine = [np.flatnonzero(pool.rows.cluster_r == m) for m in range(3)]
    best = min(picking.value(np.array(choice)) for choice in product(*(m[:14] for m in mine)))
    value, choice = PlanSelector(planner, pool.take(np.concatenate([m[:14] for m in mine]))).best()
    assert value <= best * 1.01
    assert (np.diff(np.sort(choice)) > 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_front_is_what_no_other_row_beats(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = a_pool_with_ties(rng, seed)
    worth, latency = pool.costs.worth, pool.costs.latency
    group = pool.rows.cluster_r * 100 + pool.pair_r
    kept = select_front(pool, 100, 0.0)
    for r in range(len(pool)):
        rivals = group == group[r]
        better = (worth <= worth[r]) & (latency <= latency[r]) & rivals
        strictly = better & ((worth < worth[r]) | (latency < latency[r]))
        if kept[r]:
            assert not strictly.any()
        else:
            assert (better & kept).any()


@pytest.mark.parametrize("seed", range(5))
def test_the_thriftiest_row_of_every_kind_within_a_length(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = a_pool_with_ties(rng, seed)
    worth, latency = pool.costs.worth, pool.costs.latency
    kind = np.unique(rng.integers(0, 12, len(pool)), return_inverse=True)[1]
    lengths = np.arange(0.0, 5.0, 0.25)
    found = Within(pool, kind).rows(lengths)
    for k, seconds in product(range(kind.max() + 1), lengths):
        good = np.flatnonzero((kind == k) & (latency <= seconds))
        expected = good[worth[good].argmin()] if len(good) else -1
        assert found[int(seconds / 0.25), k] == expected


def test_the_same_problem_has_the_same_answer() -> None:
    one, two = (a_planner(queues=True).solve() for _ in range(2))
    assert one.objective == two.objective
    assert (one.rows.stop_rs == two.rows.stop_rs).all()


def test_sizes_and_seeds_are_read_from_the_command_line() -> None:
    sizes = read_sizes("4x6x12=5-7, 100x10x24=3")
    assert [(str(size), list(size.seeds)) for size in sizes] == [
        ("4x6x12", [5, 6, 7]),
        ("100x10x24", [3]),
    ]
    for wrong in ("4x6=1-2", "4x6x12", "0x6x12=1", "4x6x12=a-b"):
        with pytest.raises(ConfigError, match="--search"):
            read_sizes(wrong)
