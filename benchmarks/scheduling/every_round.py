"""The rival that keeps every budget in every round: the best plan of a round that does.

Found without the scheduler's search: all spreads of blocks that may keep the budgets are listed
with what they take at least, and the most promising are priced in many orders, at full power and
equal bandwidth, all clusters with one batch.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from benchmarks.scheduling.assignments import Round, rho_of, spreads
from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.chain import choose_depths, make_chain, price_rows, solve_powers
from collapipe_flwr.costs.layouts import UNUSED, Layouts, gather_members
from collapipe_flwr.costs.work import fits
from collapipe_flwr.scheduler.problem import Learning
from collapipe_flwr.scheduler.radio.interior_point import share_equally

SPREADS = 6  # of every cluster and pair of micro-batches, the quickest by what they take at least
ORDERS = 30  # of the devices of each; random ones where there are more
REPLAYED = 100  # rows at most whose 1F1B is replayed
CLOSE = 1.15  # batches within this factor of the best, by what they take at least, are priced


def every_round_cost(one: Round, learning: Learning, rng: np.random.Generator) -> float:
    """Least ``rho T`` found of a round within all budgets, infinite where nothing is."""
    tables, settings = one.tables, one.settings
    batches = np.unique(np.array(settings.batches).prod(1))
    clusters = tables.num_clusters
    listed = [_listed(one, m) for m in range(clusters)]
    same = np.repeat(batches[:, None], clusters, axis=1)
    rho = rho_of(learning, tables, same)
    least = np.array(
        [
            [min((v for v, p, _ in row if p[0] * p[1] == b), default=np.inf) for row in listed]
            for b in batches
        ]
    )
    floor = rho * least.max(1)
    best = np.inf
    for k in np.argsort(floor):
        if not floor[k] < min(best, CLOSE * floor.min()) or not np.isfinite(floor[k]):
            break
        seconds = []
        for m, row in enumerate(listed):
            mine = [(pair, spread) for _, pair, spread in row if pair[0] * pair[1] == batches[k]]
            seconds.append(_quickest(one, m, mine, rng))
        best = min(best, float(rho[k]) * max(seconds))
    return best


def _listed(one: Round, m: int) -> list[tuple[float, tuple[int, int], Ints]]:
    """Seconds at least, micro-batches and spread of what may keep cluster m's budgets."""
    devices = int(one.tables.members.present_mi[m].sum()) - 1
    every = spreads(devices, one.tables.num_blocks)
    budget = one.tables.members.budget_mi[m, 1 : devices + 1]
    rows: list[tuple[float, tuple[int, int], Ints]] = []
    for size, count in one.settings.batches:
        within = (every * one.joule(m, size * count)[:devices] <= budget).all(1)
        good = every[within & one.fits(m, every, size, count)]
        if len(good):
            least = one.least_s(m, good, (size, count))
            quick = np.argsort(least, kind="stable")[:SPREADS]
            rows += [(float(least[i]), (size, count), good[i]) for i in quick]
    return rows


def _quickest(
    one: Round, m: int, listed: list[tuple[tuple[int, int], Ints]], rng: np.random.Generator
) -> float:
    """Seconds of the quickest of all orders tried that keeps memories and budgets."""
    members, stops, pairs = [], [], []
    width = max((int((spread > 0).sum()) for _, spread in listed), default=0)
    for pair, spread in listed:
        used = np.flatnonzero(spread)
        for order in _orders(used, rng):
            behind = width - len(order)
            members.append([*(order + 1), *[UNUSED] * behind])
            stops.append([*np.cumsum(spread[order]), *[one.tables.num_blocks] * behind])
            pairs.append(pair)
    if not members:
        return np.inf
    grid = np.array(pairs)
    rows = Layouts(
        cluster_r=np.full(len(members), m),
        member_rs=np.array(members),
        stop_rs=np.array(stops),
        micro_batch_size_r=grid[:, 0],
        micro_batches_r=grid[:, 1],
    )
    return _within_budgets(one, rows)


def _orders(used: Ints, rng: np.random.Generator) -> list[Ints]:
    every = [used[list(p)] for p in permutations(range(len(used)))]
    if len(every) <= ORDERS:
        return every
    return [every[int(i)] for i in rng.choice(len(every), ORDERS, replace=False)]


def _within_budgets(one: Round, rows: Layouts) -> float:
    """Least seconds of those rows that keep memories and budgets at full power."""
    tables = one.tables
    rows = rows.take(fits(tables, rows, one.settings))
    if not len(rows):
        return np.inf
    chain = make_chain(tables, rows, one.settings)
    share = tables.snapshot.radio.bandwidth_hz / tables.num_clusters
    equal = share_equally(chain, share * len(rows))
    priced = price_rows(chain, equal.times, solve_powers(chain, equal.edge_hz_r, equal.times))
    budget: Array = gather_members(tables.members.budget_mi, rows, padding=np.inf)
    kept = np.flatnonzero((priced.energy_j <= budget).all(1))
    if one.settings.schedule == "gpipe":
        return float(priced.latency_s[kept].min(initial=np.inf))
    # What prices say of 1F1B is a lower bound: rows are replayed, the most promising first.
    best = np.inf
    for row in kept[np.argsort(priced.latency_s[kept], kind="stable")][:REPLAYED]:
        if priced.latency_s[row] >= best:
            break
        step_s = float(choose_depths(chain, equal.times, np.array([row]))[1][0])
        best = min(best, float(chain.fixed_s[row] + chain.steps_r[row] * step_s))
    return best
