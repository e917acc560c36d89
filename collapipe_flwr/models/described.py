"""A model as server and clusters know it: how it is cut, and what its batches are."""

from __future__ import annotations

import json
from functools import cached_property, lru_cache

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import is_within
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.module_spec import ModuleSpec
from collapipe_flwr.models.module_splitter import ModuleSplitter
from collapipe_flwr.models.spec import BatchShape, ModelSpec
from collapipe_flwr.models.splitter import Splitter


class DescribedModel:
    """A model that ``splitter`` cuts, for batches of ``shape``.

    Plans choose the size of batches where ``batch_size`` is None. ``personal`` parameters (modules
    or tensors) are never averaged; raises ModelError for one that the model does not have.
    """

    def __init__(
        self,
        splitter: AnySplitter,
        shape: BatchShape,
        *,
        batch_size: int | None = None,
        personal: tuple[str, ...] = (),
    ) -> None:
        self.splitter = splitter
        self.shape = shape
        self.batch_size = batch_size
        self.personal = personal
        for name in personal:
            if not any(is_within(key, [name]) for key in splitter.all_keys()):
                raise ModelError(f"personal names {name!r}, which is no part of the model")

    @property
    def spec_json(self) -> str:
        """What travels, so that other processes cut the same model."""
        return self.splitter.spec.to_json()

    @cached_property
    def keys(self) -> frozenset[str]:
        """All that the model has; ``aliases`` may stand beside them."""
        return frozenset(self.splitter.all_keys())

    @cached_property
    def edge_keys(self) -> frozenset[str]:
        """What the edge trains."""
        return frozenset(self.splitter.edge_keys())

    @property
    def shared_keys(self) -> frozenset[str]:
        """What both sides read: clusters own it, the edge gets copies."""
        return frozenset(self.splitter.shared_keys)

    @cached_property
    def hidden_keys(self) -> frozenset[str]:
        """What is sent but not averaged: constants, which never train, and personal parameters."""
        return self.splitter.constant_keys | self.personal_keys

    @property
    def aliases(self) -> dict[str, str]:
        """Keys of the model's ``state_dict`` that travel under another one."""
        return self.splitter.aliases

    @property
    def personal_keys(self) -> frozenset[str]:
        """All keys of the ``state_dict`` that ``personal`` names, aliases included."""
        keys = self.splitter.state_keys if self.personal else ()
        return frozenset(key for key in keys if is_within(key, self.personal))


def spec_of(spec_json: str) -> ModelSpec | ModuleSpec:
    """The description that a string holds; raises ModelError."""
    try:
        values = json.loads(spec_json)
    except (ValueError, RecursionError):
        values = None  # told by the other kind
    is_module = isinstance(values, dict) and "build" in values
    return ModuleSpec.from_json(spec_json) if is_module else ModelSpec.from_json(spec_json)


@lru_cache(maxsize=4)
def splitter_of(spec_json: str) -> AnySplitter:
    """The splitter of a model of any kind, the same one in every round; raises ModelError."""
    spec = spec_of(spec_json)
    return ModuleSplitter(spec) if isinstance(spec, ModuleSpec) else Splitter(spec)
