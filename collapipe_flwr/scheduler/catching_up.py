"""Other rows for clusters that end much later, as their steps are played, than by the lower bound.

Many clusters leave no time to play what is chosen from: a plan is made by the bound, played once,
and mended where the bound was far from what is played.
"""

from __future__ import annotations

import numpy as np

from collapipe_flwr.scheduler.planner import Planner, Solution

MUCH_LATER = 1.02  # than by the bound: other rows are tried for clusters that end so
WORTH_A_CHANGE = 0.05  # of the objective, by which their rows may be dearer
TRIED = 6  # rows of such a cluster that are played


def caught_up(planner: Planner, solution: Solution) -> Solution:
    """``solution`` as played, with other rows for clusters that then end much later."""
    best, bound_s = planner.as_played(solution), solution.priced.latency_s.max()
    late = np.flatnonzero(best.priced.latency_s > MUCH_LATER * bound_s)
    if not len(late):
        return best
    place = planner.in_place(best)
    near = place.bounded(planner.fitting(planner.neighbours(best.rows.take(late))))
    dearer = near.costs.worth - place.costs.worth[near.near.cluster_r]
    in_time = near.costs.latency <= MUCH_LATER * bound_s
    near = near.take(np.flatnonzero(in_time & (dearer < WORTH_A_CHANGE * best.objective)))
    if not len(near.near):
        return best
    rows = place.played(near.first(TRIED).near, joint=True).together()
    trial = planner.as_played(planner.stayed(rows, best.allocation.edge_hz_r))
    return min(best, trial, key=lambda s: s.objective)
