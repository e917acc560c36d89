"""Lower bounds of rounds: below everything that schedules, plans and policies do, and near it."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from collapipe_flwr.core.replay import StepTimes, replay
from collapipe_flwr.costs.bounds import EXACT, MOST_DEVICES, ClusterBound, find_shortest_step_s
from collapipe_flwr.costs.chain import (
    compute_full_power_times,
    make_chain,
    price_rows,
    schedule_rows,
)
from collapipe_flwr.costs.makespan import compute_step_makespan_s
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.warm_up import choose_warm_up
from collapipe_flwr.costs.work import PricingOptions, fits
from collapipe_flwr.scheduler.initial_layouts import all_layouts, rows_for
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.episode import run_episode
from collapipe_flwr.simulation.setting import ModelShape
from collapipe_flwr.simulation.world import EnergyBudget, World, make_world, mixed_devices
from tests.thorough import examples
from tests.worlds import BOARDS

PAIRS = np.array([(2, 2), (4, 8)])
MODEL = ModelShape(blocks=4, width=256, tokens=32).profile()


def drawn_times(seed: int, stages: int) -> StepTimes:
    rng = np.random.default_rng(seed)
    draw = [tuple(rng.choice([0.01, 0.1, 1.0], n) * rng.uniform(0.1, 1.0, n)) for n in [stages] * 2]
    hops = [tuple(rng.uniform(0.0, 0.3, stages - 1)) for _ in range(2)]
    return StepTimes(stage_s=(draw[0], draw[1]), hop_s=(hops[0], hops[1]))


def busiest_s(times: StepTimes, count: int) -> float:
    """The most of J times a stage and what stands before it, both ways."""
    stages = [f + r for f, r in zip(*times.stage_s, strict=True)]
    hops = [u + v for u, v in zip(*times.hop_s, strict=True)]
    ahead = accumulate((s + h for s, h in zip(stages, [*hops, 0.0], strict=True)), initial=0.0)
    return max(count * s + a for s, a in zip(stages, ahead, strict=False))


@examples(25, 80)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 8))
def test_no_order_of_actions_beats_a_stage_and_what_stands_before_it(
    seed: int, stages: int, count: int
) -> None:
    times = drawn_times(seed, stages)
    rng = np.random.default_rng(seed)
    depths = sorted(rng.integers(1, count + 1, stages).tolist(), reverse=True)
    for each in (depths, [count] * stages):
        makespan_s = replay(times, each, count).makespan_s
        assert makespan_s >= busiest_s(times, count) * (1 - 1e-12)


def test_the_bound_of_1f1b_is_nearly_met() -> None:
    """By the depths that plans choose where memory allows all of them."""
    ratios = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        stages, count = int(rng.choice([3, 5, 7])), int(rng.choice([4, 8, 16]))
        ahead = (0.001, *rng.uniform(0.1, 1.0, stages - 2), 0.03)
        hop = tuple(rng.choice([0.0, 0.02, 0.1, 0.3]) * rng.uniform(0.5, 1.5, stages - 1))
        stage_s = (ahead, tuple(2.0 * f for f in ahead))
        step = StepTimes(stage_s=stage_s, hop_s=(hop, hop))
        options = PricingOptions(schedule="1f1b")
        bound_s = compute_step_makespan_s(options, stage_s, (hop, hop), np.array(float(count)))
        ratios.append(float(bound_s) / choose_warm_up(step, (count,) * stages, count).makespan_s)
    assert max(ratios) <= 1.0 + 1e-9
    assert np.median(ratios) > 0.999 and np.percentile(ratios, 5) > 0.95


@pytest.mark.parametrize("seed", range(12))
def test_the_least_step_is_that_of_the_best_order_and_cut(seed: int) -> None:
    rng = np.random.default_rng(seed)
    devices, blocks, count = 3, 4, int(rng.choice([1, 2, 8]))
    spans_s = np.cumsum(rng.uniform(0.5, 2.0, (devices, 1, blocks + 1)), axis=2)
    spans_s = spans_s - spans_s.transpose(0, 2, 1)
    spans_s[(spans_s <= 0) | (rng.random(spans_s.shape) < 0.2)] = np.inf
    least = np.inf
    for depth in range(1, devices + 1):
        for order in permutations(range(devices), depth):
            for cut in combinations(range(1, blocks), depth - 1):
                ends = pairwise((0, *cut, blocks))
                y = [spans_s[n, a, b] for n, (a, b) in zip(order, ends, strict=True)]
                ahead = np.cumsum([0.0, *(s + 0.1 for s in y)])
                stages = [count * s + a for s, a in zip(y, ahead, strict=False)]
                least = min(least, max(*stages, ahead[-1] - 0.1 + 0.3 + count * 0.2))
    found = find_shortest_step_s(spans_s, count, 0.1, 0.3, 0.2)
    assert found == least == np.inf or least * (1 - 2 * EXACT) <= found <= least


def test_many_devices_get_a_bound_below_that_of_few() -> None:
    """Where orders are too many, what stands before a device is left out."""
    length = np.subtract.outer(np.arange(13), np.arange(13)).T.astype(float)
    one = np.where(length > 0, length, np.inf)
    exact = find_shortest_step_s(np.stack([one] * 6), 4, 0.0, 0.0, 0.0)
    idle = np.full_like(one, np.inf)
    many = find_shortest_step_s(np.stack([one] * 6 + [idle] * (MOST_DEVICES - 5)), 4, 0.0, 0.0, 0.0)
    assert many == 4 * 2.0 < exact


def a_world(seed: int, budget: EnergyBudget, channel: str = "block-fading") -> World:
    return make_world(
        cluster_devices=mixed_devices(2, 3, seed, BOARDS),
        examples=[100, 150],
        channel=channel,
        seed=seed,
        budget=budget,
        model=MODEL,
    )


POLICIES = ("dssda", "splitfed", "uniform", "throughput", "latency-only")


@pytest.mark.parametrize(
    ("policy", "schedule", "seed"),
    [  # each policy under each schedule on one of the seeds, and on all with the slow tests
        pytest.param(*case, marks=() if number % 3 == number // 3 % 3 else pytest.mark.slow)
        for number, case in enumerate(product(POLICIES, ("gpipe", "1f1b"), range(3)))
    ],
)
def test_no_policys_round_is_shorter(policy: str, schedule: str, seed: int) -> None:
    options = SchedulerConfig(
        micro_batch_sizes=(2, 4),
        micro_batches=(2, 8),
        schedule=schedule,
        recompute=seed == 1,
        best_batches=True,
        bound=False,
    )
    world = a_world(seed, EnergyBudget())
    pairs = np.array(options.batches)
    for done in run_episode(world, make_scheduler(policy, options), MODEL, 3, options=options):
        tables = tabulate(world.snapshot(done.plan.round_index, MODEL), options.coarsest)
        for m, cluster in enumerate(done.outcome.clusters):
            least_s = ClusterBound([tables], m, options, pairs).find_least_s()[0][0]
            assert least_s <= cluster.latency_s


@pytest.mark.parametrize("seed", range(4))
def test_no_mix_of_plans_within_budgets_is_shorter_and_the_best_is_near(seed: int) -> None:
    """All layouts and pairs at full power: the best mix is a linear program."""
    options = PricingOptions(schedule="1f1b")
    world = a_world(seed, EnergyBudget(equal_shares=1.2, radio_s=5.0), "static")
    tables = tabulate(world.snapshot(1, MODEL))
    for m in range(2):
        rows = rows_for(m, *all_layouts(3, 4), PAIRS)
        rows = rows.take(fits(tables, rows, options))
        chain = make_chain(tables, rows, options)
        times = compute_full_power_times(
            chain, np.full(len(rows), tables.snapshot.radio.bandwidth_hz)
        )
        _, step_s = schedule_rows(chain, times)
        latency_s = chain.fixed_s + chain.steps_r * step_s
        energy = price_rows(chain, times, np.zeros_like(times)).energy_j
        spent = np.zeros((3, len(rows)))
        for r, members in enumerate(rows.member_rs):
            for k, i in enumerate(members[members > 0]):
                spent[i - 1, r] = energy[r, k + 1]
        budget = tables.members.budget_mi[m, 1:]
        ones = np.ones((1, len(rows)))
        best = linprog(latency_s, A_ub=spent, b_ub=budget, A_eq=ones, b_eq=[1.0])
        found = ClusterBound([tables], m, options, PAIRS)
        assert best.success
        free_s, bound_s = float(found.find_least_s()[0][0]), found.bound_within_budgets_s()
        assert free_s <= latency_s.min() and free_s <= bound_s <= best.fun
        assert bound_s > 0.8 * best.fun
