"""The clairvoyant bound against complete enumeration, and the rival that keeps every round."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from benchmarks.scheduling.assignments import Round, rho_of, spreads
from benchmarks.scheduling.clairvoyant import clairvoyant
from benchmarks.scheduling.every_round import every_round_cost
from benchmarks.scheduling.played_orders import Replayed, played_s
from benchmarks.scheduling.prices import bound_case, price_case
from collapipe_flwr.costs.chain import (
    make_chain,
    make_step_times,
    price_rows,
    schedule_rows,
    solve_powers,
)
from collapipe_flwr.costs.layouts import Layouts, scatter_members
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.warm_up import compute_one_f_one_b_s
from collapipe_flwr.costs.work import fits
from collapipe_flwr.scheduler.base import make_initial_state, price_learning
from collapipe_flwr.scheduler.initial_layouts import all_layouts, rows_for
from collapipe_flwr.scheduler.problem import Learning
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.radio.interior_point import share_equally
from collapipe_flwr.simulation.setting import ModelShape, Setting
from collapipe_flwr.simulation.world import EnergyBudget

SETTING = Setting(
    clusters=2,
    devices=3,
    examples=200,
    model=ModelShape(blocks=5, width=256),
    budget=EnergyBudget(equal_shares=1.3),
    settings=SchedulerConfig(micro_batch_sizes=(2, 4), micro_batches=(2, 8)),
)


def rounds_of(schedule: str, count: int) -> tuple[list[Round], Learning]:
    settings = replace(SETTING.settings, schedule=schedule)
    profile = SETTING.model.profile()
    world = SETTING.world(3, profile)
    seen = [Round(tabulate(world.snapshot(t, profile)), settings) for t in range(1, count + 1)]
    state = make_initial_state(world.snapshot(1, profile), settings)
    return seen, price_learning(seen[0].tables, state, settings)


def everything(one: Round) -> list[tuple[Layouts, np.ndarray, np.ndarray]]:
    """All rows of every cluster at full power with all of the band: seconds and energies."""
    found = []
    for m in range(one.tables.num_clusters):
        rows = rows_for(m, *all_layouts(3, 5), np.array(one.settings.batches))
        chain = make_chain(one.tables, rows, one.settings)
        radio = share_equally(chain, one.tables.snapshot.radio.bandwidth_hz * len(rows))
        priced = price_rows(chain, radio.times, solve_powers(chain, radio.edge_hz_r, radio.times))
        step_s = schedule_rows(chain, radio.times)[1]
        found.append((rows, chain.fixed_s + chain.steps_r * step_s, priced.energy_j))
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_plan_undercuts_the_bound(schedule: str) -> None:
    """The Lagrangian of every pair of rows, at random multipliers, is at least the bound."""
    (one,), learning = rounds_of(schedule, 1)
    lower, rng = clairvoyant([one], learning), np.random.default_rng(0)
    parts, scale = everything(one), learning.reference.latency_s
    budget = one.tables.members.budget_mi
    for size in (0.0, 0.05, 0.3):
        theta = size * rng.random((2, 3))
        bound = lower.certified(theta)
        if schedule == "1f1b":
            closer = Replayed(lower, [one])
            bound = closer.raised(0, theta)
            assert bound >= lower.certified(theta) - 1e-12
        worth = []
        for m, (rows, _, joule) in enumerate(parts):
            share = (
                np.stack(
                    [
                        scatter_members(joule[[r]], rows.take(np.array([r])), budget.shape)[m]
                        for r in range(len(rows))
                    ]
                )
                / budget[m]
            )
            worth.append(share[:, 1:] @ theta[m])
        batches = [rows.batch_r.astype(int) for rows, _, _ in parts]
        best = np.inf
        for r in range(len(parts[0][0])):
            both = np.stack([np.full(len(batches[1]), batches[0][r]), batches[1]], axis=1)
            late = np.maximum(parts[0][1][r], parts[1][1]) * rho_of(learning, one.tables, both)
            best = min(best, float((late / scale + worth[0][r] + worth[1]).min()) - theta.sum())
        assert bound <= best + 1e-9
        if not size:
            assert bound >= 0.85 * best  # and says something


def spread_of(rows: Layouts, devices: int) -> np.ndarray:
    """Blocks of every device, (R, N)."""
    found = np.zeros((len(rows), devices + 1), int)
    blocks = np.diff(rows.stop_rs, axis=1, prepend=0)
    row, slot = np.nonzero(rows.used_rs)
    found[row, rows.member_rs[row, slot]] = blocks[row, slot]
    return found[:, 1:]


def one_cluster(seed: int) -> Round:
    """Of three devices, whose memories hold 1F1B back as in few worlds."""
    margin = 1.0 - float(np.random.default_rng(seed).uniform(0.027, 0.06))
    grid = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(8,))
    settings = replace(grid, schedule="1f1b", memory_margin=margin)
    setting, profile = replace(SETTING, clusters=1, settings=settings), SETTING.model.profile()
    return Round(tabulate(setting.world(seed, profile).snapshot(1, profile)), settings)


def test_no_order_of_devices_as_played_undercuts_what_orders_take_at_least() -> None:
    """And the quickest plan of most clusters is little above it."""
    above = []
    for seed in range(100, 110):
        one = one_cluster(seed)
        ((rows, seconds, _),) = everything(one)
        good = np.flatnonzero(fits(one.tables, rows, one.settings))
        least = one.least_s(0, spread_of(rows.take(good), 3), (4, 8))
        assert (least <= seconds[good] * (1.0 + 1e-9)).all()
        above.append(seconds[good].min() / least.min() - 1.0)
    assert sorted(above)[7] < 0.03
    assert max(above) < 0.1


def test_a_spread_takes_what_its_best_order_takes_with_its_best_depths() -> None:
    """All orders with all depths that do not rise, one by one."""
    longer = 0
    for seed in range(110, 116):
        one = one_cluster(seed)
        ((rows, _, _),) = everything(one)
        held = spread_of(rows, 3)
        for spread in np.random.default_rng(seed).permutation(np.unique(held, axis=0))[:4]:
            if not one.fits(0, spread[None], 4, 8)[0]:
                continue
            same = rows.take(np.flatnonzero((held == spread).all(1)))
            found = played_s(one, 0, spread, 32)
            least = min(quickest(one, same.take(np.array([r]))) for r in range(len(same)))
            assert found <= least
            assert found == pytest.approx(least, rel=2e-6)
            longer += found > 1.001 * float(one.least_s(0, spread[None], (4, 8))[0])
    assert longer >= 3  # where the bound of single stages is too low


def quickest(one: Round, row: Layouts) -> float:
    """Seconds of the round of one row with the best depths, at full power with all of the band."""
    chain = make_chain(one.tables, row, one.settings)
    times = share_equally(chain, one.tables.snapshot.radio.bandwidth_hz).times
    step, depth = make_step_times(chain, times, 0), row.count_segments(0)
    most = chain.held_rs[0, : depth + 1].tolist()
    steps = [
        compute_one_f_one_b_s(step, (*depths, 1), 8)
        for depths in product(*(range(1, each + 1) for each in most))
        if all(a >= b for a, b in pairwise(depths))
    ]
    return float(chain.fixed_s[0] + chain.steps_r[0] * min(steps))


def test_spreads_are_all_ways_to_share_blocks() -> None:
    found = spreads(3, 4)
    assert len(found) == 15 == len(np.unique(found, axis=0))
    assert (found.sum(1) == 4).all()


def test_the_rival_keeps_every_round_and_stays_above_the_bound() -> None:
    seen, learning = rounds_of("gpipe", 3)
    rng = np.random.default_rng(0)
    rival = np.mean([every_round_cost(one, learning, rng) for one in seen])
    scale = learning.reference.latency_s
    bound, theta = clairvoyant(seen, learning).bound()
    assert np.isfinite(rival) and (theta >= 0.0).all()
    assert bound * scale <= rival


def test_a_short_run_is_close_to_the_bound_and_not_behind_the_rival() -> None:
    setting = replace(SETTING, settings=replace(SETTING.settings, max_model_share=1.0))
    case = price_case("small", setting, 3, 12)
    assert case.energy_at_any_end <= 1.0
    assert case.above_bound <= 0.05
    assert case.behind <= 0.01


def test_the_bound_in_seconds_is_that_of_rounds_with_its_batches() -> None:
    settings = replace(SETTING.settings, micro_batches=(8,), micro_batch_sizes=(4,))
    setting = replace(SETTING, settings=replace(settings, schedule="1f1b"))
    case = bound_case("small", setting, 3, 4)
    profile = setting.model.profile()
    state = make_initial_state(setting.world(3, profile).snapshot(1, profile), setting.settings)
    tables = tabulate(setting.world(3, profile).snapshot(1, profile))
    rho = rho_of(price_learning(tables, state, setting.settings), tables, np.full((1, 2), 32))[0]
    assert case.latency_s is not None and rho > 0
    assert case.bound == pytest.approx(case.latency_s * rho, rel=1e-9)
