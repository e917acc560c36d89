"""Repairs of plans by the bound, for clusters that end much later when their steps are played.

Many clusters leave no time to play every candidate: a plan is made by the lower bound, played once,
and repaired where the bound was far from what is played.
"""

from __future__ import annotations

import numpy as np

from collapipe_flwr.scheduler.planner import PlanSolver, Solution

MUCH_LATER = 1.02  # than by the bound: other rows are tried for clusters that end so
WORTH_A_CHANGE = 0.05  # of the objective, by which their rows may be dearer
TRIED = 6  # rows of such a cluster that are played


def repair_late_clusters(planner: PlanSolver, solution: Solution) -> Solution:
    """Play ``solution``, and try other rows for clusters that then end much later."""
    best, bound_s = planner.play(solution), solution.priced.latency_s.max()
    late = np.flatnonzero(best.priced.latency_s > MUCH_LATER * bound_s)
    if not len(late):
        return best
    place = planner.in_place(best)
    near = place.bound_rows(planner.fitting(planner.neighbours(best.rows.take(late))))
    dearer = near.costs.worth - place.costs.worth[near.near.cluster_r]
    in_time = near.costs.latency <= MUCH_LATER * bound_s
    near = near.take(np.flatnonzero(in_time & (dearer < WORTH_A_CHANGE * best.objective)))
    if not len(near.near):
        return best
    rows = place.play_rows(near.keep_first(TRIED).near, joint=True).combine()
    trial = planner.play(planner.stayed(rows, best.allocation.edge_hz_r))
    return min(best, trial, key=lambda s: s.objective)
