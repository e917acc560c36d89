"""How a text is to be generated: the model's own settings with what one wish changes."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.models.generation import SEED
from collapipe_flwr.rpc.texts import Wish

_SEEDS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrasing:
    """Settings for the edge, and strings behind which the text ends; it contains them."""

    settings_json: str
    stops: tuple[str, ...]


def phrase(own: GenerationConfig, wish: Wish) -> Phrasing:
    """The model's ``own`` settings as ``wish`` wants them.

    Chance always has a seed, so that a chain that breaks can begin the text again. Raises
    ConfigError for stop strings beside beams, which know their text at the end only.
    """
    values: dict[str, Any] = {**own.to_dict(), **_changes(wish)}
    in_settings = values.pop("stop_strings", None) or ()
    stops = wish.stop or ((in_settings,) if isinstance(in_settings, str) else tuple(in_settings))
    if stops and (values.get("num_beams") or 1) > 1:
        raise ConfigError("--stop needs --num-beams 1: beams know their text at its end only")
    if values.get("do_sample"):
        values[SEED] = secrets.randbelow(_SEEDS) if wish.seed is None else wish.seed
    return Phrasing(settings_json=json.dumps(values), stops=stops)


def _changes(wish: Wish) -> dict[str, Any]:
    given = {
        "max_new_tokens": wish.max_new_tokens,
        "num_beams": wish.num_beams,
        "temperature": wish.temperature,
        "top_k": wish.top_k,
        "top_p": wish.top_p,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value}
    if wish.sample is not None:
        changes["do_sample"] = wish.sample
    elif changes.keys() & {"temperature", "top_k", "top_p"}:
        changes["do_sample"] = True
    return changes
