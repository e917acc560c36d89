"""A trained model that writes text: its weights, its inputs and its generation settings."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
import wave
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer, GenerationConfig

from collapipe_flwr.core.errors import ConfigError, DataError, ModelError, require
from collapipe_flwr.generation.backends import Weights
from collapipe_flwr.generation.source import find_model
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.foreign_errors import translate_errors
from collapipe_flwr.models.generation import SEED
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.transport.generation import ChatMessage, GenerateRequest

_SOUND = "input_features"
_SEEDS = 2**31
_ANSWER_TOKENS = 1024  # of a model without a limit
_WAV_MARK, _NPY_MARK = b"RIFF", b"\x93NUMPY"
_INT16_MOST = 32768.0
_ABSENT = (OSError, ValueError, KeyError)  # of transformers, for files that lack or are wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A trained model with its generation configuration.

    ``feature_extractor`` is set for a model of speech.
    """

    splitter: Splitter
    weights: Weights
    tokenizer: Any
    settings: GenerationConfig
    feature_extractor: Any = None

    @staticmethod
    def load(folder: Path | str, *, edge_blocks: int = 0) -> TextModel:
        """Load the model of a run directory, or of any folder or hub name of transformers.

        ``edge_blocks`` upper blocks of a decoder-only model stay at the edge. Raises ModelError
        for a model that writes no text.
        """
        source = find_model(str(folder))
        with translate_errors(f"--run {str(folder)!r} holds no model with a tokenizer", _ABSENT):
            config = AutoConfig.from_pretrained(source)
            tokenizer = AutoTokenizer.from_pretrained(source)
        task = "seq2seq" if config.is_encoder_decoder else "causal-lm"
        spec = make_spec(task, pretrained=source, edge_blocks=edge_blocks)
        splitter = Splitter(spec)
        if not splitter.generates:
            raise ModelError(
                f"--run {str(folder)!r} holds a model of type {spec.model_type!r}, which cannot "
                "generate token by token when split: only its training is known; transformers "
                "generates with it on one machine"
            )
        return TextModel(
            splitter=splitter,
            weights=splitter.initial_weights(seed=0),
            tokenizer=tokenizer,
            settings=_load_settings(source, config),
            feature_extractor=_load_feature_extractor(splitter.input_name, source),
        )

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens after which a text is complete."""
        found = self.settings.eos_token_id
        return frozenset([found] if isinstance(found, int) else found or ())

    def encode_prompt(self, request: GenerateRequest) -> Tensor:
        """Encode a request as token ids (1, T), or as features (1, bins, frames).

        Raises ConfigError for an empty request or one for another kind of model, DataError for a
        sound that cannot be read, ModelError for what the model cannot take.
        """
        if self.feature_extractor is not None:
            return self._encode_sound(request)
        if request.sound:
            raise ConfigError("--audio is for models of speech; this one reads --text")
        talks = bool(request.messages)
        ids = self._encode_chat(request.messages) if talks else self._encode_text(request.text)
        room = self.splitter.most_tokens
        follow = max(request.max_new_tokens, int(talks))
        needed = len(ids) if self.splitter.decodes else len(ids) + follow
        if room is not None and needed > room:
            raise ModelError(
                f"the text has {len(ids)} tokens and {follow} are to follow, but "
                f"the model has {room} positions: shorten the text or ask for fewer new tokens"
            )
        return torch.tensor([ids])

    def settings_for(
        self, request: GenerateRequest, prompt_tokens: int
    ) -> tuple[str, tuple[str, ...]]:
        """Return generation settings as JSON, and the strings at which the text ends, included.

        An answer to messages may fill the model's positions where nothing says how long it may be.
        Sampling always has a seed, so that the text can be generated again when a chain breaks.
        Raises ConfigError for stop strings with beam search, which knows its text only at the end.
        """
        values: dict[str, Any] = {**self.settings.to_dict(), **_read_changes(request)}
        if request.messages and not (values.get("max_new_tokens") or values.get("max_length")):
            taken = 0 if self.splitter.decodes else prompt_tokens
            values["max_new_tokens"] = (self.splitter.most_tokens or _ANSWER_TOKENS) - taken
        own = values.pop("stop_strings", None) or ()
        stops = request.stop or ((own,) if isinstance(own, str) else tuple(own))
        if stops and (values.get("num_beams") or 1) > 1:
            raise ConfigError(
                "--stop needs --num-beams 1: beam search knows its text at the end only"
            )
        if values.get("do_sample"):
            values[SEED] = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
        return json.dumps(values), stops

    def _encode_text(self, text: str) -> list[int]:
        """Tokenize the prompt; without its end token where the model continues the text."""
        if not text.strip():
            raise ConfigError("--text is empty: give some words to start from")
        ids: list[int] = list(self.tokenizer(text)["input_ids"])
        end = self.tokenizer.eos_token_id
        if not self.splitter.decodes and len(ids) > 1 and ids[-1] == end:
            ids.pop()
        return ids

    def check_chat(self) -> None:
        """Raise ConfigError unless the model's tokenizer has a chat template."""
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "to chat needs a model whose tokenizer has a chat template: name an instruct "
                "model, or let `collapipe generate` continue a text"
            )
        require("jinja2", "serve")

    def _encode_chat(self, messages: tuple[ChatMessage, ...]) -> list[int]:
        """Tokenize the prompt for an answer; raises ModelError where the template refuses."""
        self.check_chat()
        from jinja2 import TemplateError

        kinds = (TemplateError, ValueError, TypeError, KeyError)
        with translate_errors("the chat template refuses the messages", kinds):
            found = self.tokenizer.apply_chat_template(
                list(map(asdict, messages)), add_generation_prompt=True
            )
        return list(found["input_ids"])

    def _encode_sound(self, request: GenerateRequest) -> Tensor:
        if not request.sound:
            raise ConfigError("this model transcribes speech: give --audio FILE instead of --text")
        try:
            data = base64.b64decode(request.sound, validate=True)
        except binascii.Error as cause:
            raise ConfigError("the sound of a request must be a file in base64") from cause
        rate, most = self.feature_extractor.sampling_rate, self.feature_extractor.n_samples
        sound = read_sound(data, rate)
        if sound.ndim == 2:
            return torch.from_numpy(sound)[None]
        if len(sound) > most:
            raise ModelError(
                f"the sound lasts {len(sound) / rate:.1f} s, but the model takes at most "
                f"{most / rate:g} s: cut it into pieces"
            )
        extracted = self.feature_extractor(sound, sampling_rate=rate, return_tensors="pt")
        features: Tensor = extracted[_SOUND]
        return features


def _load_settings(source: str, config: Any) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:  # no file of its own: the library reads the model's configuration
        found: GenerationConfig = GenerationConfig.from_model_config(config)
        return found


def _load_feature_extractor(input_name: str, source: str) -> Any:
    """Load the feature extractor of a speech model; return None for a model of text."""
    if input_name == "input_ids":
        return None
    if input_name != _SOUND:
        raise ModelError(f"a model that reads {input_name} writes no text")
    with translate_errors(f"--run {source!r} has no feature extractor", _ABSENT):
        return AutoFeatureExtractor.from_pretrained(source)  # type: ignore[no-untyped-call]


def _read_changes(request: GenerateRequest) -> dict[str, Any]:
    """Collect the settings that ``request`` changes; one of sampling turns sampling on."""
    names = ("max_new_tokens", "num_beams", "temperature", "top_k", "top_p")
    changes: dict[str, Any] = {name: v for name in names if (v := getattr(request, name))}
    if request.sample is not None:
        changes["do_sample"] = request.sample
    elif changes.keys() & {"temperature", "top_k", "top_p"}:
        changes["do_sample"] = True
    return changes


def read_sound(data: bytes, rate_hz: int) -> NDArray[np.float32]:
    """Read a .wav (16 bits) or .npy file: samples (N,) at ``rate_hz``.

    Two dimensions in a .npy file are features (bins, frames). Raises DataError.
    """
    if data.startswith(_WAV_MARK):
        return _read_wav(data, rate_hz)
    if data.startswith(_NPY_MARK):
        return _read_npy(data)
    raise DataError("--audio needs a .wav or .npy file; ffmpeg makes the first of anything else")


def _read_wav(data: bytes, rate_hz: int) -> NDArray[np.float32]:
    try:
        with wave.open(BytesIO(data)) as sound:
            channels, width, rate, *_ = sound.getparams()
            frames = sound.readframes(sound.getnframes())
            complete = len(frames) == sound.getnframes() * channels * width
    except (wave.Error, EOFError) as cause:
        raise DataError(f"the .wav file cannot be read: {cause}") from cause
    if not complete:
        raise DataError("the .wav file is cut off: send all of it")
    if rate != rate_hz or width != 2:
        raise DataError(
            f"the .wav file has {rate} Hz and {8 * width} bits, but the model needs {rate_hz} Hz "
            f"and 16 bits: `ffmpeg -i FILE -ar {rate_hz} -sample_fmt s16 OUT.wav` converts it"
        )
    samples = np.frombuffer(frames, dtype="<i2").reshape(-1, channels).mean(axis=1)
    return np.asarray(samples / _INT16_MOST, dtype=np.float32)


def _read_npy(data: bytes) -> NDArray[np.float32]:
    try:
        found: Any = np.load(BytesIO(data), allow_pickle=False)
        numbers = np.asarray(found, dtype=np.float32)
    except (ValueError, TypeError, EOFError, OSError) as cause:
        raise DataError(f"the .npy file cannot be read: {cause}") from cause
    if numbers.ndim not in (1, 2) or not np.isfinite(numbers).all():
        raise DataError(
            "the .npy file must hold finite samples (N,) or features (bins, frames), got shape "
            f"{numbers.shape}"
        )
    return numbers
