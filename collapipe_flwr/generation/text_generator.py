"""Text in, text out: tokenizer, generation settings and a chain that generates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.generation.backends import DaemonBackend, ServedModel, ThreadBackend, Weights
from collapipe_flwr.generation.processor import Processor, generation_settings
from collapipe_flwr.generation.resilient import ResilientGenerator
from collapipe_flwr.models import Splitter, make_spec
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

    def write(self, wish: GenerateRequest) -> Iterator[str]:
        """Yield the text chunk by chunk as it is generated.

        Raises ConfigError for an empty request, DataError for an unreadable sound, ModelError for
        one that the model cannot take, LinkError when the chain breaks for good.
        """
        prompt = self._model.processor.prompt(wish)
        settings = generation_settings(self._model.settings, wish)
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
