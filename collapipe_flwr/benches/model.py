"""The model that both sides of the bench train: blocks of BERT, cut anywhere.

Every part is drawn from the same seed wherever it is built, so that two runtimes start from the
same weights and their losses can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from collapipe_flwr.benches.slow import Slowed
from collapipe_flwr.pipeline.roles import MicroBatch

CLASSES, VOCABULARY, HEADS = 16, 1024, 4
LABELS = "labels"
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model and of one batch; ``micro_batch`` is examples, ``tokens`` their length."""

    width: int = 256
    tokens: int = 128
    micro_batch: int = 2
    micro_batches: int = 8

    @property
    def hidden_bytes(self) -> int:
        """One micro-batch at a cut, in single precision."""
        return 4 * self.micro_batch * self.tokens * self.width

    @property
    def block_flop(self) -> float:
        """Forward pass of one block per example: four projections, two of four widths, scores."""
        return 2.0 * self.tokens * 12 * self.width**2 + 4.0 * self.tokens**2 * self.width

    @property
    def block_bytes(self) -> int:
        """Weights of one block."""
        return 4 * 12 * self.width**2


class BenchPart(nn.Module):
    """Some blocks; the embedding before them on the first stage, the loss behind on the last."""

    def __init__(self, shape: Shape, split: Sequence[int], stage: int, slow: float = 1.0) -> None:
        super().__init__()
        first = sum(split[:stage])
        self.table = (
            _seeded(-1, lambda: nn.Embedding(VOCABULARY, shape.width)) if not stage else None
        )
        self.blocks = nn.ModuleList(
            _seeded(index, lambda: _block(shape.width))
            for index in range(first, first + split[stage])
        )
        is_last = stage == len(split) - 1
        self.head = _seeded(-2, lambda: nn.Linear(shape.width, CLASSES)) if is_last else None
        self._slow = Slowed(slow, self.blocks.parameters())

    def forward(
        self, given: Tensor | Mapping[str, Tensor], context: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Hidden state (B, T, D), or with ``context`` on the last stage the mean loss."""
        hidden_BTD = self.hidden(given)
        if self.head is None or context is None:
            return hidden_BTD
        return mean_loss(hidden_BTD, context[LABELS])

    def hidden(self, given: Tensor | Mapping[str, Tensor]) -> Tensor:
        """What the blocks make of hidden states or, on the first stage, of token ids."""
        if self.table is not None:
            ids = given if isinstance(given, Tensor) else given["input_ids"]
            given = self.table(ids)
        assert isinstance(given, Tensor)
        with self._slow.timed() as slow:
            hidden_BTD = slow.enter(given)
            for block in self.blocks:
                hidden_BTD = block(hidden_BTD)
            hidden_BTD = slow.leave(hidden_BTD)
        return hidden_BTD if self.head is None else self.head(hidden_BTD)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights."""
        self.load_state_dict(dict(weights))

    def weight_of(self, context: Mapping[str, Tensor]) -> int:
        """Labels that the mean loss of a micro-batch runs over."""
        return context[LABELS].numel()


def mean_loss(logits: Tensor, labels_BT: Tensor) -> Tensor:
    """Cross-entropy over all tokens; logits (B, T, C)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels_BT.flatten())


def make_batch(shape: Shape) -> tuple[Tensor, Tensor]:
    """Token ids and labels of one whole batch; the same in every process."""
    generator = torch.Generator().manual_seed(1)
    size = (shape.micro_batch * shape.micro_batches, shape.tokens)
    ids = torch.randint(0, VOCABULARY, size, generator=generator)
    return ids, torch.randint(0, CLASSES, size, generator=generator)


def micro_batches(shape: Shape) -> list[MicroBatch]:
    """The same batch as the first stage of our runtime takes it."""
    ids, labels = (torch.split(whole, shape.micro_batch) for whole in make_batch(shape))
    return [
        MicroBatch(inputs={"input_ids": i}, context={LABELS: y}, weight=float(y.numel()))
        for i, y in zip(ids, labels, strict=True)
    ]


def _block(width: int) -> nn.Module:
    config = BertConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=HEADS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = "sdpa"  # what models take by themselves; single layers do not
    return BertLayer(config)  # type: ignore[no-untyped-call]


def _seeded(index: int, build: Callable[[], Module]) -> Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + index)
        return build()
