"""The owner of each tensor: the control unit, a block, or the edge.

Names are the library's own (``state_dict`` keys of the whole model). A table that the model
uses in several places has one key, its *source*, and several places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import is_within
from collapipe_flwr.models.families import Family, find_blocks, find_stack_path, join_path
from collapipe_flwr.models.lora import is_superseded, key_of
from collapipe_flwr.models.spec import ModelSpec, ModuleSpec

EMBEDDING = -1
EDGE = -2
Owner = int  # a block's index, or EMBEDDING, or EDGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The tensors of one model by owner.

    ``places`` lists for every key the paths at which the module tree holds that tensor;
    ``ties`` maps keys that the edge owns to the paths at which the embedding reads them too.
    ``shared_keys`` are held by every part that runs blocks. ``constants`` never train (buffers,
    sinusoids, weights beneath adapters), ``frozen`` ones by the user's choice. ``resident``
    constants come from the checkpoint on each machine and do not travel; their matrices are kept
    in ``frozen_dtype``.
    """

    owners: Mapping[str, Owner]
    places: Mapping[str, tuple[str, ...]]
    ties: Mapping[str, tuple[str, ...]]
    shared_keys: tuple[str, ...] = ()
    constants: frozenset[str]
    frozen: frozenset[str]
    resident: frozenset[str] = frozenset()
    frozen_dtype: str = "float32"

    def keys_of(self, *owners: Owner) -> tuple[str, ...]:
        """Return the keys of these owners, in the model's own order."""
        return tuple(key for key, owner in self.owners.items() if owner in owners)

    def select_travelling(self, keys: Iterable[str]) -> tuple[str, ...]:
        return tuple(key for key in keys if key not in self.resident)

    def all_places(self) -> dict[str, tuple[str, ...]]:
        """Return every key with all paths that lead to it, those of ``ties`` included."""
        return {key: paths + self.ties.get(key, ()) for key, paths in self.places.items()}

    def holdings_of(self, *owners: Owner, runs_blocks: bool = False) -> Holdings:
        """Return the tensors of a part with these owners; all shared ones if it ``runs_blocks``."""
        owned = {key: self.places[key] for key in self.keys_of(*owners)}
        shared = {key: self.places[key] for key in self.shared_keys if runs_blocks}
        return Holdings(layout=self, owned=owned, all={**owned, **shared})

    def all_holdings(self) -> Holdings:
        """Return the tensors of the unsplit model, tied ones in all their places."""
        places = self.all_places()
        return Holdings(layout=self, owned=places, all=places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The tensors that a part holds, by key with the paths of each.

    Those that are not ``owned`` are replicas of another part's.
    """

    layout: Layout
    owned: Mapping[str, tuple[str, ...]]
    all: Mapping[str, tuple[str, ...]]


def make_layout(model: PreTrainedModel, family: Family, spec: ModelSpec) -> Layout:
    """Assign every tensor of the skeleton ``model`` to its owner."""
    stack = find_stack_path(model, family)
    first_at_edge = len(find_blocks(model, family)) - spec.edge_blocks
    untie = spec.ties == "untie" or spec.adapted  # frozen twins stay equal
    groups = _group_ties(model)
    owners: dict[str, Owner] = {}
    places: dict[str, tuple[str, ...]] = {}
    ties: dict[str, tuple[str, ...]] = {}
    for source, paths in groups.items():
        by_owner: dict[Owner, list[str]] = {}
        for path in paths:
            owner = _find_owner(path, family, stack, first_at_edge)
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
    shared_keys = tuple(key for key in owners if is_within(key, shared))
    parameters = model.named_parameters(remove_duplicate=False)
    trainable = {key_of(path) for path, parameter in parameters if parameter.requires_grad}
    constants = frozenset(owners).difference(trainable)
    reads_checkpoint = spec.adapted and spec.pretrained is not None
    return Layout(
        owners=owners,
        places=places,
        ties=ties,
        shared_keys=shared_keys,
        constants=constants,
        frozen=frozenset((*spec.frozen, *(shared_keys if spec.shared == "freeze" else ()))),
        resident=constants.difference(spec.absent) if reads_checkpoint else frozenset(),
        frozen_dtype=spec.lora.frozen_dtype if spec.lora else "float32",
    )


def _group_ties(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return every tensor's source key with all paths that lead to it, in the model's order."""
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


def _find_owner(path: str, family: Family, stack: str, first_at_edge: int) -> Owner:
    blocks = join_path(stack, family.blocks) + "."
    if path.startswith(blocks):
        index = int(path[len(blocks) :].split(".", 1)[0])
        return index if index < first_at_edge else EDGE
    if is_within(path, [join_path(stack, name) for name in family.before]):
        return EMBEDDING
    with_first = [*family.shared, *([family.joined] if family.joined else [])]
    if is_within(path, [join_path(stack, name) for name in with_first]):
        return 0 if first_at_edge > 0 else EDGE
    return EDGE


def group_tensors(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Group the keys of the ``state_dict`` by tensor, under the first key of each."""
    groups: dict[int, list[str]] = {}
    for path, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise ModelError(f"its state_dict holds {path!r}, which is not a tensor")
        groups.setdefault(id(tensor), []).append(path)
    return {paths[0]: tuple(paths) for paths in groups.values()}


def make_module_layout(model: nn.Module, spec: ModuleSpec) -> Layout:
    """Assign every tensor of a module to its owner; raises ModelError where it fits no spec."""
    places = group_tensors(model)
    names = list_block_paths(model, spec.blocks)
    wrong = sorted({*spec.before, *spec.updated, *spec.frozen}.difference(places))
    if len(names) != spec.num_blocks or wrong:
        raise ModelError(
            f"{spec.build!r} builds another model here ({len(names)} blocks at {spec.blocks!r}, "
            f"{len(wrong)} tensors missing): have the same version of it everywhere"
        )
    first_at_edge = spec.num_blocks - spec.edge_blocks
    owners: dict[str, Owner] = {}
    for key in places:
        index = find_block_index(key, names)
        if key in spec.before:
            owners[key] = EMBEDDING
        else:
            owners[key] = EDGE if index is None or index >= first_at_edge else index
    trainable = {key for key, tensor in model.named_parameters() if tensor.requires_grad}
    return Layout(
        owners=owners,
        places=places,
        ties={key: _find_tables(model, places[key]) for key, _ in spec.tied},
        constants=frozenset(places).difference(trainable, spec.updated),
        frozen=frozenset(spec.frozen),
    )


def list_block_paths(model: nn.Module, blocks: str) -> list[str]:
    """Return the paths of the blocks in order; none where the model has no such list."""
    try:
        found = model.get_submodule(blocks)
    except AttributeError:
        return []
    return [f"{blocks}.{name}" if blocks else name for name in found._modules]


def find_block_index(path: str, names: Sequence[str]) -> int | None:
    """Return the number of the block that holds the tensor at ``path``; None outside of blocks."""
    return next((i for i, name in enumerate(names) if is_within(path, [name])), None)


def _find_tables(model: nn.Module, paths: Iterable[str]) -> tuple[str, ...]:
    owners = {path: model.get_submodule(path.rpartition(".")[0]) for path in paths}
    return tuple(path for path, owner in owners.items() if isinstance(owner, nn.Embedding))
