"""The interface of the splitters, of whatever kind of model, and a model with its batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import is_within
from collapipe_flwr.models.front import FrontPart
from collapipe_flwr.models.layout import EDGE, EMBEDDING, Layout
from collapipe_flwr.models.lora import is_adapter, key_of
from collapipe_flwr.models.part import Borrower, LossPart, Part, Weights, require_tensor
from collapipe_flwr.models.products import Adapter
from collapipe_flwr.models.skeleton import read_tensor
from collapipe_flwr.models.spec import FACTORS, PRODUCTS
from collapipe_flwr.models.tasks import Batch, Objective

if TYPE_CHECKING:
    from collapipe_flwr.models.spec import BatchShape, ModelSpec, ModuleSpec

TensorShape = tuple[torch.Size, torch.dtype]


class AnySplitter(ABC):
    """The cut of one model into embedding, segments of blocks, and edge.

    Results do not depend on the cut: loss and gradients equal those of ``build_whole``. Keys are
    those of the unsplit model's ``state_dict``; ``aliases`` are those that travel under another
    key. ``state_keys`` are all of them, in its order.
    """

    spec: ModelSpec | ModuleSpec
    num_blocks: int  # that devices may hold
    held_blocks: int = 0  # frozen ones ahead of those, at the control unit
    shapes: Mapping[str, TensorShape]
    objective: Objective
    state_keys: tuple[str, ...]
    prefix: str = ""  # of keys in Flower's messages
    decodes: bool  # the edge holds a decoder, not just a head
    generates: bool  # its parts can generate text token by token
    drops: bool  # it draws random numbers in training, as dropout does
    whole_batches: bool  # results depend on how a batch is cut: one micro-batch only
    _layout: Layout

    # Keys

    def all_keys(self) -> tuple[str, ...]:
        """Return the keys of all parts together."""
        return self._layout.select_travelling(self._layout.owners)

    def embedding_keys(self) -> tuple[str, ...]:
        """Return the keys of the control unit's part."""
        held = range(self.held_blocks)
        return self._layout.select_travelling(self._layout.keys_of(EMBEDDING, *held))

    def segment_keys(self, first_block: int, stop_block: int) -> tuple[str, ...]:
        """Return the keys that a device with these blocks owns."""
        own = self._find_range(first_block, stop_block)
        return self._layout.select_travelling(self._layout.keys_of(*own))

    def held_keys(self, block: int) -> tuple[str, ...]:
        """Return all keys that a device holds for this block, frozen weights included."""
        return self._layout.keys_of(self.held_blocks + block)

    def edge_keys(self) -> tuple[str, ...]:
        return self._layout.select_travelling(self._layout.keys_of(EDGE))

    @property
    def shared_keys(self) -> tuple[str, ...]:
        """Parameters that every block reads; ``build_segment`` needs them besides its own."""
        return self._layout.select_travelling(self._layout.shared_keys)

    @property
    def sums_shared(self) -> bool:
        """Whether parts must add up gradients of what they share before each step."""
        return any(key not in self.constant_keys for key in self._layout.shared_keys)

    @property
    def constant_keys(self) -> frozenset[str]:
        """Keys that never change in training (sinusoids, frozen parameters): no averaging."""
        return self._layout.constants | self._layout.frozen

    @property
    def trained_groups(self) -> int:
        """The number of blocks that train, with embedding and edge where those do."""
        owners = self._layout.owners.items()
        return len({owner for key, owner in owners if key not in self.constant_keys})

    @property
    def ties(self) -> Mapping[str, tuple[str, ...]]:
        """Tables of the edge that the embedding reads row by row: key to its paths there."""
        return self._layout.ties

    @property
    def aliases(self) -> dict[str, str]:
        """Keys of the unsplit ``state_dict`` (of tied tables) to those that travel instead."""
        return {
            key_of(path): key
            for key, paths in self._layout.all_places().items()
            for path in paths
            if key_of(path) != key
        }

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The pairs of factors of its adapters."""
        return ()

    def select_travelling(self, state: Weights) -> dict[str, Tensor]:
        """Select the part of the unsplit model's ``state_dict`` that travels.

        Raises ModelError if a key is missing or has another shape.
        """
        return {key: require_tensor(state, key, self.shapes[key][0]) for key in self.all_keys()}

    def whole_state(self, weights: Weights) -> dict[str, Tensor]:
        """Restore the unsplit model's ``state_dict`` from what travels."""
        aliases = self.aliases
        return {key: weights[aliases.get(key, key)] for key in self.state_keys}

    # Loss

    @abstractmethod
    def context(self, batch: Batch) -> dict[str, Tensor]:
        """Return the tensors of ``batch`` that segments and edge need."""

    @abstractmethod
    def targets_of(self, batch: Batch) -> tuple[str, ...]:
        """Return the names of those tensors of ``batch`` that only head and loss read."""

    @abstractmethod
    def run_whole(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model from ``build_whole``; its outputs are for ``loss_of`` and ``scores_of``."""

    def weight_of(self, batch: Batch) -> float:
        """Return what the mean loss of ``batch`` runs over; raises ModelError."""
        return self.objective.weight_of(self.context(batch))

    def check_parts(self, parts: Sequence[Batch]) -> None:
        """Raise ModelError for micro-batches with ignored labels that were not tried."""
        for name in self.spec.complete if len(parts) > 1 else ():
            if any(bool((part[name] == IGNORED_LABEL).any()) for part in parts if name in part):
                raise ModelError(
                    f"the batch has labels to ignore ({IGNORED_LABEL}) among {name!r}, but the "
                    "example of SplitModel has none, by which its loss was tried: give it an "
                    "example that has some, or whole_batches=True"
                )

    def loss_of(self, outputs: Any, batch: Batch) -> Tensor:
        """Compute the mean loss of these outputs for ``batch``, a scalar; raises ModelError."""
        return self.objective.loss_of(outputs, self.context(batch))

    @abstractmethod
    def example(self, shape: BatchShape) -> tuple[dict[str, Tensor], int]:
        """Make a batch to measure costs with, and count its examples."""

    # Weights

    def initial_weights(self, seed: int) -> dict[str, Tensor]:
        """Return initial values of all keys; see ``first_weights``."""
        return self.first_weights(seed)[0]

    @abstractmethod
    def first_weights(self, seed: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return initial values of all keys, and the keys that the checkpoint lacks."""

    def trained_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the current tensors that travel of a model from ``build_whole``."""
        places = self._layout.places
        return {key: read_tensor(model, places[key][0]).detach() for key in self.all_keys()}

    def resident_keys_of_segment(self, first_block: int, stop_block: int) -> frozenset[str]:
        """Return the keys that a device with these blocks reads from its own checkpoint."""
        own = self._find_range(first_block, stop_block)
        holdings = self._layout.holdings_of(*own, runs_blocks=True)
        return self._layout.resident.intersection(holdings.all)

    def read_resident(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Read these frozen weights for a device without the checkpoint; raises ModelError."""
        raise ModelError(f"nothing is read from a checkpoint here, but {next(iter(keys))!r} is")

    # Parts

    @abstractmethod
    def build_embedding(self, weights: Weights) -> Borrower:
        """Build what comes ahead of all blocks."""

    def build_front(self, weights: Weights) -> Borrower | FrontPart:
        """Build the control unit's part; ``weights`` must hold ``embedding_keys``."""
        return self.build_embedding(weights)

    def embed(
        self, embedding: Borrower | FrontPart, weights: Weights, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute a batch's hidden states and context, with all rows of the borrowed tables."""
        for key in self.ties:
            assert isinstance(embedding, Borrower)
            embedding.load_rows(key, torch.arange(len(weights[key])), weights[key])
        hidden: Tensor = embedding(batch)
        return hidden, {**self.context(batch), **embedding.block_context()}

    @abstractmethod
    def build_segment(self, first_block: int, stop_block: int, weights: Weights) -> Part:
        """Build a device's part; ``weights`` must hold its ``segment_keys`` and ``shared_keys``."""

    @abstractmethod
    def build_edge(self, weights: Weights) -> LossPart:
        """Build the edge's part; ``weights`` must hold ``edge_keys`` (and ``shared_keys``)."""

    @abstractmethod
    def build_whole(self, weights: Weights, *, trains: bool = False) -> Any:
        """Build the unsplit model with these weights, in evaluation mode."""

    def _find_range(self, first_block: int, stop_block: int) -> range:
        """Return the numbers in the whole model of these blocks of devices; raises ModelError."""
        if not 0 <= first_block < stop_block <= self.num_blocks:
            raise ModelError(
                f"blocks {first_block}..{stop_block - 1} do not exist; "
                f"devices may hold blocks 0..{self.num_blocks - 1}"
            )
        return range(self.held_blocks + first_block, self.held_blocks + stop_block)


def shapes_of(state: Weights, layout: Layout) -> dict[str, TensorShape]:
    """Return shape and dtype of every key."""
    return {
        key: (state[paths[0]].shape, state[paths[0]].dtype) for key, paths in layout.places.items()
    }


@dataclass(eq=False)
class DescribedModel:
    """A model as server and clusters know it: its ``splitter``, for batches of ``shape``.

    Plans choose the batch size if ``batch_size`` is None. ``personal`` parameters (modules or
    tensors) are never averaged; ``aggregate`` says what of adapters is. Raises ModelError for a
    personal parameter that the model does not have, or that products cannot leave out.
    """

    splitter: AnySplitter
    shape: BatchShape
    batch_size: int | None = None
    personal: tuple[str, ...] = ()
    aggregate: str = FACTORS

    def __post_init__(self) -> None:
        if self.aggregate not in (FACTORS, PRODUCTS):
            raise ModelError(f"aggregate must be factors or products, got {self.aggregate!r}")
        if self.aggregate == PRODUCTS and any(map(is_adapter, self.personal_keys)):
            raise ModelError(
                f"personal names adapters ({' '.join(self.personal)}), whose products with those "
                "of others have no mean: leave them out, or set aggregate to factors"
            )
        for name in self.personal:
            if not any(is_within(key, [name]) for key in self.splitter.all_keys()):
                raise ModelError(f"personal names {name!r}, which is not a part of the model")

    @property
    def spec_json(self) -> str:
        """The description from which other processes cut the same model."""
        return self.splitter.spec.to_json()

    @cached_property
    def keys(self) -> frozenset[str]:
        """All keys of the model, without ``aliases``."""
        return self._sent(self.splitter.all_keys())

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        """See ``AnySplitter.adapters``; by the keys of messages."""
        prefix = self.splitter.prefix
        pairs = self.splitter.adapters
        return tuple(replace(pair, a=prefix + pair.a, b=prefix + pair.b) for pair in pairs)

    @cached_property
    def edge_keys(self) -> frozenset[str]:
        """The keys that the edge trains."""
        return frozenset(self.splitter.edge_keys())

    @property
    def shared_keys(self) -> frozenset[str]:
        """The keys that both sides read: clusters own them, the edge gets copies."""
        return frozenset(self.splitter.shared_keys)

    @cached_property
    def hidden_keys(self) -> frozenset[str]:
        """Keys that are sent but not averaged: constants and personal parameters."""
        return self.constant_keys | self.personal_keys

    @cached_property
    def constant_keys(self) -> frozenset[str]:
        """Keys that never change in training."""
        return self._sent(self.splitter.constant_keys)

    @property
    def aliases(self) -> dict[str, str]:
        """See ``AnySplitter.aliases``."""
        prefix = self.splitter.prefix
        return {prefix + key: prefix + name for key, name in self.splitter.aliases.items()}

    @property
    def personal_keys(self) -> frozenset[str]:
        """All keys of the ``state_dict`` that ``personal`` names, aliases included."""
        keys = self.splitter.state_keys if self.personal else ()
        return self._sent(key for key in keys if is_within(key, self.personal))

    def _sent(self, keys: Iterable[str]) -> frozenset[str]:
        """Return these keys as messages have them."""
        return frozenset(self.splitter.prefix + key for key in keys)
