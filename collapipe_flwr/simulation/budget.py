"""The long-term energy budget of every device, as a user writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.simulation.world import Budgets


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyBudget:
    """One of three, or none for unlimited energy.

    ``equal_shares`` and ``share`` count in what a device would spend on training the whole encoder
    alone: the former in units of its cluster's equal share of that, 1 over the number of devices.
    """

    equal_shares: float | None = None
    share: float | None = None
    joule: float | None = None

    def budgets(self, model: ModelProfile, devices: int) -> Budgets:
        """The budgets of a cluster of so many devices in which ``model`` is trained."""
        if self.joule is not None:
            return Budgets(fixed_j=self.joule)
        share = self.share if self.equal_shares is None else self.equal_shares / devices
        return Budgets() if share is None else Budgets(model=model, share=share)

    def __str__(self) -> str:
        if self.equal_shares is not None:
            return f"{self.equal_shares:g}x"
        if self.share is not None:
            return f"{100 * self.share:g}%"
        return "none" if self.joule is None else f"{self.joule:g}"


def energy_budget(text: str) -> EnergyBudget:
    """``1.8x`` an equal share, ``30%`` of training alone, ``500`` joules or ``none``.

    Raises ConfigError for anything else.
    """
    word = text.strip()
    if word == "none":
        return EnergyBudget()
    try:
        value = float(word.rstrip("%x"))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            "--energy-budget must be joules per round (500), a share of training alone (30%), "
            f"a multiple of an equal share of it (1.8x) or none, got {text!r}"
        )
    if word.endswith("x"):
        return EnergyBudget(equal_shares=value)
    return EnergyBudget(share=value / 100) if word.endswith("%") else EnergyBudget(joule=value)
