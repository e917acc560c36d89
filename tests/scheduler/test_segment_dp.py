"""Exact segmentation against enumeration of every layout."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.scheduler.segment_dp import (
    SegmentProblem,
    any_order,
    best_path,
    describe,
    in_order,
)
from tests.thorough import examples


def random_problem(seed: int, devices: int, blocks: int) -> SegmentProblem:
    rng = np.random.default_rng(seed)
    speed, work = rng.uniform(0.3, 3.0, devices), rng.uniform(0.5, 2.0, blocks)
    prefix = np.concatenate([[0.0], np.cumsum(work)])
    spans = (prefix[None, :] - prefix[:, None])[None] / speed[:, None, None]
    cost = spans * rng.uniform(0.5, 3.0, devices)[:, None, None] + rng.uniform(0.0, 0.3)
    room = rng.uniform(0.3, 1.2, devices) * blocks
    length = np.arange(blocks + 1)[None, :] - np.arange(blocks + 1)[:, None]
    allowed = (length > 0)[None] & (length[None] <= room[:, None, None])
    hop = rng.uniform(0.0, 1.5, (devices + 1, devices + 2, blocks + 1))
    return SegmentProblem(
        stage_cost_nlk=np.where(allowed, cost, np.inf),
        stage_forward_nlk=spans,
        stage_backward_nlk=spans * rng.uniform(0.5, 2.5, devices)[:, None, None],
        hop_cost_ijl=hop * rng.uniform(0.2, 2.0),
        hop_forward_ijl=hop,
        hop_backward_ijl=rng.uniform(0.0, 1.5, hop.shape),
        pace=float(rng.choice([0.0, 0.5, 3.0, 20.0])),
        floor=(float(rng.uniform(0, 0.5)), float(rng.uniform(0, 0.5))),
        fixed_cost=1.0,
    )


def brute_force(problem: SegmentProblem, orders: list[tuple[int, ...]]) -> float:
    best = np.inf
    for order in orders:
        for cuts in combinations(range(1, problem.blocks), len(order) - 1):
            path = describe(problem, order, (*cuts, problem.blocks))
            best = min(best, path.value(problem))
    return float(best)


def all_orders(problem: SegmentProblem) -> list[tuple[int, ...]]:
    depth = min(problem.devices, problem.blocks)
    return [o for k in range(1, depth + 1) for o in permutations(range(problem.devices), k)]


@examples(20, 60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 6))
def test_free_order_equals_brute_force(seed: int, devices: int, blocks: int) -> None:
    problem = random_problem(seed, devices, blocks)
    expected = brute_force(problem, all_orders(problem))
    if not np.isfinite(expected):
        with pytest.raises(InfeasibleError):
            best_path(problem, any_order)
        return
    assert best_path(problem, any_order).value(problem) == pytest.approx(expected, rel=1e-12)


@examples(20, 60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 7))
def test_fixed_order_equals_brute_force(seed: int, devices: int, blocks: int) -> None:
    problem = random_problem(seed, devices, blocks)
    order = tuple(np.random.default_rng(seed).permutation(devices).tolist())
    depth = min(devices, blocks)
    subsets = [c for k in range(1, depth + 1) for c in combinations(order, k)]
    expected = brute_force(problem, subsets)
    if not np.isfinite(expected):
        with pytest.raises(InfeasibleError):
            best_path(problem, in_order(order))
        return
    assert best_path(problem, in_order(order)).value(problem) == pytest.approx(expected, rel=1e-12)


def test_seven_devices_and_eight_blocks_never_lose_to_any_fixed_order() -> None:
    problem = random_problem(5, 7, 8)
    best = best_path(problem, any_order).value(problem)
    rng = np.random.default_rng(0)
    for _ in range(10):
        order = tuple(rng.permutation(7).tolist())
        assert best <= best_path(problem, in_order(order)).value(problem) + 1e-12
