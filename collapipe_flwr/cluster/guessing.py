"""What a model guesses for a test set: its best classes, or greedily generated texts.

A chain that turns texts into texts generates after it has told its losses: the encoder runs over
the devices, the decoder at the edge, one example at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from collapipe_flwr.models.parts import EmbeddingPart
from collapipe_flwr.models.tasks import best_class
from collapipe_flwr.pipeline.config import StageConfig
from collapipe_flwr.pipeline.generation import ATTENTION_MASK, INPUT_IDS
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.prompter import Prompter
from collapipe_flwr.pipeline.roles import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Guessing:
    """How a model guesses; tokens count where it generates."""

    most_tokens: int
    padding_id: int = 0

    def settings(self) -> dict[str, Any]:
        """The best text, token by token."""
        return {"max_new_tokens": self.most_tokens, "num_beams": 1, "do_sample": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """What a model made of a test set: the mean loss over its ``targets`` labels, and guesses.

    ``guesses`` stand by batch and micro-batch, where asked for: ids (B,) or (B, T) that the head
    holds for best, or of generated texts.
    """

    loss: float
    targets: float
    guesses: tuple[tuple[Tensor, ...], ...] = ()


def guess_whole(model: Any, batch: Any, scores: Tensor, wanted: Guessing) -> Tensor:
    """The guesses of the unsplit model for a batch whose ``scores`` it has computed."""
    if not model.config.is_encoder_decoder:
        return best_class(scores)
    found: Tensor = model.generate(
        batch[INPUT_IDS], attention_mask=batch[ATTENTION_MASK], **wanted.settings()
    )
    return found


def generated(
    embedding: EmbeddingPart,
    chain: Link,
    settings: StageConfig,
    batches: Sequence[Sequence[MicroBatch]],
    wanted: Guessing,
) -> tuple[tuple[Tensor, ...], ...]:
    """The texts (B, T) of each micro-batch over a chain, which has ended afterwards."""
    prompter = Prompter(embedding, chain, settings, cached=False, slots=1)
    own = GenerationConfig.from_model_config(embedding.model.config).to_dict()
    text = json.dumps({**own, **wanted.settings()})
    found = tuple(
        tuple(_texts(prompter, micro_batch, text, wanted) for micro_batch in batch)
        for batch in batches
    )
    prompter.finish()
    return found


def _texts(prompter: Prompter, batch: MicroBatch, settings: str, wanted: Guessing) -> Tensor:
    rows = zip(batch.inputs[INPUT_IDS], batch.inputs[ATTENTION_MASK].bool(), strict=True)
    texts = [torch.cat(list(prompter.generate(ids[mask][None], settings))) for ids, mask in rows]
    return pad_sequence(texts, batch_first=True, padding_value=wanted.padding_id)
