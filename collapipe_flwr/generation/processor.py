"""From a request to model inputs (token ids or features) and generation settings."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, GenerationConfig

from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.data.sound import read_sound
from collapipe_flwr.models import Splitter
from collapipe_flwr.models.generation import SEED
from collapipe_flwr.models.validation import first_lines
from collapipe_flwr.transport.generation import GenerateRequest

_SOUND = "input_features"


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Turns requests into a model's inputs; ``feature_extractor`` is that of a model of speech."""

    splitter: Splitter
    tokenizer: Any
    feature_extractor: Any = None

    @staticmethod
    def of(splitter: Splitter, tokenizer: Any, source: str) -> Processor:
        """For the model in the folder ``source``. Raises ModelError where it cannot be fed."""
        if splitter.input_name == "input_ids":
            return Processor(splitter=splitter, tokenizer=tokenizer)
        if splitter.input_name != _SOUND:
            raise ModelError(f"a model that reads {splitter.input_name} writes no text")
        try:
            extractor = AutoFeatureExtractor.from_pretrained(source)  # type: ignore[no-untyped-call]
        except (OSError, ValueError, KeyError) as cause:
            raise ModelError(
                f"--run {source!r} has no feature extractor: {first_lines(cause)}"
            ) from cause
        return Processor(splitter=splitter, tokenizer=tokenizer, feature_extractor=extractor)

    def prompt(self, wish: GenerateRequest) -> Tensor:
        """Token ids (1, T), or features (1, bins, frames).

        Raises ConfigError for an empty request or one for another kind of model, DataError for a
        sound that cannot be read, ModelError for what the model cannot take.
        """
        if self.feature_extractor is not None:
            return self._features(wish)
        if wish.sound:
            raise ConfigError("--audio is for models of speech; this one reads --text")
        ids = self._ids(wish.text)
        self._check_room(len(ids), wish.max_new_tokens)
        return torch.tensor([ids])

    def _ids(self, text: str) -> list[int]:
        """The prompt's tokens, without the end token where the model continues the text."""
        if not text.strip():
            raise ConfigError("--text is empty: give some words to start from")
        ids: list[int] = list(self.tokenizer(text)["input_ids"])
        end = self.tokenizer.eos_token_id
        if not self.splitter.decodes and len(ids) > 1 and ids[-1] == end:
            ids.pop()
        return ids

    def _check_room(self, prompt_tokens: int, new_tokens: int) -> None:
        room = self.splitter.most_tokens
        needed = prompt_tokens if self.splitter.decodes else prompt_tokens + new_tokens
        if room is not None and needed > room:
            raise ModelError(
                f"the text has {prompt_tokens} tokens and {new_tokens} are to follow, but the "
                f"model has {room} positions: shorten the text or lower --max-new-tokens"
            )

    def _features(self, wish: GenerateRequest) -> Tensor:
        if not wish.sound:
            raise ConfigError("this model hears: give --audio FILE instead of --text")
        try:
            data = base64.b64decode(wish.sound, validate=True)
        except binascii.Error as cause:
            raise ConfigError("the sound of a wish must be a file in base64") from cause
        rate, most = self.feature_extractor.sampling_rate, self.feature_extractor.n_samples
        sound = read_sound(data, rate)
        if sound.ndim == 2:
            return torch.from_numpy(sound)[None]
        if len(sound) > most:
            raise ModelError(
                f"the sound lasts {len(sound) / rate:.1f} s, the model hears {most / rate:g} s at "
                "once: cut it into pieces"
            )
        features: Tensor = self.feature_extractor(sound, sampling_rate=rate, return_tensors="pt")[
            _SOUND
        ]
        return features


_SEEDS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """Settings for the edge, and strings after which the text ends; it contains them."""

    settings_json: str
    stops: tuple[str, ...]


def generation_settings(own: GenerationConfig, wish: GenerateRequest) -> GenerationSettings:
    """The model's ``own`` settings with the changes that ``wish`` asks for.

    Sampling always has a seed, so that the text can be generated again when a chain breaks. Raises
    ConfigError for stop strings beside beams, which know their text at the end only.
    """
    values: dict[str, Any] = {**own.to_dict(), **_changes(wish)}
    in_settings = values.pop("stop_strings", None) or ()
    stops = wish.stop or ((in_settings,) if isinstance(in_settings, str) else tuple(in_settings))
    if stops and (values.get("num_beams") or 1) > 1:
        raise ConfigError("--stop needs --num-beams 1: beams know their text at its end only")
    if values.get("do_sample"):
        values[SEED] = secrets.randbelow(_SEEDS) if wish.seed is None else wish.seed
    return GenerationSettings(settings_json=json.dumps(values), stops=stops)


def _changes(wish: GenerateRequest) -> dict[str, Any]:
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
