"""Text in, text out: tokenizer, generation settings and a chain that generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from collapipe_flwr.cluster.fleet import Fleet
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.cluster.serving import (
    Weights,
    edge_at,
    edge_here,
    even_plan,
    prompter,
    serving_order,
)
from collapipe_flwr.cluster.threads import ThreadFleet
from collapipe_flwr.core.cluster_file import ClusterConfig
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.models import Splitter, make_spec
from collapipe_flwr.models.checkpoint import first_lines
from collapipe_flwr.pipeline.prompter import Prompter
from collapipe_flwr.rpc.edge_client import EdgeClient
from collapipe_flwr.rpc.texts import Wish

DEADLINE_S = 120.0  # longest wait for one token, or for the weights' owner to answer
_REPLACEMENT = "\ufffd"  # what a tokenizer writes for half a character
_ROOM_CHECKED = "max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingModel:
    """A trained model with its tokenizer; ``settings`` are its own generation settings."""

    splitter: Splitter
    weights: Weights
    tokenizer: Any
    settings: GenerationConfig

    @staticmethod
    def load(folder: Path, *, edge_blocks: int = 0) -> WritingModel:
        """The model of a run directory, or of any folder or hub name that transformers loads.

        ``edge_blocks`` upper blocks of a decoder-only model stay at the edge. Raises ModelError
        for a model that writes no text.
        """
        source = str(folder / "model") if (folder / "model").is_dir() else str(folder)
        try:
            config = AutoConfig.from_pretrained(source)
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, KeyError) as cause:
            raise ModelError(
                f"--run {str(folder)!r} holds no model with a tokenizer: {first_lines(cause)}"
            ) from cause
        spec = make_spec(_task(config), pretrained=source, edge_blocks=edge_blocks)
        splitter = Splitter(spec)
        return WritingModel(
            splitter=splitter,
            weights=splitter.initial_weights(seed=0),
            tokenizer=tokenizer,
            settings=_own_settings(source, config),
        )


class Writer:
    """Writes over a chain; ``write`` may be called from several threads at once."""

    def __init__(self, model: WritingModel, driver: Prompter) -> None:
        self._model = model
        self._driver = driver

    def write(self, wish: Wish) -> Iterator[str]:
        """The text, piece by piece as it is made.

        Raises ConfigError for an empty text, ModelError for one that the model cannot take,
        LinkError when the chain breaks.
        """
        ids = self._ids(wish.text)
        settings = self._settings(wish, len(ids))
        tokens: list[int] = []
        shown = 0
        for new in self._driver.generate(torch.tensor([ids]), settings):
            tokens += new.tolist()
            text = self._decode(tokens)
            if not text.endswith(_REPLACEMENT) and len(text) > shown:
                yield text[shown:]
                shown = len(text)
        if len(rest := self._decode(tokens)[shown:]):
            yield rest

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._model.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _ids(self, text: str) -> list[int]:
        """The prompt's tokens; a text that goes on bears no end token yet."""
        if not text.strip():
            raise ConfigError("--text is empty: give some words to start from")
        ids: list[int] = list(self._model.tokenizer(text)["input_ids"])
        end = self._model.tokenizer.eos_token_id
        if not self._model.splitter.decodes and len(ids) > 1 and ids[-1] == end:
            ids.pop()
        return ids

    def _settings(self, wish: Wish, prompt_tokens: int) -> str:
        values = self._model.settings.to_dict()
        if wish.max_new_tokens:
            values["max_new_tokens"] = wish.max_new_tokens
        if wish.num_beams:
            values["num_beams"] = wish.num_beams
        self._check_room(prompt_tokens, wish.max_new_tokens)
        return json.dumps(values)

    def _check_room(self, prompt_tokens: int, new_tokens: int) -> None:
        room = getattr(self._model.splitter.config, _ROOM_CHECKED, None)
        needed = prompt_tokens if self._model.splitter.decodes else prompt_tokens + new_tokens
        if room is not None and needed > room:
            raise ModelError(
                f"the text has {prompt_tokens} tokens and {new_tokens} are to follow, but the "
                f"model has {room} positions: shorten the text or lower --max-new-tokens"
            )


@contextmanager
def open_writer(
    model: WritingModel, plan: ClusterPlan, fleet: Fleet, *, slots: int, deadline_s: float
) -> Iterator[Writer]:
    """A writer whose blocks stand on ``fleet``; up to ``slots`` texts are in the making at once."""
    order = serving_order(plan, model.weights, deadline_s)
    with prompter(model.splitter, order, fleet, slots=slots) as driver:
        yield Writer(model, driver)


@contextmanager
def writer_here(
    model: WritingModel, *, devices: int, slots: int, deadline_s: float = DEADLINE_S
) -> Iterator[Writer]:
    """Devices and edge are threads of this process, joined as on a cluster."""
    plan = even_plan(model.splitter.num_blocks, [f"device-{i}" for i in range(1, devices + 1)])
    with (
        edge_here(model.splitter, model.weights, deadline_s) as link,
        open_writer(
            model,
            plan,
            ThreadFleet(lambda _: nullcontext(link)),
            slots=slots,
            deadline_s=deadline_s,
        ) as writer,
    ):
        yield writer


@contextmanager
def writer_on(
    model: WritingModel,
    cluster: ClusterConfig,
    *,
    edge_address: str = "",
    slots: int,
    deadline_s: float = DEADLINE_S,
) -> Iterator[Writer]:
    """Blocks on the daemons of a cluster file, the rest on its edge server.

    Raises ConfigError where no edge is named, LinkError where one cannot be reached or refuses.
    """
    address = edge_address or cluster.edge.address
    if not address:
        raise ConfigError(
            f"cluster {cluster.id} has no edge: give --edge HOST:PORT or an [edge] address"
        )
    name = cluster.edge.name if cluster.tls else ""
    plan = even_plan(model.splitter.num_blocks, [cluster.device_id(d) for d in cluster.devices])
    with (
        EdgeClient(
            address,
            tls=cluster.tls_files(cluster.control_unit.name),
            certificate_name=name,
            deadline_s=deadline_s,
        ) as client,
        edge_at(client, model.splitter, model.weights, deadline_s) as hop,
        open_writer(
            model,
            plan,
            RemoteFleet(cluster=cluster, edge=replace(hop, certificate_name=name)),
            slots=slots,
            deadline_s=deadline_s,
        ) as writer,
    ):
        yield writer


def _task(config: Any) -> str:
    return "seq2seq" if config.is_encoder_decoder else "causal-lm"


def _own_settings(source: str, config: Any) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:  # no file of its own: the library reads the model's configuration
        found: GenerationConfig = GenerationConfig.from_model_config(config)
        return found
