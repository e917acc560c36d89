"""One round's problem: its fixed inputs, and the rounds to the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.chain import Chain, RowPrices
from collapipe_flwr.costs.convergence import LearningConstants, NoiseScale, sum_bound, sum_exchanges
from collapipe_flwr.costs.layouts import Layouts, gather_members
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import count_local_steps, count_steps, fits
from collapipe_flwr.scheduler.dual_prices import overdrawn
from collapipe_flwr.scheduler.local_search import Moves
from collapipe_flwr.scheduler.protocol import Reference, SchedulerConfig
from collapipe_flwr.scheduler.refusal import explain_refusal

NEVER = 1e3  # stands for "does not reach the target": finite, so that searches can cross it
TARGET_FACTOR = 1.25  # the target stays this factor above the reference plan's own floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Prices batch sizes by the rounds they cost; ``constants`` None prices nothing."""

    constants: LearningConstants | NoiseScale | None
    reference_rounds: float
    reference: Reference

    def compute_rho(self, tables: Tables, now: Layouts) -> float:
        """Return the rounds to the target over those of the reference plan."""
        return float(self.compute_rhos(tables, count_steps(tables, now), now.batch_r))

    def compute_rhos(self, tables: Tables, steps: Array, batches: Array) -> Array:
        """Compute `compute_rho` by steps and batches, clusters on the last axis."""
        if self.constants is None:
            return np.ones(steps.shape[:-1])
        sums = sum_bound(_compute_shares(tables), steps, batches)
        return np.minimum(self.constants.count_rounds(sums) / self.reference_rounds, NEVER)

    def compute_row_rhos(self, tables: Tables, rows: Layouts, now: Layouts) -> Array:
        """Compute `compute_rho` for rows that each replace their own cluster's row of ``now``."""
        if self.constants is None:
            return np.ones(len(rows))
        old, new = ((count_steps(tables, each), each.batch_r) for each in (now, rows))
        sums = sum_exchanges(_compute_shares(tables), old, rows.cluster_r, new)
        return np.minimum(self.constants.count_rounds(sums) / self.reference_rounds, NEVER)


def _compute_shares(tables: Tables) -> Array:
    return np.asarray(tables.examples_m / tables.examples_m.sum())


def make_learning(
    tables: Tables, constants: LearningConstants | NoiseScale | None, reference: Reference
) -> Learning:
    """Price progress at a snapshot; the bound's target stays reachable for the reference plan."""
    if constants is None:
        return Learning(constants=None, reference_rounds=1.0, reference=reference)
    batch = np.full(
        tables.num_clusters, float(reference.micro_batch_size * reference.micro_batches)
    )
    sums = sum_bound(_compute_shares(tables), count_local_steps(tables.examples_m, batch), batch)
    if isinstance(constants, LearningConstants):
        target = max(constants.target, TARGET_FACTOR * float(sums.compute_floor(constants)))
        constants = replace(constants, target=target)
    return Learning(
        constants=constants,
        reference_rounds=float(constants.count_rounds(sums)),
        reference=reference,
    )


@dataclass(frozen=True, slots=True)
class Estimates:
    """Costs of rows at given dual prices, (R,)."""

    latency: Array  # seconds of a round
    soft: Array  # the same with a norm of all stages' times in the place of the slowest's
    worth: Array  # priced energy, infinite where memory forbids the row

    def take(self, index: Ints | Mask) -> Estimates:
        """Return the estimates of the chosen rows."""
        return Estimates(self.latency[index], self.soft[index], self.worth[index])


def join_estimates(parts: Sequence[Estimates]) -> Estimates:
    """Join the estimates of all ``parts``, one after the other."""
    columns = ([part.latency, part.soft, part.worth] for part in parts)
    return Estimates(*map(np.concatenate, zip(*columns, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """The fixed inputs of planning one round; energy costs ``price_mi`` per joule.

    Computing that takes more than ``room_mi`` joules of a device costs a surcharge.
    """

    tables: Tables
    settings: SchedulerConfig
    learning: Learning
    latency_price: float  # objective per second of the round, at rho = 1
    price_mi: Array
    room_mi: Array  # infinite without a limit

    def estimate(self, chain: Chain, priced: RowPrices) -> Estimates:
        """Return the costs of rows that have been priced with their hop times."""
        return Estimates(priced.latency_s, priced.latency_s, self.price_energy(chain, priced))

    def price_energy(self, chain: Chain, priced: RowPrices) -> Array:
        """Price the energy of every row, with the surcharge on what overdraws an account."""
        energy = (gather_members(self.price_mi, chain.rows) * priced.energy_j).sum(1)
        room = gather_members(self.room_mi, chain.rows, padding=np.inf)[:, 1:]
        budget = gather_members(self.tables.members.budget_mi, chain.rows, padding=1.0)[:, 1:]
        over = overdrawn(chain.computing_j[:, 1:], room, budget).sum(1)
        return np.asarray(energy + self.latency_price * over * priced.latency_s)

    def list_batches(self) -> Ints:
        """Return all (size, count) pairs."""
        return np.array(self.settings.batches, dtype=np.int64)

    def find_pairs(self, rows: Layouts) -> Ints:
        """Return the place of every row's micro-batches in `list_batches`, -1 outside the grid."""
        batches = self.list_batches()
        most = (rows.micro_batch_size_r.max(initial=0), rows.micro_batches_r.max(initial=0))
        table = np.full(np.maximum(batches.max(0), most) + 1, -1)
        table[*batches.T] = np.arange(len(batches))
        return np.asarray(table[rows.micro_batch_size_r, rows.micro_batches_r])

    def count_devices(self) -> Ints:
        """Count the devices of every cluster, without control units."""
        return np.asarray(self.tables.members.present_mi.sum(1) - 1, dtype=np.int64)

    def list_neighbours(self, rows: Layouts) -> Layouts:
        """Return every single move from every row, any device of its cluster coming in."""
        cost = np.where(self.tables.members.present_mi, 1.0, np.inf)
        cost[:, 0] = np.inf
        return Moves(rows, cost, cost.shape[1]).all()

    def keep_fitting(self, rows: Layouts) -> Layouts:
        """Keep the rows that fit all memories."""
        return rows.take(fits(self.tables, rows, self.settings))

    def refuse(self, short: Ints) -> NoReturn:
        """Raise InfeasibleError, which names the memory that is too small and what to do."""
        why = explain_refusal(self.tables, int(short[0]), self.settings)
        raise InfeasibleError(why, self.tables.list_names(short))
