"""Stated settings, each a line of reasoning and not a fit: what they are for stands beside them."""

from __future__ import annotations

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.experiments.budget import EnergyBudget
from collapipe_flwr.experiments.model import ModelShape
from collapipe_flwr.experiments.setting import Setting

FIVE_SEEDS = (0, 1, 2, 3, 4)

PRESETS: dict[str, Setting] = {
    # Weak boards of a home or office, a BERT-base encoder, Wi-Fi with Rayleigh fading. Six devices
    # share 12 blocks; the default budget, 1.8 equal shares of the work, is 30 % of training alone.
    "paper": Setting(seeds=FIVE_SEEDS),
    # The same with one board that is as fast as all others together and no energy limits: the
    # case for leaving everything on the best device.
    "one-strong": Setting(
        seeds=FIVE_SEEDS,
        kinds=(
            "raspberry-pi-4",
            "raspberry-pi-5",
            "jetson-nano",
            "phone",
            "jetson-orin-nano",
        ),
        budget=EnergyBudget(),
    ),
    # Many small clusters that share a 5G cell, members on the move, a model of BERT-large's shape
    # whose state fits no single board here together with its activations.
    "cellular": Setting(
        seeds=FIVE_SEEDS,
        clusters=8,
        devices=5,
        radio="5g",
        channel="mobility",
        model=ModelShape(blocks=24, width=1024),
    ),
}


def preset(name: str | None) -> Setting:
    """The setting of that name, plain defaults for None; raises ConfigError with known names."""
    if name is None:
        return Setting()
    if name not in PRESETS:
        raise ConfigError(f"--preset: unknown preset {name!r}; choose {', '.join(PRESETS)}")
    return PRESETS[name]
