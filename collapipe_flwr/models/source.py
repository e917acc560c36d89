"""A checkpoint on this machine, read tensor by tensor: nobody loads what is not their own.

A safetensors file begins with an index of its tensors, and its other pages come into memory when
they are touched. So a device that holds four of twelve blocks reads a third of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.hub import cached_file

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.causes import first_lines
from collapipe_flwr.models.checkpoint import checkpoint_config
from collapipe_flwr.models.skeleton import build_skeleton, derive_constant
from collapipe_flwr.models.spec import ModelSpec

Chunk = tuple[Path, str, str]  # file, name in it, the pattern by which a converter knows it
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """One tensor on disk: whole, or in pieces (experts, say) that ``joined_by`` puts together."""

    pieces: list[Chunk] = field(default_factory=list)
    joined_by: WeightConverter | None = None


class CheckpointSource:
    """The tensors of ``spec.pretrained`` under the keys of the unadapted model.

    ``in`` asks for tensors of the files, ``read`` also computes the model's constants, which
    checkpoints leave out. Raises ModelError if there is no such checkpoint on this machine.
    """

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.pretrained is not None
        self._pretrained = spec.pretrained
        config = checkpoint_config(spec)
        plain = replace(spec, lora=None, config_json=config.to_json_string(use_diff=False))
        self._skeleton = build_skeleton(plain)
        self._places = _places(spec.pretrained, self._skeleton)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def read(self, key: str) -> Tensor:
        """The tensor of one key as the checkpoint has it; raises ModelError if it has none."""
        if key not in self._places:
            return self._constant(key)
        try:
            return _read(self._places[key], key, self._skeleton)
        except (OSError, SafetensorError) as cause:
            raise _unreadable(self._pretrained, cause) from cause

    def _constant(self, key: str) -> Tensor:
        constant = derive_constant(self._skeleton, key)
        if constant is None:
            raise ModelError(f"the checkpoint {self._pretrained!r} lacks the tensor {key!r}")
        return constant


class Completed(Mapping[str, Tensor]):
    """Given weights, and from the checkpoint those ``resident`` ones that were not given."""

    def __init__(
        self,
        given: Mapping[str, Tensor],
        resident: frozenset[str],
        read: Callable[[str], Tensor],
    ) -> None:
        self._given = given
        self._resident = resident
        self._read = read

    def __getitem__(self, key: str) -> Tensor:
        if key in self._given:
            return self._given[key]
        if key not in self._resident:
            raise KeyError(key)
        return self._read(key)

    def __contains__(self, key: object) -> bool:
        return key in self._given or key in self._resident

    def __iter__(self) -> Iterator[str]:
        yield from self._given
        yield from self._resident.difference(self._given)

    def __len__(self) -> int:
        return len(self._resident.union(self._given))


def _read(stored: _Stored, key: str, model: PreTrainedModel) -> Tensor:
    if stored.joined_by is None:
        file, name, _ = stored.pieces[0]
        return _tensor(file, name)
    converter = deepcopy(stored.joined_by)  # it keeps what it is given
    for file, name, pattern in stored.pieces:
        converter.add_tensor(key, name, pattern, _tensor(file, name))  # type: ignore[arg-type]
    joined = converter.convert(key, model=model, config=model.config)[key]
    whole: Tensor = joined[0] if isinstance(joined, list) else joined
    return whole


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor


def _places(pretrained: str, skeleton: PreTrainedModel) -> dict[str, _Stored]:
    """Where each tensor of the model lies; what a converter would divide is left out."""
    wanted = skeleton.state_dict()
    found: dict[str, _Stored] = {}
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    joining = {p: c for c in converters if len(c.target_patterns) == 1 for p in c.source_patterns}
    prefix = skeleton.base_model_prefix
    for file, name in sorted(_listing(pretrained), key=lambda stored: dot_natural_key(stored[1])):
        key, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if key not in wanted and name in wanted:
            key, pattern = name, None
        if key in wanted and (pattern is None or pattern in joining):
            stored = _Stored(joined_by=joining[pattern] if pattern else None)
            found.setdefault(key, stored).pieces.append((file, name, pattern or ""))
    return _with_aliases(found, skeleton.all_tied_weights_keys)


def _with_aliases(found: dict[str, _Stored], aliases: Mapping[str, str]) -> dict[str, _Stored]:
    """A tied table is stored once, under any of its names."""
    for alias, source in aliases.items():
        if source not in found and alias in found:
            found[source] = found[alias]
    for alias, source in aliases.items():
        if alias not in found and source in found:
            found[alias] = found[source]
    return found


def _listing(pretrained: str) -> Iterator[tuple[Path, str]]:
    """File and name of every stored tensor; only headers are read."""
    try:
        for file in _files(pretrained):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    yield file, name
    except (OSError, SafetensorError, ValueError) as cause:
        raise _unreadable(pretrained, cause) from cause


def _files(pretrained: str) -> list[Path]:
    """The safetensors files in a folder or in the hub's cache, downloaded where it must be."""
    one = cached_file(pretrained, _FILE, _raise_exceptions_for_missing_entries=False)
    if one is not None:
        return [Path(one)]
    index = cached_file(pretrained, _INDEX, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise ModelError(
            f"the checkpoint {pretrained!r} has no {_FILE}; load it once with transformers and "
            "save it again, which writes one"
        )
    shards = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    return [Path(str(cached_file(pretrained, shard))) for shard in shards]


def _unreadable(pretrained: str, cause: BaseException) -> ModelError:
    return ModelError(f"cannot read the checkpoint {pretrained!r}: {first_lines(cause)}")
