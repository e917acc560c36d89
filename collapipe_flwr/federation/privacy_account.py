"""How much of its examples' privacy a cluster has spent in a run.

Every step draws its examples anew, B of n without replacement, and adds Gaussian noise. Neighbours
differ in one example of a fixed number, so n is public. By another example a sum of gradients of
norm C may change by 2 C, so the noise is half as many sensitivities as the run's noise-multiplier.

Charged are the steps of every order that a cluster begins, before it begins: a reply may have left
although the server refused it, lost it, or has gone back behind it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from collapipe_flwr.core.durable import append_text, make_folder
from collapipe_flwr.core.errors import ConfigError, DataError, PrivacySpent, name_extra
from collapipe_flwr.federation.client import STATE_KEY
from collapipe_flwr.federation.client.node_state import NodeState, StateFiles
from collapipe_flwr.pipeline.config import NoiseConfig

_FILE = "privacy.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Steps that each draw ``batch`` of ``examples``."""

    examples: int
    batch: int
    noise_multiplier: float
    steps: int


class PrivacySpending(NamedTuple):
    """The epsilon spent so far, and what it would be after the largest next round."""

    epsilon: float | None
    next_epsilon: float | None


def count_epsilon(charges: Sequence[Charge], delta: float) -> float:
    """Return the epsilon that these charges cost together at ``delta``."""
    steps = Counter[tuple[int, int, float]]()
    for each in charges:
        steps[each.examples, each.batch, each.noise_multiplier] += each.steps
    return _epsilon(tuple(sorted(steps.items())), delta)


@lru_cache(maxsize=64)
def _epsilon(steps: tuple[tuple[tuple[int, int, float], int], ...], delta: float) -> float:
    with name_extra("privacy"):
        from dp_accounting import (
            GaussianDpEvent,
            NeighboringRelation,
            SampledWithoutReplacementDpEvent,
        )
        from dp_accounting.rdp import RdpAccountant
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    for (examples, batch, noise), count in steps:
        step = GaussianDpEvent(noise / 2)
        accountant.compose(SampledWithoutReplacementDpEvent(examples, batch, step), count)
    return float(accountant.get_epsilon(delta))


def check_budget(asked: NoiseConfig, epsilon: float, who: str) -> None:
    """Raise PrivacySpent for an ``epsilon`` beyond what the run may spend."""
    if asked.max_epsilon and epsilon > asked.max_epsilon:
        raise PrivacySpent(
            f"privacy.max-epsilon={asked.max_epsilon:g} allows no further round: it would bring "
            f"{who} to epsilon {epsilon:.4g} at delta {asked.delta:g}"
        )


def charge(state: NodeState, asked: NoiseConfig, due: Charge, largest: Charge) -> PrivacySpending:
    """Charge an order to the cluster's account in its state folder, before it is carried out.

    ``largest`` is what the next round may cost. Raises PrivacySpent, with nothing charged, for an
    order that the budget does not allow, DataError for fewer examples than a step draws, and
    ConfigError where no account can be kept.
    """
    if state.state_dir is None:
        raise ConfigError(
            f"privacy.clip-norm needs a folder for the account of what was spent: set {STATE_KEY} "
            "in --node-config, or train.state-dir"
        )
    if max(due.batch, largest.batch) > due.examples:
        raise DataError(
            f"the cluster has {due.examples} examples, but a step may draw {largest.batch}: lower "
            "scheduler.micro-batch-sizes or scheduler.micro-batches"
        )
    if asked.delta * due.examples >= 1:
        raise ConfigError(
            f"privacy.delta={asked.delta:g} protects none of {due.examples} examples: it must be "
            f"well below 1/{due.examples}"
        )
    path = StateFiles.of(state.state_dir, state.run_id, state.index, "").folder / _FILE
    who = f"cluster number {state.index}"
    check_budget(asked, count_epsilon((*read_charges(path), due), asked.delta), who)
    try:
        for folder in (path.parents[2], path.parents[1], path.parent):
            make_folder(folder, 0o700)
        append_text(path, json.dumps(asdict(due)) + "\n")
    except OSError as error:
        raise ConfigError(f'state-dir: "{path}" cannot be written: {error}') from error
    charged = read_charges(path)  # with what another process has charged meanwhile
    epsilon = count_epsilon(charged, asked.delta)
    check_budget(asked, epsilon, who)
    return PrivacySpending(epsilon, count_epsilon((*charged, largest), asked.delta))


def read_charges(path: Path) -> tuple[Charge, ...]:
    """Read an account; raises ConfigError for one that is damaged, which must not count as less."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text.rpartition("\n")[0]  # a line that was cut off charged for nothing yet
        return tuple(Charge(**json.loads(line)) for line in whole.splitlines())
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f'the account of privacy "{path}" cannot be read: {error}') from error
