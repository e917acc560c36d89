"""How many bytes of tensors a stage keeps alive at its worst moment."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor


class MemoryMeter:
    """Measures weights, gradients, optimiser state, and what autograd keeps for the backward.

    The first time that a micro-batch of some shape is computed, hooks see every tensor that
    autograd saves; its storage counts once however many views of it are saved, and parameters do
    not count again. Micro-batches of the same shape are taken to keep as much, so that measuring
    costs nothing later. Temporaries inside one operator and frames that wait in a link are not
    seen.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._fixed_bytes = 0
        self._known_fixed: dict[tuple[int, ...], int] = {}
        self._saved_bytes: dict[Hashable, int] = {}  # by kind of forward pass
        self._in_flight: dict[int, int] = {}  # by micro-batch

    def set_fixed(self, *groups: Sequence[Tensor]) -> None:
        """What is alive apart from micro-batches: looked at when the number of tensors changes."""
        kind = tuple(map(len, groups))
        if kind not in self._known_fixed:
            self._known_fixed[kind] = sum(_distinct(chain.from_iterable(groups)).values())
        self._fixed_bytes = self._known_fixed[kind]
        self._note()

    @contextmanager
    def saving(self, kind: Hashable, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Measure what the body saves for backward, if no body of this kind was measured yet."""
        if kind in self._saved_bytes:
            yield
            return
        with _noticing() as saved:
            yield
        self._saved_bytes[kind] = _apart_from(parameters, saved)

    @contextmanager
    def again(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Measure what the body saves and frees: a piece that is computed a second time."""
        with _noticing() as saved:
            yield
        self._note(_apart_from(parameters, saved))

    def hold(self, micro_batch: int, kind: Hashable, tensors: Iterable[Tensor]) -> None:
        """A micro-batch keeps what its kind of forward pass saves, or at least these tensors."""
        direct_bytes = sum(_distinct(tensors).values())
        self._in_flight[micro_batch] = max(self._saved_bytes[kind], direct_bytes)
        self._note()

    def note_rest(self, micro_batch: int, tensors: Iterable[Tensor]) -> None:
        """A micro-batch keeps these instead of what its forward pass saved."""
        saved_bytes = self._in_flight.get(micro_batch, 0)
        self._note(sum(_distinct(tensors).values()) - saved_bytes)

    def release(self, micro_batch: int) -> None:
        """The backward pass of a micro-batch is over."""
        self._in_flight.pop(micro_batch, None)

    def _note(self, passing_bytes: int = 0) -> None:
        alive_bytes = self._fixed_bytes + sum(self._in_flight.values()) + passing_bytes
        self.peak_bytes = max(self.peak_bytes, alive_bytes)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    return sum(_distinct(tensors).values())


@contextmanager
def _noticing() -> Iterator[dict[int, int]]:
    """Storages that autograd saves in the body: bytes by address."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.update(_distinct((tensor,)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, _same):
        yield saved


def _apart_from(parameters: Iterable[Tensor], saved: Mapping[int, int]) -> int:
    own = _distinct(parameters)
    return sum(n for address, n in saved.items() if address not in own)


def _distinct(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by address of the storages behind the tensors."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _same(tensor: Tensor) -> Tensor:
    return tensor
