"""The long-term energy budget of every device, as a user writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.simulator.world import Budgets


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyBudget:
    """A share of what a device would spend training alone, or joules per round, or neither."""

    share: float | None = None
    joule: float | None = None

    def budgets(self, model: ModelProfile) -> Budgets:
        """The budgets of a world in which ``model`` is trained."""
        if self.share is not None:
            return Budgets(model=model, share=self.share)
        return Budgets(fixed_j=self.joule)

    def __str__(self) -> str:
        if self.share is not None:
            return f"{100 * self.share:g}%"
        return "none" if self.joule is None else f"{self.joule:g}"


def energy_budget(text: str) -> EnergyBudget:
    """``30%`` of training alone, ``500`` joules per round, or ``none``; raises ConfigError."""
    word = text.strip()
    if word == "none":
        return EnergyBudget()
    try:
        value = float(word.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"--energy-budget must be joules per round (500), a share of training alone (30%) "
            f"or none, got {text!r}"
        )
    return EnergyBudget(share=value / 100) if word.endswith("%") else EnergyBudget(joule=value)
