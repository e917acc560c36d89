"""The ranks of adapters that clusters train, where a run lets plans choose them.

A cluster gets the largest rank of the grid with which it still can be planned, and with which
neither time nor energy are short: its round takes at most `SLOWER` times that of all clusters with
the smallest ranks, and no device spends more than its budget of a round, unless it does with the
smallest rank, too. Ranks rise together from the smallest on, and a plan of all clusters with the
ranks that they get shows that each keeps to this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from collapipe_flwr.core.domain import Plan
from collapipe_flwr.core.errors import ScheduleError

SLOWER = 1.05

Budgets = Mapping[str, float]
"""Joules of a round by device."""


def choose_ranks(
    decide: Callable[[Mapping[str, int]], Plan],
    clusters: Mapping[str, Budgets],
    grid: Sequence[int],
) -> dict[str, int]:
    """Choose a rank of ``grid`` for each of ``clusters``; ``decide`` plans a round with ranks.

    Raises ScheduleError where the smallest ranks allow no plan.
    """
    least, *others = sorted(set(grid))
    ranks = dict.fromkeys(clusters, least)
    smallest, rising = decide(ranks), list(clusters)
    for rank in others:
        asked: list[str] = []
        while rising and rising != asked:  # until the plan is that of the ranks which it keeps
            asked = rising
            try:
                plan = decide({**ranks, **dict.fromkeys(asked, rank)})
            except ScheduleError:
                return ranks
            rising = [name for name in asked if plan.find_cluster(name) is not None]
            if rising == asked:  # nobody was left out, which changes the plans of the others
                rising = [n for n in asked if _keeps(plan, smallest, n, clusters[n])]
        ranks |= dict.fromkeys(rising, rank)
    return ranks


def _keeps(plan: Plan, smallest: Plan, name: str, budgets: Budgets) -> bool:
    now, least = plan.find_cluster(name), smallest.find_cluster(name)
    if now is None or least is None or now.latency_s > SLOWER * smallest.latency_s:
        return False
    return all(
        joule <= max(budgets.get(device, joule), least.energy_j.get(device, 0.0))
        for device, joule in now.energy_j.items()
    )
