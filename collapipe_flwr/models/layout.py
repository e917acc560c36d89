"""Who owns which tensor: the control unit, a block, or the edge.

Names are the library's own (``state_dict`` keys of the whole model). A table that the model
uses in several places has one key, its *source*, and several places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from collapipe_flwr.models.families import Family, find_blocks, join_path, stack_path
from collapipe_flwr.models.lora import is_superseded, key_of

EMBEDDING = -1
EDGE = -2
Owner = int  # a block's index, or EMBEDDING, or EDGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The tensors of one model by owner.

    ``places`` lists for every key the paths at which the module tree holds that tensor;
    ``ties`` maps keys that the edge owns to the paths at which the embedding reads them too.
    """

    owners: Mapping[str, Owner]
    places: Mapping[str, tuple[str, ...]]
    ties: Mapping[str, tuple[str, ...]]
    shared_keys: tuple[str, ...]

    def keys_of(self, *owners: Owner) -> tuple[str, ...]:
        """The keys of these owners, in the model's own order."""
        return tuple(key for key, owner in self.owners.items() if owner in owners)


def make_layout(model: PreTrainedModel, family: Family, *, edge_blocks: int, untie: bool) -> Layout:
    """Assign every tensor of ``model`` to its owner."""
    stack = stack_path(model, family)
    first_at_edge = len(find_blocks(model, family)) - edge_blocks
    groups = _tie_groups(model)
    owners: dict[str, Owner] = {}
    places: dict[str, tuple[str, ...]] = {}
    ties: dict[str, tuple[str, ...]] = {}
    for source, paths in groups.items():
        by_owner: dict[Owner, list[str]] = {}
        for path in paths:
            owner = _owner(path, family, stack, first_at_edge)
            by_owner.setdefault(owner, []).append(path)
        if untie or len(by_owner) == 1:
            for owner, own in by_owner.items():
                names = [key_of(path) for path in own]
                key = source if source in names else names[0]
                owners[key], places[key] = owner, tuple(own)
        else:
            owners[source], places[source] = EDGE, tuple(by_owner[EDGE])
            ties[source] = tuple(by_owner[EMBEDDING])
    shared = [join_path(stack, prefix) for prefix in family.shared]
    shared_keys = tuple(key for key in owners if _under(key, shared))
    return Layout(owners=owners, places=places, ties=ties, shared_keys=shared_keys)


def _tie_groups(model: PreTrainedModel) -> dict[str, list[str]]:
    """Every tensor's source key with all paths that lead to it, in the model's order."""
    aliases: Mapping[str, str] = model.all_tied_weights_keys
    groups: dict[str, list[str]] = {}
    for path in model.state_dict():
        if is_superseded(path):
            continue
        source = key_of(path)
        while source in aliases:
            source = aliases[source]
        groups.setdefault(source, []).append(path)
    return groups


def _owner(path: str, family: Family, stack: str, first_at_edge: int) -> Owner:
    blocks = join_path(stack, family.blocks) + "."
    if path.startswith(blocks):
        index = int(path[len(blocks) :].split(".", 1)[0])
        return index if index < first_at_edge else EDGE
    if _under(path, [join_path(stack, name) for name in family.before]):
        return EMBEDDING
    with_first = [*family.shared, *([family.joined] if family.joined else [])]
    if _under(path, [join_path(stack, name) for name in with_first]):
        return 0 if first_at_edge > 0 else EDGE
    return EDGE


def _under(path: str, prefixes: list[str]) -> bool:
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)
