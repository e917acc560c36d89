"""Models and batches; both sides train on the same ones."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-3
# Of a round: batches, examples, tokens.
SHAPES = {"demo": (30, 32, 24), "bert-6x256": (20, 16, 64), "bert-12x768": (2, 8, 128)}


def get_model(size: str) -> nn.Module:
    """The model of the demo, or a BERT, with random weights and without dropout."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        MarianConfig,
        MarianMTModel,
    )

    torch.manual_seed(0)
    if size == "demo":
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        widths = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
        special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        layers = {"encoder_layers": 6, "decoder_layers": 2}
        return MarianMTModel(
            MarianConfig(
                vocab_size=384, max_position_embeddings=64, dropout=0.0, tie_word_embeddings=False,
                share_encoder_decoder_embeddings=False, decoder_vocab_size=384,
                **heads, **widths, **special, **layers,
            )
        )  # fmt: skip
    depth, width = map(int, size.removeprefix("bert-").split("x"))
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=30522 if width == 768 else 8000, hidden_size=width, num_hidden_layers=depth,
            num_attention_heads=width // 64, intermediate_size=4 * width,
            max_position_embeddings=128, num_labels=4,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


class TimedBatches:
    """The batches of a round; knows when the first was asked for and when all were used."""

    def __init__(self, size: str) -> None:
        self._size = size
        self.begun_s = self.ended_s = 0.0
        count, examples, _ = SHAPES[size]
        self.examples = count * examples

    def __len__(self) -> int:
        return SHAPES[self._size][0]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.begun_s = time.time()
        generator = torch.Generator().manual_seed(0)
        count, examples, length = SHAPES[self._size]
        for _ in range(count):
            tokens = torch.randint(5, 300, (examples, length), generator=generator)
            labels = tokens if self._size == "demo" else tokens[:, 0] % 4
            mask = torch.ones_like(tokens)
            yield {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        self.ended_s = time.time()


def example(size: str) -> dict[str, int]:
    """Examples of a batch, and their tokens."""
    _, examples, length = SHAPES[size]
    return {"batch_size": examples, "length": length}


def marks(called_s: float, batches: TimedBatches) -> dict[str, float]:
    """When a client was called, began and ended to train, and answered, by the clock."""
    times = called_s, batches.begun_s, batches.ended_s, time.time()
    return dict(zip(("called_s", "begun_s", "ended_s", "answered_s"), times, strict=True))
