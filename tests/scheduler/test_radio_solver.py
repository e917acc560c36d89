"""The vectorised radio solver against cvxpy, random perturbations and its own KKT conditions."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.chain import (
    Chain,
    compute_full_power_times,
    make_chain,
    price_rows,
    solve_powers,
)
from collapipe_flwr.costs.layouts import Layouts
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.scheduler.radio.interior_point import (
    InteriorPoint,
    NewtonSystem,
    allocate,
    share_equally,
)
from collapipe_flwr.scheduler.radio.problem import (
    Point,
    RadioProblem,
    RadioTerms,
    make_radio_problem,
)
from tests.worlds import draw_snapshot

BAND = 40e6


def an_instance(
    seed: int, clusters: int, schedule: str = "gpipe"
) -> tuple[Chain, np.ndarray, float]:
    rng = np.random.default_rng(seed)
    tables = tabulate(draw_snapshot(seed, clusters=clusters, devices=3, blocks=6))
    rows = Layouts(
        cluster_r=np.arange(clusters),
        member_rs=np.stack([rng.permutation(3)[:2] + 1 for _ in range(clusters)]),
        stop_rs=np.stack([[int(rng.integers(1, 6)), 6] for _ in range(clusters)]),
        micro_batch_size_r=rng.choice([1, 4], clusters),
        micro_batches_r=rng.choice([1, 4, 8], clusters),
    )
    chain = make_chain(tables, rows, PricingOptions(schedule=schedule))
    plain = share_equally(chain, BAND)
    powers = solve_powers(chain, plain.edge_hz_r, plain.times)
    priced = price_rows(chain, plain.times, powers)
    latency_price = 1.0 / float(priced.latency_s.max())
    price = 10 ** rng.uniform(-2, 1, (clusters, 3)) / float(priced.energy_j.sum())
    return chain, price, latency_price


def a_problem(seed: int, clusters: int, **options: str) -> RadioProblem:
    chain, price, latency_price = an_instance(seed, clusters, **options)
    return make_radio_problem(chain, price, latency_price=latency_price, bandwidth_hz=BAND)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_the_cvxpy_reference(seed: int, schedule: str) -> None:
    from benchmarks.oracles.radio_reference import solve_reference  # slow; others do without

    problem = a_problem(seed, (1, 2, 5)[seed % 3], schedule=schedule)
    solver = InteriorPoint(problem)
    mine = solver.terms.compute_objective(solver.solve(1e-6).point)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Clarabel's "may be inaccurate"
        reference = solve_reference(problem).objective
    assert mine == pytest.approx(reference, rel=1e-4)


def test_allocation_is_feasible_and_no_worse_than_equal_shares() -> None:
    for seed in range(8):
        chain, price, worth = an_instance(seed, 4)
        values = []
        for choice in (
            allocate(chain, price, latency_price=worth, bandwidth_hz=BAND),
            share_equally(chain, BAND),
        ):
            assert choice.edge_hz_r.sum() <= BAND * (1 + 1e-9)
            assert (
                choice.times >= compute_full_power_times(chain, choice.edge_hz_r) * (1 - 1e-9)
            ).all()
            powers = solve_powers(chain, choice.edge_hz_r, choice.times)
            assert (powers <= chain.power_max_w * (1 + 1e-9)).all()
            assert (powers[chain.hops.used] > 0).all()
            priced = price_rows(chain, choice.times, powers)
            values.append(worth * priced.latency_s.max() + (price * priced.energy_j).sum())
        assert values[0] <= values[1] * (1 + 1e-5)


def test_no_random_move_improves_the_optimum() -> None:
    """Convexity makes local optimality global: perturbed points, repaired, never win."""
    chain, price, worth = an_instance(3, 3)
    best = allocate(chain, price, latency_price=worth, bandwidth_hz=BAND, tolerance=1e-6)
    rng = np.random.default_rng(0)

    def value(width: np.ndarray, times: np.ndarray) -> float:
        times = np.maximum(times, compute_full_power_times(chain, width))
        priced = price_rows(chain, times, solve_powers(chain, width, times))
        return float(worth * priced.latency_s.max() + (price * priced.energy_j).sum())

    optimum = value(best.edge_hz_r, best.times)
    for scale in (1e-3, 1e-2, 0.1, 0.5):
        for _ in range(50):
            width = best.edge_hz_r * np.exp(scale * rng.standard_normal(3))
            width *= BAND / width.sum()
            times = best.times * np.exp(scale * rng.standard_normal(best.times.shape))
            assert value(width, times) >= optimum * (1 - 1e-5)


def test_problem_is_convex_in_the_logarithms() -> None:
    """Objective and every constraint lie below their chords."""
    problem = a_problem(5, 3)
    best, terms = InteriorPoint(problem).solve().point, RadioTerms(problem)
    rng = np.random.default_rng(1)

    def somewhere() -> Point:
        step = Point(
            x=0.5 * rng.standard_normal(best.x.shape),
            omega=0.5 * rng.standard_normal(best.omega.shape),
            cap=0.5 * rng.standard_normal(best.cap.shape),
            tau=float(rng.standard_normal()),
        )
        return best.move(step, 1.0)

    for _ in range(40):
        left, right = somewhere(), somewhere()
        middle = Point(
            x=(left.x + right.x) / 2,
            omega=(left.omega + right.omega) / 2,
            cap=(left.cap + right.cap) / 2,
            tau=(left.tau + right.tau) / 2,
        )
        ends = (terms.compute_objective(left) + terms.compute_objective(right)) / 2
        assert terms.compute_objective(middle) <= ends * (1 + 1e-9)
        margins = [terms.evaluate(point).margin for point in (left, middle, right)]
        assert (margins[1] >= (margins[0] + margins[2]) / 2 - 1e-9).all()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_newton_steps_solve_the_linearised_conditions(schedule: str) -> None:
    """Moving a little along a step changes gradient and room as the elimination says."""
    solver = InteriorPoint(a_problem(4, 4, schedule=schedule))
    rng = np.random.default_rng(2)
    point = solver.terms.settle(solver.solve(1e-2).point)
    value = solver.terms.evaluate(point)
    slack = np.exp(rng.standard_normal(solver.index.length) - 3.0)
    duals = solver.index.mask * np.exp(rng.standard_normal(slack.shape) - 3.0)
    curve = duals / slack
    system = NewtonSystem(solver.terms, value, duals, curve)
    step = system.solve(solver._compute_gradient(value, duals))
    nudge = 1e-6
    moved = solver.terms.evaluate(point.move(step, nudge))
    along = solver._differentiate(value, step)
    assert (moved.margin - value.margin) / nudge == pytest.approx(along, rel=1e-3, abs=1e-3)
    before = solver._compute_gradient(value, duals)
    after = solver._compute_gradient(moved, duals - nudge * curve * along)
    for name in ("x", "omega", "cap", "tau"):
        slope = (np.asarray(getattr(after, name)) - getattr(before, name)) / nudge
        assert slope == pytest.approx(-np.asarray(getattr(before, name)), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("span", [(-2.0, 1.0), (-6.0, 4.0), (-9.0, -8.0)])
def test_claimed_accuracy_is_kept_at_every_tolerance(span: tuple[float, float]) -> None:
    """Many orders of magnitude of prices, half of them zero; against a much tighter solve."""
    for clusters in (1, 7, 40):
        chain, price, worth = an_instance(clusters, clusters)
        rng = np.random.default_rng(clusters)
        price = price * 10 ** rng.uniform(*span, price.shape) * (rng.random(price.shape) < 0.5)
        problem = make_radio_problem(chain, price, latency_price=worth, bandwidth_hz=BAND)
        solver = InteriorPoint(problem)
        values = {}
        for tolerance in (1e-2, 1e-4, 1e-7):
            best = solver.solve(tolerance)
            assert best.gap < tolerance
            assert best.steps <= 25
            values[tolerance] = solver.terms.compute_objective(best.point)
        assert values[1e-4] == pytest.approx(values[1e-7], rel=1e-4)
        assert values[1e-2] == pytest.approx(values[1e-7], rel=1e-2)


def test_latency_prices_sum_to_the_price_of_the_round() -> None:
    chain, price, worth = an_instance(2, 5)
    best = allocate(chain, price, latency_price=worth, bandwidth_hz=BAND)
    assert best.latency_price_r.sum() == pytest.approx(worth, rel=1e-3)


def test_hopeless_numbers_are_a_typed_error() -> None:
    chain, price, worth = an_instance(0, 2)
    with pytest.raises(ScheduleError, match="prices that are not finite"):
        allocate(chain, price * np.nan, latency_price=worth, bandwidth_hz=BAND)
