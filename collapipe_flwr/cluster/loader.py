"""The user's own batches, cut into the micro-batches of a plan.

Plans choose only the cut: a step is one batch of the user's loader, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.models.split_model import LABELS, as_batch
from collapipe_flwr.models.tasks import IGNORED_LABEL


@runtime_checkable
class Batches(Protocol):
    """The batches of one round, from a source that cuts them by a plan itself.

    A step is the list of its micro-batches. Mean losses and averages of models count
    ``examples``, those of an epoch; they need not be known before the last step.
    """

    @property
    def examples(self) -> int:
        """Those of an epoch."""

    @property
    def epochs(self) -> int:
        """How often each example is trained on."""

    @property
    def fresh_examples(self) -> int:
        """Those of the probe."""

    def steps(self, batch_size: int, micro_batch_size: int) -> Iterable[list[dict[str, Tensor]]]:
        """One step per batch of ``batch_size`` examples; raises DataError."""

    def probe(self, batch_size: int, micro_batch_size: int) -> Iterable[list[dict[str, Tensor]]]:
        """What is evaluated before the first step."""

    def num_batches(self, batch_size: int) -> int:
        """The steps of the round; 0 where their number is not known."""


@dataclass(slots=True, kw_only=True)
class LoaderBatches:
    """The :class:`Batches` of a user's ``loader``, ``epochs`` times over.

    A plan is made and priced for batches of one size, and for texts of up to ``length`` tokens, if
    it has one; other batches raise DataError, but for a smaller one at the end of an epoch. With
    ``any_size`` nothing is checked.
    """

    loader: Iterable[Any]
    epochs: int = 1
    any_size: bool = False
    length: int | None = None
    examples: int = field(default=0, init=False)  # of the epoch that was last iterated over
    fresh_examples: int = field(default=0, init=False)

    def probe(self, batch_size: int, micro_batch_size: int) -> Iterable[list[dict[str, Tensor]]]:
        """Nothing."""
        del batch_size, micro_batch_size
        return ()

    def num_batches(self, batch_size: int) -> int:
        """The batches of all epochs, if the loader has a length."""
        del batch_size
        return self.epochs * length_hint(self.loader)

    def steps(self, batch_size: int, micro_batch_size: int) -> Iterator[list[dict[str, Tensor]]]:
        """Every batch, as its micro-batches; raises DataError."""
        planned = None if self.any_size else batch_size
        for epoch in range(1, self.epochs + 1):
            self.examples, smaller = 0, 0
            for batch in self.loader:
                tensors = as_batch(batch)
                size = examples_of(tensors)
                _check(smaller or size, planned, is_last=not smaller)
                _check_length(tensors, self.length)
                smaller = size if planned and size < planned else 0
                self.examples += size
                yield cut(tensors, size, micro_batch_size)
            if not self.examples:
                raise DataError(
                    f"the loader yields no batch in epoch {epoch}: give one with examples, that "
                    "can be iterated over anew (a DataLoader, no generator)"
                )


def _check(size: int, planned: int | None, *, is_last: bool) -> None:
    """Raise DataError for a batch that the plan was not made for."""
    if planned is None or size == planned or (is_last and size < planned):
        return
    raise DataError(
        f"the loader yields a batch of {size} examples, but the round was planned for batches "
        f"of {planned}: set SplitModel(..., batch_size={size}) in the ServerApp, or "
        f"DataLoader(..., batch_size={planned}) in the ClientApp"
    )


def _check_length(tensors: Mapping[str, Tensor], planned: int | None) -> None:
    """Raise DataError for texts that are longer than those that the plan was priced for."""
    found = tensors["input_ids"].shape[-1] if "input_ids" in tensors else 0
    if planned is not None and found > planned:
        raise DataError(
            f"the loader yields texts of {found} tokens, but the round was planned for {planned}: "
            f"set SplitModel(..., length={found}) in the ServerApp, or shorten them"
        )


def examples_of(tensors: Mapping[str, Tensor]) -> int:
    """How many examples a batch has: the common length of its tensors. Raises DataError."""
    single = next((name for name, tensor in tensors.items() if not tensor.dim()), None)
    if single is not None:
        raise DataError(
            f"{single!r} of a batch is a single number: the first dimension of its tensors counts "
            "examples; pass a DataLoader, not its data set"
        )
    sizes = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(sizes.values())) != 1:
        raise DataError(f"the tensors of a batch differ in their numbers of examples: {sizes}")
    return next(iter(sizes.values()))


def cut(tensors: Mapping[str, Tensor], size: int, micro_batch_size: int) -> list[dict[str, Tensor]]:
    """Consecutive rows of a batch of ``size`` examples, ``micro_batch_size`` at a time."""
    return [
        {name: tensor[start : start + micro_batch_size] for name, tensor in tensors.items()}
        for start in range(0, size, micro_batch_size)
    ]


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All examples of ``parts`` in one batch.

    Where sequences differ in length, shorter ones are padded behind their end: labels by -100,
    which counts as no label, other tensors by 0.
    """
    names = parts[0] if parts else ()
    return {name: stacked([part[name] for part in parts], name) for name in names}


def stacked(tensors: Sequence[Tensor], name: str = "") -> Tensor:
    """The rows of ``tensors`` (B, T, ...) one below the other, padded to the longest T."""
    longest = max((tensor.shape[1] for tensor in tensors if tensor.dim() > 1), default=0)
    filling = IGNORED_LABEL if name == LABELS else 0
    return torch.cat([_padded(tensor, longest, filling) for tensor in tensors])


def _padded(tensor: Tensor, length: int, filling: int) -> Tensor:
    if tensor.dim() < 2 or tensor.shape[1] == length:
        return tensor
    room = tensor.new_full((tensor.shape[0], length - tensor.shape[1], *tensor.shape[2:]), filling)
    return torch.cat([tensor, room], dim=1)
