"""Text in, text out: tokenizer, generation settings and a chain that generates."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer, GenerationConfig

from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.data.sound import read_sound
from collapipe_flwr.generation.backends import DaemonBackend, ServedModel, ThreadBackend, Weights
from collapipe_flwr.generation.resilient import ResilientGenerator
from collapipe_flwr.models import Splitter, make_spec
from collapipe_flwr.models.generation import SEED
from collapipe_flwr.models.validation import first_lines
from collapipe_flwr.transport.generation import GenerateRequest

DEADLINE_S = 120.0  # longest wait for one token, or for the weights' owner to answer
_REPLACEMENT = "\ufffd"  # what a tokenizer writes for half a character


def _source(folder: Path) -> str:
    """Where transformers finds the model; raises ModelError for a folder that cannot hold one."""
    if (folder / "model").is_dir():
        return str(folder / "model")
    if runs := sorted(run.parent for run in folder.glob("*/model")):
        raise ModelError(f"--run {str(folder)!r} is a folder of runs: name one, such as {runs[-1]}")
    is_path = folder.is_absolute() or (folder.parent != Path() and folder.parent.is_dir())
    if is_path and not folder.exists():  # else it may be the name of a hub repository
        raise ModelError(f"--run {str(folder)!r}: there is no such folder")
    return str(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A trained model and its processor; ``settings`` is its own generation configuration."""

    weights: Weights
    processor: Processor
    settings: GenerationConfig

    @staticmethod
    def load(folder: Path, *, edge_blocks: int = 0) -> TextModel:
        """The model of a run directory, or of any folder or hub name that transformers loads.

        ``edge_blocks`` upper blocks of a decoder-only model stay at the edge. Raises ModelError
        for a model that writes no text.
        """
        source = _source(folder)
        try:
            config = AutoConfig.from_pretrained(source)
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, KeyError) as cause:
            raise ModelError(
                f"--run {str(folder)!r} holds no model with a tokenizer: {first_lines(cause)}"
            ) from cause
        spec = make_spec(_task(config), pretrained=source, edge_blocks=edge_blocks)
        splitter = Splitter(spec)
        if not splitter.generates:
            raise ModelError(
                f"--run {str(folder)!r} holds a model of type {spec.model_type!r}, which cannot "
                "generate token by token when split: only its training is known"
            )
        return TextModel(
            weights=splitter.initial_weights(seed=0),
            processor=Processor.of(splitter, tokenizer, source),
            settings=_own_settings(source, config),
        )

    def served(self, slots: int, deadline_s: float) -> ServedModel:
        """The model for a chain that generates ``slots`` texts at once."""
        return ServedModel(
            splitter=self.processor.splitter,
            weights=self.weights,
            slots=slots,
            deadline_s=deadline_s,
        )


class TextGenerator:
    """Generates over a chain; ``write`` may be called from several threads at once."""

    def __init__(self, model: TextModel, chain: ResilientGenerator) -> None:
        self._model = model
        self._chain = chain

    def write(self, request: GenerateRequest) -> Iterator[str]:
        """Yield the text chunk by chunk as it is generated.

        Raises ConfigError for an empty request, DataError for an unreadable sound, ModelError for
        one that the model cannot take, LinkError when the chain breaks for good.
        """
        prompt = self._model.processor.prompt(request)
        settings = generation_settings(self._model.settings, request)
        tokens: list[int] = []
        shown = 0
        with closing(self._chain.generate(prompt, settings.settings_json)) as pieces:
            for new in pieces:
                tokens += new.tolist()
                text = self._decode(tokens)
                if not text.endswith(_REPLACEMENT) and len(text) > shown:
                    yield text[shown:]
                    shown = len(text)
                if settings.stops and self._contains(tokens, settings.stops):
                    break
        if len(rest := self._decode(tokens)[shown:]):
            yield rest

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._model.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _contains(self, tokens: list[int], stops: tuple[str, ...]) -> bool:
        """Whether one of ``stops``, which may be special tokens, has been written."""
        text = self._model.processor.tokenizer.decode(tokens)
        return any(stop in text for stop in stops)


@contextmanager
def local_generator(
    model: TextModel, *, devices: int, slots: int, deadline_s: float = DEADLINE_S
) -> Iterator[TextGenerator]:
    """Generate with devices and edge as threads of this process, joined as on a cluster."""
    backend = ThreadBackend(model.served(slots, deadline_s), devices)
    with ResilientGenerator(backend) as chain:
        yield TextGenerator(model, chain)


@contextmanager
def cluster_generator(
    model: TextModel,
    cluster: ClusterConfig,
    *,
    edge_address: str = "",
    slots: int,
    deadline_s: float = DEADLINE_S,
) -> Iterator[TextGenerator]:
    """Generate with blocks on the daemons of a cluster file and the rest on its edge server.

    Up to ``slots`` texts are generated at once, without devices that are lost on the way. Raises
    ConfigError where no edge is named, LinkError where one cannot be reached or refuses.
    """
    served = model.served(slots, deadline_s)
    backend = DaemonBackend(served=served, cluster=cluster, edge_address=edge_address)
    with ResilientGenerator(backend) as chain:
        yield TextGenerator(model, chain)


def _task(config: Any) -> str:
    return "seq2seq" if config.is_encoder_decoder else "causal-lm"


def _own_settings(source: str, config: Any) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:  # no file of its own: the library reads the model's configuration
        found: GenerationConfig = GenerationConfig.from_model_config(config)
        return found


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

    def prompt(self, request: GenerateRequest) -> Tensor:
        """Token ids (1, T), or features (1, bins, frames).

        Raises ConfigError for an empty request or one for another kind of model, DataError for a
        sound that cannot be read, ModelError for what the model cannot take.
        """
        if self.feature_extractor is not None:
            return self._features(request)
        if request.sound:
            raise ConfigError("--audio is for models of speech; this one reads --text")
        ids = self._ids(request.text)
        self._check_room(len(ids), request.max_new_tokens)
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

    def _features(self, request: GenerateRequest) -> Tensor:
        if not request.sound:
            raise ConfigError("this model hears: give --audio FILE instead of --text")
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


def generation_settings(own: GenerationConfig, request: GenerateRequest) -> GenerationSettings:
    """The model's ``own`` settings with the changes that ``request`` asks for.

    Sampling always has a seed, so that the text can be generated again when a chain breaks. Raises
    ConfigError for stop strings beside beams, which know their text at the end only.
    """
    values: dict[str, Any] = {**own.to_dict(), **_changes(request)}
    in_settings = values.pop("stop_strings", None) or ()
    stops = request.stop or ((in_settings,) if isinstance(in_settings, str) else tuple(in_settings))
    if stops and (values.get("num_beams") or 1) > 1:
        raise ConfigError("--stop needs --num-beams 1: beams know their text at its end only")
    if values.get("do_sample"):
        values[SEED] = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
    return GenerationSettings(settings_json=json.dumps(values), stops=stops)


def _changes(request: GenerateRequest) -> dict[str, Any]:
    given = {
        "max_new_tokens": request.max_new_tokens,
        "num_beams": request.num_beams,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value}
    if request.sample is not None:
        changes["do_sample"] = request.sample
    elif changes.keys() & {"temperature", "top_k", "top_p"}:
        changes["do_sample"] = True
    return changes
