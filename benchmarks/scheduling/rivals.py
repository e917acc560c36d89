"""Rivals of the scheduler's search: a plain hill climb from many starts, and simulated annealing.

Both draw single moves at random and price them by ``plain_costs``: shift a boundary, swap two
devices with or without their blocks, replace, drop or add a device, change micro-batches. Single
clusters are solved for every promising pair of micro-batches and several prices of a second; the
plan is picked from all solutions jointly and then annealed as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.scheduling.plain_costs import NONE, PlainCosts, Rows
from collapipe_flwr.costs.arrays import Array, Ints, Mask

SHARES = (1.0, 0.3, 0.05)  # of a second's price, as clusters see it that need not hurry
KINDS = 5  # without micro-batches


@dataclass(frozen=True, slots=True)
class Budget:
    """How long rivals search; ``starts`` per cluster, pair and price."""

    starts: int = 3
    climbs: int = 500  # proposals per start
    pairs: int = 8  # of micro-batches, those that promise most
    chains: int = 32  # of annealing
    cooling: int = 3000  # proposals per chain


@dataclass(slots=True)
class Plans:
    """K whole plans: rows (K * M), their seconds and energies (K, M)."""

    rows: Rows
    seconds: Array
    energy: Array

    @property
    def batch(self) -> Ints:
        """Examples of a step, (K, M)."""
        return np.asarray((self.rows.size * self.rows.count).reshape(self.seconds.shape))


def random_rows(costs: PlainCosts, cluster: Ints, pair: Ints, rng: np.random.Generator) -> Rows:
    """Random devices in random order with random parts of the blocks."""
    count, width, total = len(cluster), costs.devices, costs.num_blocks
    here = costs.present[cluster, 1:]
    order = np.argsort(np.where(here, rng.random((count, width)), 2.0), axis=1)
    depth = rng.integers(1, np.minimum(here.sum(1), total) + 1)
    used = np.arange(width) < depth[:, None]
    weight = np.where(used, rng.uniform(0.2, 1.0, (count, width)), 0.0)
    cut = np.cumsum(weight, axis=1) / weight.sum(1, keepdims=True) * (total - depth[:, None])
    stops = np.round(cut).astype(int) + np.minimum(np.arange(1, width + 1), depth[:, None])
    blocks = np.where(used, np.diff(stops, axis=1, prepend=0), 0)
    return Rows(cluster.copy(), np.where(used, order + 1, NONE), blocks, *pair.T.copy())


def proposed(
    costs: PlainCosts, rows: Rows, rng: np.random.Generator, batches: bool
) -> tuple[Rows, Mask]:
    """One random move of every row, and which of them are possible."""
    new = Rows(*(column.copy() for column in rows.columns))
    kind = rng.integers(0, KINDS + batches, len(rows))
    good = np.zeros(len(rows), bool)
    for number, move in enumerate((_shift, _swap, _replace, _drop, _add, _batch)):
        at = np.flatnonzero(kind == number)
        if len(at):
            part = rows.take(at)
            good[at] = move(costs, part, rng)
            new.put(at, part)
    return new, good


def _slots(limit: Ints, rng: np.random.Generator) -> Ints:
    return np.asarray((rng.random(len(limit)) * limit).astype(int))


def _shift(costs: PlainCosts, rows: Rows, rng: np.random.Generator) -> Mask:
    r, depth = np.arange(len(rows)), rows.depth
    slot = _slots(np.maximum(depth - 1, 1), rng)
    change = rng.choice([-2, -1, 1, 2], len(rows))
    behind = np.minimum(slot + 1, costs.devices - 1)
    left, right = rows.blocks[r, slot] + change, rows.blocks[r, behind] - change
    good = (depth > 1) & (left > 0) & (right > 0)
    rows.blocks[r[good], slot[good]] = left[good]
    rows.blocks[r[good], behind[good]] = right[good]
    return np.asarray(good)


def _swap(_costs: PlainCosts, rows: Rows, rng: np.random.Generator) -> Mask:
    r, depth = np.arange(len(rows)), rows.depth
    one, two = _slots(depth, rng), _slots(depth, rng)
    with_blocks = rng.random(len(rows)) < 0.5
    for table, who in ((rows.device, r), (rows.blocks, r[with_blocks])):
        table[who, one[who]], table[who, two[who]] = table[who, two[who]], table[who, one[who]]
    return np.asarray(one != two)


def _spare(costs: PlainCosts, rows: Rows, rng: np.random.Generator) -> Ints:
    """A random device without blocks; NONE where there is none."""
    free = costs.present[rows.cluster].copy()
    free[:, 0] = False
    row, slot = np.nonzero(rows.device != NONE)
    free[row, rows.device[row, slot]] = False
    draw = np.where(free, rng.random(free.shape), -1.0)
    best = draw.argmax(1)
    return np.where(free[np.arange(len(rows)), best], best, NONE)


def _replace(costs: PlainCosts, rows: Rows, rng: np.random.Generator) -> Mask:
    spare, slot = _spare(costs, rows, rng), _slots(rows.depth, rng)
    good = np.flatnonzero(spare != NONE)
    rows.device[good, slot[good]] = spare[good]
    return np.asarray(spare != NONE)


def _drop(costs: PlainCosts, rows: Rows, rng: np.random.Generator) -> Mask:
    depth, slot = rows.depth, _slots(rows.depth, rng)
    ahead = (slot > 0) & ((slot == depth - 1) | (rng.random(len(rows)) < 0.5))
    heir, good = np.where(ahead, slot - 1, slot + 1), depth > 1
    at = np.flatnonzero(good)
    rows.blocks[at, heir[at]] += rows.blocks[at, slot[at]]
    place = np.arange(costs.devices)
    source = np.minimum(place + (place >= slot[at, None]), costs.devices - 1)
    for table, nothing in ((rows.blocks, 0), (rows.device, NONE)):
        table[at] = table[at[:, None], source]
        table[at, -1] = nothing
    return np.asarray(good)


def _add(costs: PlainCosts, rows: Rows, rng: np.random.Generator) -> Mask:
    spare, slot = _spare(costs, rows, rng), _slots(rows.depth, rng)
    have = rows.blocks[np.arange(len(rows)), slot]
    good = (spare != NONE) & (have > 1)
    part, behind = 1 + _slots(np.maximum(have - 1, 1), rng), rng.random(len(rows)) < 0.5
    at = np.flatnonzero(good)
    rows.blocks[at, slot[at]] -= part[at]
    new, place = slot[at] + behind[at], np.arange(costs.devices)
    source = place - (place > new[:, None])
    for table, value in ((rows.blocks, part), (rows.device, spare)):
        table[at] = table[at[:, None], source]
        table[at, new] = value[at]
    return np.asarray(good)


def _batch(costs: PlainCosts, rows: Rows, rng: np.random.Generator) -> Mask:
    pair = costs.sizes[rng.integers(0, len(costs.sizes), len(rows))]
    rows.size[:], rows.count[:] = pair.T
    return np.ones(len(rows), bool)


@dataclass(slots=True)
class Pool:
    """Solutions of single clusters to pick a plan from."""

    rows: Rows
    seconds: Array
    energy: Array


def climb(costs: PlainCosts, budget: Budget, rng: np.random.Generator) -> Pool:
    """Hill climbs of single clusters, each with micro-batches and a second's price of its own."""
    pairs = promising(costs, budget)
    grid = np.array(
        np.meshgrid(
            np.arange(costs.clusters),
            np.arange(len(pairs)),
            np.arange(len(SHARES) * budget.starts),
            indexing="ij",
        )
    ).reshape(3, -1)
    rows = random_rows(costs, grid[0], pairs[grid[1]], rng)
    common = costs.rho(np.repeat(pairs.prod(1)[:, None], costs.clusters, 1))[grid[1]]
    slope = costs.planner.latency_price * common * np.array(SHARES)[grid[2] % len(SHARES)]
    seconds, energy = costs.price_of(rows)
    for _ in range(budget.climbs):
        new, good = proposed(costs, rows, rng, batches=False)
        at = np.flatnonzero(good)
        tried = new.take(at)
        s, e = costs.price_of(tried)
        # What memory forbids counts as worse than anything; crossing it is up to the next start.
        now = slope[at] * seconds[at] + energy[at]
        wins = (slope[at] * s + e < now) | (~np.isfinite(now))
        rows.put(at[wins], tried.take(wins))
        seconds[at[wins]], energy[at[wins]] = s[wins], e[wins]
    return Pool(rows, seconds, energy)


def promising(costs: PlainCosts, budget: Budget) -> Ints:
    """Pairs of micro-batches by how long clusters would take with all devices in proportion."""
    values = []
    for pair in costs.sizes:
        batch = np.full((1, costs.clusters), pair.prod())
        speed = costs.tables.members.speed_mi * costs.present
        flop = (costs.prefix.forward_flop_l + costs.prefix.backward_flop_l)[-1] * pair[0]
        fast = (flop / speed[:, 1:].sum(1) * (pair[1] - 1) + flop / speed.max(1)).max()
        steps = costs.steps(np.arange(costs.clusters), pair.prod())
        values.append(float(costs.rho(batch)[0] * (steps * fast).max()))
        share = costs.most_bytes(np.arange(costs.clusters), *pair.astype(float))
        room = np.where(costs.present, np.minimum(costs.room, share[:, None]), 0.0)[:, 1:]
        each = np.diff(costs.prefix.state_bytes_l).max()
        flight = 1 if costs.overlapped else pair[1]  # at least, as at the end of a pipeline
        each += pair[0] * flight * np.diff(costs.kept_l).max()
        if (np.floor(room / each).sum(1) < costs.num_blocks).any():
            values[-1] = np.inf
    order = np.argsort(values, kind="stable")[: budget.pairs]
    return np.asarray(costs.sizes[order[np.isfinite(np.array(values)[order])]])


def picked(costs: PlainCosts, pool: Pool) -> Plans:
    """The best plan of a pool's solutions: from every common batch, one cluster at a time."""
    good = np.flatnonzero(np.isfinite(pool.seconds))
    owner, batch = pool.rows.cluster[good], (pool.rows.size * pool.rows.count)[good]
    seconds, energy = pool.seconds[good], pool.energy[good]
    best: tuple[float, Ints] | None = None
    mine = [np.flatnonzero(owner == m) for m in range(costs.clusters)]
    for start in np.unique(batch):
        for share in SHARES:
            value = costs.planner.latency_price * share * seconds + energy
            value = value + np.where(batch == start, 0.0, 1e6)
            choice = np.array([at[np.argmin(value[at])] for at in mine])
            found = _descended(costs, (seconds, energy, batch), choice, mine)
            if best is None or found[0] < best[0]:
                best = found
    assert best is not None
    at = good[best[1]]
    return Plans(pool.rows.take(at), pool.seconds[at][None], pool.energy[at][None])


def _descended(
    costs: PlainCosts, table: tuple[Array, Array, Ints], choice: Ints, mine: list[Ints]
) -> tuple[float, Ints]:
    seconds, energy, batch = table

    def value(plans: Ints) -> Array:
        return costs.objective(seconds[plans], energy[plans], batch[plans])

    now = float(value(choice[None])[0])
    while True:
        before = now
        for m in np.argsort(-seconds[choice], kind="stable"):
            trial = np.repeat(choice[None], len(mine[m]), 0)
            trial[:, m] = mine[m]
            values = value(trial)
            if values.min() < now:
                now, choice = float(values.min()), trial[int(values.argmin())]
        if now >= before * (1 - 1e-12):
            return now, choice


def anneal(costs: PlainCosts, start: Plans, budget: Budget, rng: np.random.Generator) -> Plans:
    """Whole plans from ``start``, cooled from 10 % of the objective to 0.003 %; the best seen."""
    chains, clusters = budget.chains, costs.clusters
    rows = start.rows.take(np.tile(np.arange(clusters), chains))
    seconds, energy = (np.repeat(v, chains, 0) for v in (start.seconds, start.energy))
    batch = (rows.size * rows.count).reshape(chains, clusters)
    now = costs.objective(seconds, energy, batch)
    best = (now.copy(), Rows(*(c.copy() for c in rows.columns)), seconds.copy(), energy.copy())
    k = np.arange(chains)
    for heat in now.min() * np.geomspace(0.1, 3e-5, budget.cooling):
        # Mostly what the round waits for: nothing else changes its length.
        slowest = (seconds + rng.gumbel(size=seconds.shape) * 0.05 * seconds.max()).argmax(1)
        m = np.where(rng.random(chains) < 0.5, slowest, rng.integers(0, clusters, chains))
        new, good = proposed(costs, rows.take(k * clusters + m), rng, batches=True)
        s, e = costs.price_of(new)
        late, spent, sizes = seconds.copy(), energy.copy(), batch.copy()
        late[k, m], spent[k, m], sizes[k, m] = s, e, new.size * new.count
        with np.errstate(invalid="ignore", over="ignore"):
            value = costs.objective(late, spent, sizes)
            wins = good & np.isfinite(s) & (rng.random(chains) < np.exp((now - value) / heat))
        at = np.flatnonzero(wins)
        rows.put(at * clusters + m[at], new.take(at))
        seconds[at], energy[at], batch[at] = late[at], spent[at], sizes[at]
        now[at] = value[at]
        up = np.flatnonzero(now < best[0])
        if len(up):
            flat = (up[:, None] * clusters + np.arange(clusters)).ravel()
            best[0][up], best[2][up], best[3][up] = now[up], seconds[up], energy[up]
            best[1].put(flat, rows.take(flat))
    winner = int(best[0].argmin())
    own = best[1].take(winner * clusters + np.arange(clusters))
    return Plans(own, best[2][winner][None], best[3][winner][None])
