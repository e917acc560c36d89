"""What a user chose on the command line, laid over a preset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.simulation.budget import energy_budget
from collapipe_flwr.simulation.fleet_file import read_fleet
from collapipe_flwr.simulation.setting import Setting

_SETTING = ("clusters", "devices", "examples", "rounds", "channel", "radio")
_MODEL = ("blocks", "width", "tokens")
_PLANNING = ("penalty_weight", "schedule", "memory_margin", "max_model_share")
_SWITCHES = ("best_batches", "half_duplex", "edge_shared", "recompute")
_DISTORTION = {"profile_error": "error", "profile_error_kind": "kind", "profile_delay": "delay"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Every field is an option of the same name; None or False leaves the preset as it is."""

    clusters: int | None = None
    devices: int | None = None
    examples: int | None = None
    rounds: int | None = None
    channel: str | None = None
    radio: str | None = None
    blocks: int | None = None
    width: int | None = None
    tokens: int | None = None
    penalty_weight: float | None = None
    schedule: str | None = None
    memory_margin: float | None = None
    max_model_share: float | None = None
    best_batches: bool = False
    half_duplex: bool = False
    edge_shared: bool = False
    recompute: bool = False
    profile_error: float | None = None
    profile_error_kind: str | None = None
    profile_delay: int | None = None
    seeds: str | None = None
    policies: str | None = None
    kinds: str | None = None
    micro_batch_sizes: str | None = None
    micro_batches: str | None = None
    codecs: str | None = None
    energy_budget: str | None = None
    devices_from: Path | None = None

    def over(self, base: Setting) -> Setting:
        """``base`` with everything that was chosen; raises ConfigError or ScheduleError."""
        changes = self._given(_SETTING)
        changes["model"] = replace(base.model, **self._given(_MODEL))
        planning = self._given(_PLANNING)
        planning |= {name: True for name in _SWITCHES if getattr(self, name)}
        for name in ("micro_batch_sizes", "micro_batches"):
            if (text := getattr(self, name)) is not None:
                planning[name] = whole_numbers(name, text)
        if self.codecs is not None:
            planning["codecs"] = _words(self.codecs)
            changes["model"] = replace(changes["model"], wire_bytes=4)
        changes["settings"] = replace(base.settings, **planning)
        seen = {_DISTORTION[n]: value for n, value in self._given(tuple(_DISTORTION)).items()}
        changes["distortion"] = replace(base.distortion, **seen)
        if self.seeds is not None:
            changes["seeds"] = whole_numbers("seeds", self.seeds)
        for name in ("policies", "kinds"):
            if (text := getattr(self, name)) is not None:
                changes[name] = _words(text)
        if self.energy_budget is not None:
            changes["budget"] = energy_budget(self.energy_budget)
        if self.devices_from is not None:
            changes["fleet"] = read_fleet(self.devices_from)
        return replace(base, **changes)

    def _given(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {n: value for n in names if (value := getattr(self, n)) is not None}


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """The value of option ``name`` as numbers; raises ConfigError."""
    words = _words(text)
    if not words or not all(word.isdigit() for word in words):
        option = name.replace("_", "-")
        raise ConfigError(f'--{option} must list whole numbers, for example "1,2,4", got {text!r}')
    return tuple(int(word) for word in words)
