"""The state of a part between two steps: its weights and optimizer state; and digests of tensors.

A step depends on nothing else: with the states of all parts after step k, step k + 1 can be
replayed on any machine, under any cut, to the same bits. Digests identify tensors by content, so
that tensors that the receiver has need not be sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain

from torch import Tensor, nn

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.pipeline.meter import count_bytes
from collapipe_flwr.pipeline.offload import LazyMapping, offload, view_bytes
from collapipe_flwr.pipeline.optimizer import START, Optimizer

OptimizerState = Mapping[str, tuple[Tensor, ...]]  # by parameter; see `Optimizer.collect_state`
_PREFIX = "optimizer/"  # no module path holds a slash
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """Weights and optimizer state by absolute key; without the latter the optimizer starts anew."""

    weights: Mapping[str, Tensor]
    optimizer: OptimizerState = field(default_factory=dict)

    def flatten(self) -> LazyMapping[Tensor]:
        """Return all in one flat mapping, as stored and sent; offloaded tensors stay in files."""
        flat = {
            f"{_PREFIX}{index}/{key}": partial(_read_slot, self.optimizer, key, index)
            for key, tensors in self.optimizer.items()
            for index in range(len(tensors))
        }
        return LazyMapping.join(self.weights, LazyMapping(flat))

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> PartState:
        """Invert `flatten`. Raises ModelError where numbers of optimizer tensors are missing."""
        here = LazyMapping.join(tensors)
        numbered: dict[str, dict[str, str]] = {}
        for name in tensors:
            if name.startswith(_PREFIX):
                index, _, key = name.removeprefix(_PREFIX).partition("/")
                numbered.setdefault(key, {})[index] = name
        slots = {k: here.select(_sort_slots(k, names)) for k, names in numbered.items()}
        return PartState(
            weights=here.select(k for k in tensors if not k.startswith(_PREFIX)),
            optimizer=LazyMapping(
                {key: partial(tuple, held.values()) for key, held in slots.items()}
            ),
        )

    def copy(self) -> PartState:
        """Copy the state to the CPU."""
        weights = {key: _copy(tensor) for key, tensor in self.weights.items()}
        return PartState(weights=weights, optimizer=_copy_state(self.optimizer))

    def offload(self) -> PartState:
        """Copy the state to disk, except for small tensors."""
        return PartState.from_tensors(offload(self.flatten()))

    @property
    def num_bytes(self) -> int:
        """Bytes of a copy."""
        return sum(tensor.nbytes for tensor in self.flatten().values())

    def select(self, keys: Iterable[str]) -> PartState:
        """Return the state of the part with these keys; raises ModelError if one is missing."""
        wanted = list(keys)
        missing = next((key for key in wanted if key not in self.weights), None)
        if missing is not None:
            raise ModelError(f"the weights lack {missing!r}; pass all keys of this part")
        slots = [name for key in wanted for name in (key, START + key) if name in self.optimizer]
        return PartState(
            weights=LazyMapping.join(self.weights).select(wanted),
            optimizer=LazyMapping.join(self.optimizer).select(slots),
        )


def view_state(part: nn.Module, optimizer: Optimizer) -> PartState:
    """Return a part's state, shared parameters included, in the tensors that train."""
    return PartState(
        weights={**part.state_dict(), **dict(part.named_parameters())},
        optimizer=optimizer.collect_state(),
    )


def copy_optimizer_state(optimizer: Optimizer) -> dict[str, tuple[Tensor, ...]]:
    """Copy the optimizer state, by the keys of the part."""
    return _copy_state(optimizer.collect_state())


def drop_round_start(state: OptimizerState) -> OptimizerState:
    """Drop the weights that the round began with, for the next round."""
    return LazyMapping.join(state).select(key for key in state if not key.startswith(START))


def count_state_bytes(part: nn.Module, optimizer: Optimizer) -> int:
    """Count the bytes of a part in training: weights, gradients and optimizer state."""
    kept = chain.from_iterable(optimizer.make_meta_state().values())
    return (
        count_bytes(chain(part.parameters(), part.buffers()))
        + count_bytes(optimizer.parameters)
        + sum(tensor.nbytes for tensor in kept)
    )


def load_optimizer_state(optimizer: Optimizer, state: OptimizerState, *, copy: bool = True) -> None:
    """Continue from `state`, ignoring keys of other parts; without `copy`, in its tensors.

    Raises ModelError when their number, shapes or dtypes are not the optimizer's, and changes
    nothing then.
    """
    expected = optimizer.make_meta_state() if state else {}
    wanted = {key: state[key] for key in state if key in expected}
    for key, tensors in wanted.items():
        if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in expected[key]]:
            shapes = [tuple(t.shape) for t in expected[key]]
            raise ModelError(
                f"{optimizer.settings.name} keeps tensors of shapes {shapes} for {key}, got others"
            )
    optimizer.load_state(wanted, copy=copy)


def _copy_state(state: OptimizerState) -> dict[str, tuple[Tensor, ...]]:
    return {key: tuple(map(_copy, tensors)) for key, tensors in state.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _read_slot(state: OptimizerState, key: str, index: int) -> Tensor:
    return state[key][index]


def _sort_slots(key: str, numbered: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return tuple(numbered[str(index)] for index in range(len(numbered)))
    except KeyError as error:
        raise ModelError(f"the optimizer's tensors of {key[:80]!r} have gaps") from error


def compute_digest(tensor: Tensor) -> str:
    """Compute a digest that is equal only for tensors of equal dtype, shape and bits."""
    what = f"{tensor.dtype} {tuple(tensor.shape)} "
    digest = blake2b(what.encode(), digest_size=_DIGEST_BYTES)
    digest.update(view_bytes(tensor))
    return digest.hexdigest()


def compute_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {key: compute_digest(tensor) for key, tensor in tensors.items()}
