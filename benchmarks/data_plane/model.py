"""The model that both sides of the benchmark train: blocks of BERT, cut anywhere.

Every part is drawn from the same seed wherever it is built, so that two runtimes start from the
same weights and their losses can be compared. `Slowed` emulates a slower processor by sleeping
after work as long as it would have taken longer; sleeping frees the core, so that the stages do
not disturb each other more than real boards do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from collapipe_flwr.pipeline.step import MicroBatch


class Slowed:
    """Makes the work between ``enter`` and ``leave`` take ``factor`` times as long, both ways."""

    def __init__(self, factor: float, weights: Iterable[Tensor] = ()) -> None:
        self._factor = factor
        self._backward_s = 0.0
        self._between = False  # the marks of a backward pass
        for weight in weights if factor != 1.0 else ():
            weight.register_post_accumulate_grad_hook(self.weight_done)  # type: ignore[no-untyped-call]

    @contextmanager
    def timed(self) -> Iterator[Slowed]:
        """The forward pass is the body; its backward pass is timed by the marks in it."""
        start_s = time.thread_time()
        yield self
        self._sleep(start_s)

    def enter(self, tensor: Tensor) -> Tensor:
        """Mark where the work begins: its backward pass ends here."""
        return self._marked(tensor, ends=True)

    def leave(self, tensor: Tensor) -> Tensor:
        """Mark where the work ends: its backward pass begins here."""
        return self._marked(tensor, ends=False)

    def backward_begins(self) -> None:
        """Called by the mark behind the work."""
        self._backward_s, self._between = time.thread_time(), True

    def backward_ends(self) -> None:
        """Called by the mark before the work."""
        self._sleep(self._backward_s)
        self._backward_s, self._between = time.thread_time(), False

    def weight_done(self, weight: Tensor) -> None:
        """Called when a weight has its gradient: work behind the marks is slow as well.

        That somebody listens also keeps `pipeline.backward` from leaving it for later.
        """
        del weight
        if not self._between:
            self._sleep(self._backward_s)
            self._backward_s = time.thread_time()

    def _marked(self, tensor: Tensor, *, ends: bool) -> Tensor:
        if self._factor == 1.0:
            return tensor
        marked: Tensor = _Mark.apply(tensor, self, ends)  # type: ignore[no-untyped-call]
        return marked

    def _sleep(self, start_s: float) -> None:
        if self._factor > 1.0:
            time.sleep((self._factor - 1.0) * (time.thread_time() - start_s))


class _Mark(torch.autograd.Function):
    """The identity, which tells when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, slowed: Slowed, ends: bool) -> Tensor:
        ctx.slowed, ctx.ends = slowed, ends
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.ends:
            ctx.slowed.backward_ends()
        else:
            ctx.slowed.backward_begins()
        return gradients[0], None, None


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
