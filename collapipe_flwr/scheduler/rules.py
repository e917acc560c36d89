"""Baselines that follow a fixed rule for segments.

Rules give weights of a cluster's devices, to cut the blocks in proportion to: ``fedavg`` the
fastest single device; ``splitfed`` the device nearest to the edge holds all blocks; ``uniform``
equal segments on all devices; ``memory`` and ``throughput`` segments in proportion; ``random`` any
devices in any proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.domain import Plan, Snapshot
from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import make_chain
from collapipe_flwr.costs.layouts import Layouts, stack_layouts
from collapipe_flwr.costs.tables import Tables, tabulate
from collapipe_flwr.costs.work import fits
from collapipe_flwr.scheduler.base import (
    Policy,
    collect_budgets,
    make_plan,
    make_solver,
    sort_by_middle,
)
from collapipe_flwr.scheduler.edges import choose_edges
from collapipe_flwr.scheduler.estimates import estimate_profiles
from collapipe_flwr.scheduler.initial_layouts import rows_by_weight
from collapipe_flwr.scheduler.model_share import cap_shares, find_least_shares, set_model_shares
from collapipe_flwr.scheduler.planner import PlanSolver, Solution
from collapipe_flwr.scheduler.protocol import SchedulerState
from collapipe_flwr.scheduler.radio.interior_point import share_equally
from collapipe_flwr.scheduler.refusal import explain_trust

Rule = Callable[[Tables, int], Array]
"""Candidate weights of the devices of cluster m, (C, N); the first that fits wins."""


def _select_devices(tables: Tables, m: int, values_i: Array) -> Array:
    """Return the devices' part of members' values, 0 for padding."""
    return np.where(tables.members.present_mi[m, 1:], values_i[1:], 0.0)


def _list_singles(key_n: Array) -> Array:
    """List single devices, best key first."""
    order = [int(n) for n in np.argsort(-key_n, kind="stable") if key_n[n] > 0]
    return np.eye(len(key_n))[order]


def _weigh_uniformly(tables: Tables, m: int) -> Array:
    return _select_devices(tables, m, np.ones_like(tables.members.speed_mi[m]))[None]


def _draw_weights(tables: Tables, m: int) -> Array:
    """Draw random subsets with random proportions, the same for the same cluster and round."""
    rng = np.random.default_rng([tables.snapshot.round_index, m])
    present = tables.members.present_mi[m, 1:]
    shape = (64, len(present))
    weights = rng.uniform(0.05, 1.0, size=shape) * (rng.random(shape) < 0.6)
    weights = np.where(present, weights, 0.0)
    return np.concatenate([weights[weights.sum(1) > 0], _weigh_uniformly(tables, m)])


RULES: dict[str, Rule] = {
    "fedavg": lambda t, m: _list_singles(_select_devices(t, m, t.members.speed_mi[m])),
    "splitfed": lambda t, m: _list_singles(_select_devices(t, m, t.gain_mij[m, :, t.edge])),
    "uniform": _weigh_uniformly,
    "memory": lambda t, m: _select_devices(t, m, t.members.memory_mi[m])[None],
    "throughput": lambda t, m: _select_devices(t, m, t.members.speed_mi[m])[None],
    "random": _draw_weights,
}


@dataclass(frozen=True, slots=True)
class RuleScheduler(Policy):
    """A fixed rule for segments, equal bandwidth, full power, the coarsest codec allowed.

    Micro-batches are the middle of the grid or the nearest that fit. With ``best_batches`` the
    first round tries the whole grid in every cluster, by the objective of the joint scheduler, and
    what is best stays. The cap on a device's share of the model holds as for the joint scheduler,
    but not in clusters where the rule fits it with no micro-batches at all (one device holds all).
    """

    @property
    def rule(self) -> Rule:
        """The rule of that name."""
        return RULES[self.name]

    def step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Apply the rule; raises InfeasibleError where nothing it names fits.

        Where nothing fits the devices as they showed themselves, they are believed as described.
        Clusters that may choose among edges have their first.
        """
        snapshot = choose_edges(snapshot, {}, state.links)
        seen, beliefs = estimate_profiles(snapshot, state.beliefs)
        try:
            plan = self._plan(state, seen)
        except InfeasibleError:
            if seen is snapshot:
                raise
            plan = self._plan(state, snapshot)
        budgets = collect_budgets(state.budget_j, snapshot)
        after = replace(state, rounds=state.rounds + 1, budget_j=budgets, last_plan=plan)
        return plan, replace(after, beliefs=beliefs)

    def _plan(self, state: SchedulerState, snapshot: Snapshot) -> Plan:
        tables = tabulate(snapshot, self.settings.coarsest)
        limited, shares, choices = self._find_choices(tables)
        planner = make_solver(limited, state, self.settings)
        if not self.settings.best_batches:
            picks = [0] * len(choices)
        elif state.last_plan is None:
            picks = _find_best_picks(planner, choices)
        else:
            picks = _keep_picks(choices, state.last_plan, snapshot)
        solution = _price_full_power(planner, _picked(choices, picks))
        plan = make_plan(solution, self.name, 1.0)
        return set_model_shares(plan, shares, tables, self.settings)

    def _find_choices(self, tables: Tables) -> tuple[Tables, Array, list[Layouts]]:
        """Return capped tables, every cluster's share, (M,), and what each may choose from."""
        shares = find_least_shares(tables, self.settings)
        while True:
            limited = cap_shares(tables, shares, self.settings)
            choices = [self._list_choices(limited, m) for m in range(tables.num_clusters)]
            short = [m for m, rows in enumerate(choices) if not len(rows)]
            if not short:
                return limited, shares, choices
            if not np.isfinite(shares[short]).all():
                raise self._make_refusal(tables, short)
            shares[short] = np.inf

    def _list_choices(self, tables: Tables, m: int) -> Layouts:
        """List the rule's first candidate that fits, for every pair of the grid that has one.

        Pairs near the middle of the grid come first.
        """
        weights, grid = self.rule(tables, m), sort_by_middle(self.settings)
        rows = rows_by_weight(tables, np.full(len(weights), m), weights, tables.num_blocks, grid[0])
        every = stack_layouts([rows.with_batches(*pair) for pair in grid])
        good = fits(tables, every, self.settings).reshape(len(grid), len(rows))
        pairs = np.flatnonzero(good.any(1))
        return every.take(pairs * len(rows) + good[pairs].argmax(1))

    def _make_refusal(self, tables: Tables, short: Sequence[int]) -> InfeasibleError:
        names = tables.list_names(short)
        return InfeasibleError(
            explain_trust(tables, short[0], self.settings)
            or f"cluster {names[0]!r}: policy {self.name!r} finds "
            "no layout that fits its devices' memories: use another policy, smaller micro-batches "
            "or larger devices",
            names,
        )


def _picked(choices: Sequence[Layouts], picks: Sequence[int]) -> Layouts:
    """Pick one row per cluster."""
    rows = [rows.take(np.array([k])) for rows, k in zip(choices, picks, strict=True)]
    return stack_layouts(rows)


def _price_full_power(planner: PlanSolver, rows: Layouts) -> Solution:
    chain = make_chain(planner.tables, rows, planner.settings)
    shares = share_equally(chain, planner.tables.snapshot.radio.bandwidth_hz)
    return planner.price(chain, shares, planner.learning.compute_rho(planner.tables, rows))


def _find_best_picks(planner: PlanSolver, choices: Sequence[Layouts]) -> list[int]:
    """Find positions of least objective: the best common pair, then each cluster's while it falls.

    Rounds to the target depend on the micro-batches of all clusters.
    """

    def value(picks: Sequence[int]) -> float:
        return _price_full_power(planner, _picked(choices, picks)).objective

    common = [_find_places(choices, pair) for pair in sort_by_middle(planner.settings)]
    best = min(common, key=value)
    least, falls = value(best), True
    while falls:
        falls = False
        for m, rows in enumerate(choices):
            for k in range(len(rows)):
                trial = [*best[:m], k, *best[m + 1 :]]
                if (found := value(trial)) < least:
                    best, least, falls = trial, found, True
    return best


def _keep_picks(choices: Sequence[Layouts], last: Plan, snapshot: Snapshot) -> list[int]:
    """Find positions of last round's pairs; of the preferred ones for clusters that are new."""
    known = {c.cluster_id: (c.micro_batch_size, c.micro_batches) for c in last.clusters}
    names = [c.profile.cluster_id for c in snapshot.clusters]
    pairs = zip(choices, map(known.get, names), strict=True)
    return [0 if pair is None else _find_places([rows], pair)[0] for rows, pair in pairs]


def _find_places(choices: Sequence[Layouts], pair: tuple[int, int]) -> list[int]:
    """Find ``pair`` among every cluster's choices; 0, the preferred one, where it does not fit."""
    places = []
    for rows in choices:
        same = (rows.micro_batch_size_r == pair[0]) & (rows.micro_batches_r == pair[1])
        places.append(int(same.argmax()))
    return places
