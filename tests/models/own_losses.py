"""Losses that users might bring: means over examples, labels or weights, and others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

CLASSES = 3
WEIGHTS = torch.tensor([0.2, 1.0, 3.0])  # by class
Batch = Mapping[str, Tensor]


class Residual(nn.Module):
    """A block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D) to the same."""
        changed: Tensor = hidden + self.linear(self.norm(hidden)).relu()
        return changed


class Net(nn.Module):
    """Features (B, 5) to scores (B, C), or rows of them (B, T, 5) to (B, T, C)."""

    def __init__(self, width: int = 12, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Any:
        """The scores."""
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.finish(hidden)

    def finish(self, hidden: Tensor) -> Any:
        """What stands behind the blocks."""
        return self.head(hidden)


class Named(Net):
    """Reads arguments that its forward does not name."""

    def forward(self, **features: Tensor) -> Any:
        """Of two features (B, 5)."""
        return super().forward(features["x"] + features["y"])


class WeightNormed(Net):
    """Has parametrizations, for which torch makes classes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks[1].linear = map(weight_norm, (self.stem, self.blocks[1].linear))


@dataclass
class Found:
    """What a forward may return."""

    logits: Tensor
    tone: Tensor


class Returning(Net):
    """Returns a dataclass."""

    def finish(self, hidden: Tensor) -> Found:
        """Scores (B, C) and tones (B,)."""
        return Found(logits=self.head(hidden), tone=hidden.mean(-1))


class Centred(Net):
    """Its head has statistics of the batch, but is no BatchNorm."""

    def finish(self, hidden: Tensor) -> Tensor:
        """NaN for a single example."""
        scores: Tensor = self.head((hidden - hidden.mean(0)) / hidden.std(0))
        return scores


class NormedHead(Net):
    """BatchNorm behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def finish(self, hidden: Tensor) -> Tensor:
        """The scores."""
        scores: Tensor = self.head(self.norm(hidden))
        return scores


class Remembers(Net):
    """Its head moves a buffer by the mean of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(12))

    def finish(self, hidden: Tensor) -> Tensor:
        """The scores."""
        if self.training:
            with torch.no_grad():
                self.centre.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        scores: Tensor = self.head(hidden - self.centre)
        return scores


class Mixes(Net):
    """Mixes each example with another one."""

    def finish(self, hidden: Tensor) -> Tensor:
        """The scores."""
        other = torch.randperm(len(hidden)) if self.training else torch.arange(len(hidden))
        scores: Tensor = self.head(0.7 * hidden + 0.3 * hidden[other])
        return scores


class Experts(Net):
    """A mixture of experts in its head, with a loss that keeps them equally busy."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 2)
        self.experts = nn.ModuleList(nn.Linear(12, CLASSES) for _ in range(2))

    def finish(self, hidden: Tensor) -> dict[str, Tensor]:
        """The scores, and how far the experts are from being busy alike."""
        shares = self.router(hidden).softmax(-1)
        scores = sum(
            share[:, None] * expert(hidden)
            for share, expert in zip(shares.unbind(-1), self.experts, strict=True)
        )
        assert isinstance(scores, Tensor)
        busy = (shares.argmax(-1, keepdim=True) == torch.arange(2)).to(shares.dtype).mean(0)
        return {"logits": scores, "balance": 2 * (busy * shares.mean(0)).sum()}


class Forgetful(Net):
    """Drops out, in blocks and head, also whole examples."""

    def finish(self, hidden: Tensor) -> Tensor:
        """The scores."""
        if self.training:
            hidden = hidden * (torch.rand(len(hidden), 1) < 0.8) / 0.8
        scores: Tensor = self.head(functional.dropout(hidden, 0.3, self.training))
        return scores


def cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    """The mean over labels that count, which are all where none is ignored."""
    return functional.cross_entropy(outputs.flatten(0, -2), batch["labels"].flatten())


def smoothed(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The same, with smoothed labels."""
    return functional.cross_entropy(outputs, batch["labels"], label_smoothing=0.1)


def named_otherwise(outputs: Tensor, batch: Batch) -> Tensor:
    """Its labels have a name of their own."""
    return functional.cross_entropy(outputs, batch["kinds"])


def of_fields(outputs: Found, batch: Batch) -> Tensor:
    """Of a dataclass."""
    return functional.cross_entropy(outputs.logits, batch["labels"]) + outputs.tone.mean()


def focal(outputs: Tensor, batch: Batch) -> Tensor:
    """Examples that are learnt count less."""
    each = functional.cross_entropy(outputs, batch["labels"], reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def several(outputs: Tensor, batch: Batch) -> Tensor:
    """Every class may be there or not."""
    return functional.binary_cross_entropy_with_logits(outputs, batch["labels"])


def squares(outputs: Tensor, batch: Batch) -> Tensor:
    """Regression."""
    return functional.mse_loss(outputs[:, 0], batch["heights"])


def root_of_squares(outputs: Tensor, batch: Batch) -> Tensor:
    """The root of a mean is no mean."""
    return squares(outputs, batch).sqrt()


def sample_weighted(outputs: Tensor, batch: Batch) -> Tensor:
    """A weighted mean."""
    each = functional.cross_entropy(outputs, batch["labels"], reduction="none")
    return (each * batch["weights"]).sum() / batch["weights"].sum()


def class_weighted(outputs: Tensor, batch: Batch) -> Tensor:
    """torch divides by the sum of the weights of the labels."""
    return functional.cross_entropy(outputs, batch["labels"], weight=WEIGHTS)


def summed(outputs: Tensor, batch: Batch) -> Tensor:
    """No mean at all."""
    return functional.cross_entropy(outputs, batch["labels"], reduction="sum")


def shifted(outputs: Tensor, batch: Batch) -> Tensor:
    """The first label of each row is not predicted."""
    return functional.cross_entropy(outputs[:, :-1].mT, batch["labels"][:, 1:])


def contrastive(outputs: Tensor, batch: Batch) -> Tensor:
    """Each example against all others of the batch."""
    likeness = functional.normalize(outputs, dim=-1) @ batch["views"].mT
    return functional.cross_entropy(likeness / 0.5, torch.arange(len(likeness)))


def ranked(outputs: Tensor, batch: Batch) -> Tensor:
    """The higher of each two examples must score more, by a margin."""
    apart = outputs[:, 0, None] - outputs[None, :, 0]
    higher = batch["heights"][:, None] > batch["heights"][None]
    return (functional.relu(1.0 - apart) * higher).sum() / higher.sum().clamp(min=1)


def triplets(outputs: Tensor, batch: Batch) -> Tensor:
    """Each example holds what it is compared with."""
    return functional.triplet_margin_loss(outputs, batch["views"], batch["others"], margin=5.0)


def dice(outputs: Tensor, batch: Batch) -> Tensor:
    """Overlap over the whole batch."""
    found, wanted = outputs.sigmoid(), batch["labels"]
    return 1 - (2 * (found * wanted).sum() + 1) / (found.sum() + wanted.sum() + 1)


def balanced(outputs: dict[str, Tensor], batch: Batch) -> Tensor:
    """Of experts."""
    return functional.cross_entropy(outputs["logits"], batch["labels"]) + outputs["balance"]


def unbalanced(outputs: dict[str, Tensor], batch: Batch) -> Tensor:
    """Of experts that may be as busy as they like."""
    return functional.cross_entropy(outputs["logits"], batch["labels"])


def two_tasks(outputs: Tensor, batch: Batch) -> Tensor:
    """Two means, of which one runs over fewer labels."""
    return cross_entropy(outputs, batch) + named_otherwise(outputs, batch)


def of_covered_pieces(outputs: Tensor, batch: Batch) -> Tensor:
    """Of a masked picture: the mean over the pieces that were covered."""
    errors = (outputs - batch["pieces"]).abs().mean(-1) * batch["covered"]
    return errors.sum() / batch["covered"].sum()


def connectionist(outputs: Tensor, batch: Batch) -> Tensor:
    """The mean over examples of what each row is long."""
    lengths = torch.full((len(outputs),), outputs.shape[1])
    scores = outputs.log_softmax(-1).transpose(0, 1)
    return functional.ctc_loss(scores, batch["words"], lengths, batch["lengths"])


def weighed(scores: Tensor, batch: Batch) -> Tensor:
    """The mean over examples, each weighed by what stands beside features and labels."""
    (name,) = (name for name in batch if name not in ("x", "labels") and "/" not in name)
    losses = functional.cross_entropy(scores, batch["labels"], reduction="none")
    return (losses * batch[name]).mean()
