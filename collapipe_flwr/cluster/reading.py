"""What a model is given to read, or to hear, for one wish."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoFeatureExtractor

from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.data.sound import read_sound
from collapipe_flwr.models import Splitter
from collapipe_flwr.models.causes import first_lines
from collapipe_flwr.transport.generation import GenerateRequest

_SOUND = "input_features"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Turns wishes into a model's inputs; ``ear`` is the feature extractor of a model of speech."""

    splitter: Splitter
    tokenizer: Any
    ear: Any = None

    @staticmethod
    def of(splitter: Splitter, tokenizer: Any, source: str) -> Reader:
        """For the model in the folder ``source``. Raises ModelError where it cannot be fed."""
        if splitter.input_name == "input_ids":
            return Reader(splitter=splitter, tokenizer=tokenizer)
        if splitter.input_name != _SOUND:
            raise ModelError(f"a model that reads {splitter.input_name} writes no text")
        try:
            ear = AutoFeatureExtractor.from_pretrained(source)  # type: ignore[no-untyped-call]
        except (OSError, ValueError, KeyError) as cause:
            raise ModelError(
                f"--run {source!r} has no feature extractor: {first_lines(cause)}"
            ) from cause
        return Reader(splitter=splitter, tokenizer=tokenizer, ear=ear)

    def prompt(self, wish: GenerateRequest) -> Tensor:
        """Token ids (1, T), or features (1, bins, frames).

        Raises ConfigError for an empty wish or one for another kind of model, DataError for a
        sound that cannot be read, ModelError for what the model cannot take.
        """
        if self.ear is not None:
            return self._heard(wish)
        if wish.sound:
            raise ConfigError("--audio is for models of speech; this one reads --text")
        ids = self._ids(wish.text)
        self._check_room(len(ids), wish.max_new_tokens)
        return torch.tensor([ids])

    def _ids(self, text: str) -> list[int]:
        """The prompt's tokens; a text that goes on bears no end token yet."""
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

    def _heard(self, wish: GenerateRequest) -> Tensor:
        if not wish.sound:
            raise ConfigError("this model hears: give --audio FILE instead of --text")
        try:
            data = base64.b64decode(wish.sound, validate=True)
        except binascii.Error as cause:
            raise ConfigError("the sound of a wish must be a file in base64") from cause
        rate, most = self.ear.sampling_rate, self.ear.n_samples
        sound = read_sound(data, rate)
        if sound.ndim == 2:
            return torch.from_numpy(sound)[None]
        if len(sound) > most:
            raise ModelError(
                f"the sound lasts {len(sound) / rate:.1f} s, the model hears {most / rate:g} s at "
                "once: cut it into pieces"
            )
        features: Tensor = self.ear(sound, sampling_rate=rate, return_tensors="pt")[_SOUND]
        return features
