"""Accounts of energy that devices may spend besides their budget, and the prices these imply.

An account gains the device's share of its budget every round and pays for what the round took.
A device that never overdraws its account keeps its budget on average. Accounts open with an
advance, which is paid back in the first rounds.
"""

from __future__ import annotations

import math

from collapipe_flwr.scheduler.protocol import REPAID, Nested, SchedulerConfig

IN_HAND = 0.5  # budgets that an account with a price should hold on average
GAIN = 0.25  # of what it is off, by which the place-holder moves in a round


def open_accounts(
    budgets_j: Nested, rounds: int, settings: SchedulerConfig
) -> dict[str, dict[str, float]]:
    """Open accounts after ``rounds`` rounds with the rest of the advance, for finite budgets."""
    left = (
        (1.0 - settings.budget_margin) * settings.energy_advance * max(1.0 - rounds / REPAID, 0.0)
    )
    return {
        cluster: {d: left * budget for d, budget in budgets.items() if math.isfinite(budget)}
        for cluster, budgets in budgets_j.items()
    }


def settle_accounts(
    accounts_j: Nested,
    budgets_j: Nested,
    spent_j: Nested,
    rounds: int,
    settings: SchedulerConfig,
) -> dict[str, dict[str, float]]:
    """Settle accounts after the ``rounds``-th round; a device seen for the first time opens one."""
    share = settings.aim_share(rounds)
    return {
        cluster: {
            device: accounts_j.get(cluster, {}).get(device, first)
            + share * budgets_j[cluster][device]
            - spent_j.get(cluster, {}).get(device, 0.0)
            for device, first in fresh.items()
        }
        for cluster, fresh in open_accounts(budgets_j, rounds - 1, settings).items()
    }


def settle_placeholders(
    placeholders_j: Nested, accounts_j: Nested, budgets_j: Nested
) -> dict[str, dict[str, float]]:
    """Lower place-holders of full accounts after a round, and raise those of empty ones.

    A full account says that prices are too high for its budget to be used. An empty one says that
    they are too low: then limits decided, and not what a joule is worth.
    """
    moved: dict[str, dict[str, float]] = {}
    for cluster, accounts in accounts_j.items():
        before, budgets = placeholders_j.get(cluster, {}), budgets_j[cluster]
        after = {d: _move(before.get(d, 0.0), held, budgets[d]) for d, held in accounts.items()}
        moved[cluster] = {device: value for device, value in after.items() if value > 0.0}
    return moved


def _move(placeholder: float, held: float, budget: float) -> float:
    """Move a place-holder by at most ``GAIN`` budgets."""
    short = min(max(IN_HAND * budget - held, -budget), budget)
    return max(placeholder + GAIN * short, 0.0)
