"""The user's own batches, cut into the micro-batches of a plan.

A plan decides only the cut: a step is one batch of the user's loader under any plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import gt, length_hint
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import DataError
from collapipe_flwr.models.split_model import as_batch
from collapipe_flwr.models.tasks import LABEL_NAMES

_SHORT_IN_BETWEEN = (
    "the loader yields a batch of {} examples before its last one, but the round was planned for "
    "batches of {}: every worker of an IterableDataset ends with a smaller one, so give the "
    "DataLoader drop_last=True or num_workers=0"
)


@runtime_checkable
class Batches(Protocol):
    """The batches of one round, from a source that cuts them by a plan itself.

    A step is the list of its micro-batches. Mean losses and averages of models are weighted by
    ``examples``, those of an epoch; they need not be known before the last step.
    """

    @property
    def examples(self) -> int:
        """Examples of an epoch."""

    @property
    def epochs(self) -> int:
        """How often each example is trained on."""

    @property
    def fresh_examples(self) -> int:
        """Examples of the probe."""

    def cut_steps(
        self, batch_size: int, micro_batch_size: int
    ) -> Iterable[list[dict[str, Tensor]]]:
        """Yield one step per batch of ``batch_size`` examples; raises DataError."""

    def probe(self, batch_size: int, micro_batch_size: int) -> Iterable[list[dict[str, Tensor]]]:
        """Yield the micro-batches that are evaluated before the first step."""

    def count_batches(self, batch_size: int) -> int:
        """Return the number of steps of the round; 0 where it is not known."""


@runtime_checkable
class SampledBatches(Batches, Protocol):
    """Batches of a fixed size, each drawn uniformly from all examples by secret random numbers."""

    @property
    def population(self) -> int:
        """The number of examples that are drawn from."""

    @property
    def largest_batch(self) -> int:
        """The most examples of a step that a plan may choose."""


@runtime_checkable
class CountedBatches(Batches, Protocol):
    """Batches of which it is known how often any example comes."""

    @property
    def population(self) -> int:
        """The number of examples that there are."""

    @property
    def visits(self) -> int:
        """The most often that one of them comes."""


@dataclass(slots=True, kw_only=True)
class LoaderBatches:
    """The :class:`Batches` of ``epochs`` passes over a user's ``loader``.

    A plan is made for batches of one size, and for tensors of up to the ``planned`` shapes of one
    example (their last dimensions). Other batches raise DataError, except a smaller one at the end
    of an epoch. With ``any_size`` no size is checked.
    """

    loader: Iterable[Any]
    epochs: int = 1
    any_size: bool = False
    planned: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    examples: int = field(default=0, init=False)  # of the last epoch that was iterated over
    fresh_examples: int = field(default=0, init=False)
    seen_share: float = field(default=1.0, init=False)  # of the next round's examples, this far

    def __post_init__(self) -> None:
        if self.loader is None:
            raise DataError("a Cluster needs the batches of your DataLoader, got None: return it")

    def probe(self, batch_size: int, micro_batch_size: int) -> Iterable[list[dict[str, Tensor]]]:
        del batch_size, micro_batch_size
        return ()

    def count_batches(self, batch_size: int) -> int:
        del batch_size
        return self.epochs * length_hint(self.loader)

    def cut_steps(
        self, batch_size: int, micro_batch_size: int
    ) -> Iterator[list[dict[str, Tensor]]]:
        """Yield every batch as its micro-batches; raises DataError."""
        wanted = None if self.any_size else batch_size
        for epoch in range(1, self.epochs + 1):
            self.examples, smaller, full = 0, 0, False
            for batch in self.loader:
                tensors = as_batch(batch)
                size = count_examples(tensors)
                if smaller and full:
                    raise DataError(_SHORT_IN_BETWEEN.format(smaller, batch_size))
                _check_size(smaller or size, wanted, is_last=not smaller)
                _check_shapes(tensors, self.planned)
                smaller = size if wanted and size < wanted else 0
                full = full or size == wanted
                self.examples += size
                yield cut(tensors, size, micro_batch_size)
            if not self.examples:
                raise DataError(
                    f"the loader yields no batch in epoch {epoch}: give one with examples, that "
                    "can be iterated over anew (a DataLoader, no generator)"
                )


def _check_size(size: int, planned: int | None, *, is_last: bool) -> None:
    """Raise DataError for a batch that the plan was not made for."""
    if planned is None or size == planned or (is_last and size < planned):
        return
    raise DataError(
        f"the loader yields a batch of {size} examples, but the round was planned for batches "
        f"of {planned}: set SplitModel(..., batch_size={size}) in the ServerApp, or "
        f"DataLoader(..., batch_size={planned}) in the ClientApp"
    )


def _check_shapes(tensors: Mapping[str, Tensor], planned: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DataError for examples that are larger than planned."""
    for name, most in planned.items():
        found = tuple(tensors[name].shape[1:])[-len(most) :] if name in tensors else most
        if len(found) < len(most) or any(map(gt, found, most)):
            raise DataError(
                f"the loader yields {name!r} of shape {found} per example, but the round was "
                f"planned for {most}: give SplitModel(...) this length, or an example as large as "
                "the largest batch, or shorten them"
            )


def count_examples(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of examples: the common length of a batch's tensors. Raises DataError."""
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
    """Cut a batch of ``size`` examples into consecutive rows, ``micro_batch_size`` at a time."""
    return [
        {name: tensor[start : start + micro_batch_size] for name, tensor in tensors.items()}
        for start in range(0, size, micro_batch_size)
    ]


def join_parts(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join all examples of ``parts`` in one batch.

    Shorter sequences are padded at the end: labels by -100, which counts as no label, other tensors
    by 0.
    """
    names = parts[0] if parts else ()
    return {name: stack_rows([part[name] for part in parts], name) for name in names}


def stack_rows(tensors: Sequence[Tensor], name: str = "") -> Tensor:
    """Stack the rows of all ``tensors`` (B, T, ...), padded to the longest T."""
    longest = max((tensor.shape[1] for tensor in tensors if tensor.dim() > 1), default=0)
    filling = IGNORED_LABEL if name in LABEL_NAMES else 0

    def padded(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2:
            return tensor
        other = [0, 0] * (tensor.dim() - 2)  # `pad` begins with the last dimension
        return pad(tensor, [*other, 0, longest - tensor.shape[1]], value=filling)

    return torch.cat(list(map(padded, tensors)))
