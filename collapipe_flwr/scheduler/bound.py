"""Rounds-to-target of whole plans and of candidate rows, relative to the reference plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.costs.compute import steps_of
from collapipe_flwr.costs.convergence import (
    BoundRow,
    LearningConstants,
    bound_sums,
    exchanged,
)
from collapipe_flwr.costs.latency import local_steps
from collapipe_flwr.costs.layouts import Layouts
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.scheduler.state import Reference

Array = NDArray[np.float64]

NEVER = 1e3  # stands for "does not reach the target": finite, so that searches can cross it
ROOM = 1.25  # the target stays this factor above the reference plan's own floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Prices batch sizes by the rounds they cost; ``constants`` None prices nothing."""

    examples_m: Array
    constants: LearningConstants | None
    reference_rounds: float
    reference: Reference

    def rho(self, tables: Tables, now: Layouts) -> float:
        """Rounds to the target over those of the reference plan."""
        if self.constants is None:
            return 1.0
        weights = self.examples_m / self.examples_m.sum()
        batch = (now.micro_batch_size_r * now.micro_batches_r).astype(np.float64)
        sums = bound_sums(weights, steps_of(tables, now), batch)
        return min(float(sums.rounds(self.constants)) / self.reference_rounds, NEVER)

    def rho_rows(self, tables: Tables, rows: Layouts, now: Layouts) -> Array:
        """The same for rows that each replace their own cluster's row of ``now``."""
        if self.constants is None:
            return np.ones(len(rows))
        weights = self.examples_m / self.examples_m.sum()
        batch_m = (now.micro_batch_size_r * now.micro_batches_r).astype(np.float64)
        batch_r = (rows.micro_batch_size_r * rows.micro_batches_r).astype(np.float64)
        new = BoundRow(steps=steps_of(tables, rows), batches=batch_r)
        sums = exchanged(weights, steps_of(tables, now), batch_m, rows.cluster_r, new)
        return np.minimum(sums.rounds(self.constants) / self.reference_rounds, NEVER)


def learning_for(
    tables: Tables, constants: LearningConstants | None, reference: Reference
) -> Learning:
    """The bound around a snapshot, its target kept reachable for the reference plan."""
    examples = tables.examples_m
    if constants is None:
        return Learning(
            examples_m=examples, constants=None, reference_rounds=1.0, reference=reference
        )
    size = np.full(examples.shape, float(reference.micro_batch_size))
    count = np.full(examples.shape, float(reference.micro_batches))
    sums = bound_sums(examples / examples.sum(), local_steps(examples, size, count), size * count)
    target = max(constants.target, ROOM * float(sums.floor(constants)))
    reachable = replace(constants, target=target)
    return Learning(
        examples_m=examples,
        constants=reachable,
        reference_rounds=float(sums.rounds(reachable)),
        reference=reference,
    )
