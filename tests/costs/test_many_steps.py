"""Steps that are played side by side end exactly when each of them alone does."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scheduling.search_gaps import SearchSize, search_planner
from collapipe_flwr.core.replay import StepTimes
from collapipe_flwr.costs import chain as chains
from collapipe_flwr.costs import tables
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import (
    Chain,
    compute_full_power_times,
    compute_planned_makespan_s,
    make_chain,
    price_rows,
    replay_rows,
    schedule_rows,
    solve_powers,
)
from collapipe_flwr.costs.layouts import stack_layouts
from collapipe_flwr.costs.many_steps import ManySteps
from collapipe_flwr.costs.warm_up import choose_warm_up
from collapipe_flwr.costs.work import fits
from collapipe_flwr.scheduler.local_search import pair_batches
from collapipe_flwr.scheduler.search import Search

SIZE = SearchSize(clusters=3, devices=5, blocks=10, seeds=range(1), schedule="1f1b")


def many_rows(seed: int, share: float) -> tuple[Chain, Array, Array]:
    """Neighbours of a plan with all micro-batches; little bandwidth hides few links."""
    planner = search_planner(SIZE, seed, queues=True)
    rows = Search(planner).choose(planner.make_opening_prices(), None)
    rows = stack_layouts([rows, planner.list_neighbours(rows)])
    rows = pair_batches(rows, planner.list_batches())[1]
    rows = rows.take(fits(planner.tables, rows, planner.settings))
    rows = rows.take(np.arange(0, len(rows), 7))
    chain = make_chain(planner.tables, rows, planner.settings)
    hz = np.full(len(rows), share * planner.tables.snapshot.radio.bandwidth_hz)
    return chain, compute_full_power_times(chain, hz), hz


@pytest.mark.parametrize("share", [0.3, 0.01])
@pytest.mark.parametrize("seed", range(3))
def test_side_by_side_is_as_one_by_one(
    seed: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, times, hz = many_rows(seed, share)
    bounded = price_rows(chain, times, solve_powers(chain, hz, times))
    monkeypatch.setattr(chains, "FEW_STEPS", 1)
    together, depths = replay_rows(chain, times, bounded), schedule_rows(chain, times)[0]
    monkeypatch.setattr(chains, "FEW_STEPS", len(chain.rows) + 1)
    alone = replay_rows(chain, times, bounded)
    assert (together.makespan_s == alone.makespan_s).all()
    assert depths == schedule_rows(chain, times)[0]
    assert (together.makespan_s > bounded.makespan_s).any()


def test_without_a_tight_bound_the_same_is_found() -> None:
    """A bound ends the search for depths; it does not change what is found without."""
    chain, times, hz = many_rows(3, 0.05)
    bounded = price_rows(chain, times, solve_powers(chain, hz, times))
    loose = replace(bounded, makespan_s=np.zeros_like(bounded.makespan_s))
    found, other = (replay_rows(chain, times, each).makespan_s for each in (bounded, loose))
    assert found == pytest.approx(other, rel=2e-3)


@pytest.mark.parametrize("share", [0.3, 0.01])
def test_what_stages_can_hold_bounds_a_step_more_closely(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of many clusters; that of few knows nothing of memory."""
    chain, times, hz = many_rows(4, share)
    shared = replace(chain.tables, most_share_m=np.full(SIZE.clusters, 0.28))
    chain = make_chain(shared, chain.rows, chain.options)
    assert (chain.held_rs < chain.rows.micro_batches_r[:, None])[:, 1:-1].any()
    plain = price_rows(chain, times, solve_powers(chain, hz, times)).makespan_s
    bounded = price_rows(chain, times, solve_powers(chain, hz, times))
    seen = replay_rows(chain, times, bounded).makespan_s
    monkeypatch.setattr(tables, "FEW_CLUSTERS", 0)
    close = price_rows(chain, times, solve_powers(chain, hz, times)).makespan_s
    assert (close >= plain).all()
    assert (close <= seen * (1.0 + 1e-12)).all()
    assert (seen / close).mean() - 1.0 < 0.5 * ((seen / plain).mean() - 1.0)


def test_depths_that_are_known_are_those_that_were_played(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, times, hz = many_rows(5, 0.05)
    monkeypatch.setattr(chains, "FEW_STEPS", 1)
    known = replay_rows(chain, times, price_rows(chain, times, solve_powers(chain, hz, times)))
    depths, seconds = schedule_rows(chain, times, known)
    assert known.depth_rs is not None
    assert (seconds == known.makespan_s).all()
    assert compute_planned_makespan_s(chain, times, depths) == pytest.approx(seconds, rel=1e-12)


def test_rows_of_many_clusters_are_played_until_they_end_within_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longest row by the bound says how long it is at least."""
    chain, times, hz = many_rows(6, 0.05)
    bounded = price_rows(chain, times, solve_powers(chain, hz, times))
    quickest = replay_rows(chain, times, bounded)
    monkeypatch.setattr(tables, "FEW_CLUSTERS", 0)
    enough = replay_rows(chain, times, bounded)
    assert (enough.latency_s >= quickest.latency_s * (1.0 - 2e-3)).all()
    least = np.maximum(quickest.latency_s, bounded.latency_s.max())
    assert (enough.latency_s <= least * (1.0 + 4e-3)).all()
    assert (enough.latency_s > 1.01 * quickest.latency_s).any()


def test_pipelines_of_all_lengths_with_any_number_of_micro_batches() -> None:
    rng, most = random.Random(12), 7
    # The first needs one more in flight on a single stage in the end.
    cases = [([0.04, 0.16, 0.13, 0.08], 0.05, [7, 7, 6, 3], 8)]
    for _ in range(400):
        count, stages = rng.choice([1, 4, 6, 8]), rng.randint(3, most)
        devices = [round(rng.uniform(0.05, 0.3), 2) for _ in range(stages - 1)]
        deep = sorted((rng.randint(1, count) for _ in range(stages)), reverse=True)
        cases.append(([0.04, *devices], rng.choice([0.01, 0.05, 0.1]), deep, count))
    ahead, back, there, home = np.zeros((4, most, len(cases)))
    limit, used = np.ones((most, len(cases)), np.int64), np.zeros((most, len(cases)), bool)
    alone = []
    for r, (times, hop_s, deep, count) in enumerate(cases):
        at, hops = [*range(len(times) - 1), most - 1], (hop_s,) * (len(times) - 1)
        ahead[at, r], back[at, r] = times, [2.0 * s for s in times]
        there[at[:-1], r] = home[at[:-1], r] = hop_s
        limit[:, r], used[at, r] = deep[-2], True
        limit[at, r] = deep
        stage_s = tuple(times), tuple(2.0 * s for s in times)
        found = choose_warm_up(StepTimes(stage_s=stage_s, hop_s=(hops, hops)), tuple(deep), count)
        alone.append(([*found.depths], found.makespan_s))
    many = ManySteps(
        ahead_kr=ahead,
        back_kr=back,
        there_kr=there,
        home_kr=home,
        used_kr=used,
        micro_batches_r=np.array([count for *_, count in cases]),
    )
    depth_kr, seconds_r = many.choose_warm_up(limit, np.full(len(cases), -np.inf))
    together = [
        (depth_kr[used[:, r], r].tolist(), seconds) for r, seconds in enumerate(seconds_r.tolist())
    ]
    assert together == alone
