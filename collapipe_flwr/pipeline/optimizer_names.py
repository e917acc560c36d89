"""The names of our own optimizers and schedules, with the arguments they know; no torch."""

from __future__ import annotations

from collections.abc import Mapping

Argument = tuple[float | None, ...] | bool | int | float | str | None
Keywords = Mapping[str, Argument]

FUSED: Mapping[str, Keywords] = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "sgd": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
}
LEARNING_RATE_SCHEDULES = ("constant", "linear", "cosine")
