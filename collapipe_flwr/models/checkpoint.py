"""Checkpoints of transformers: whole models by the library's loader, single tensors in place.

A checkpoint is a folder or a hub name. A safetensors file begins with an index of its tensors, and
its other pages are read when they are touched: a device that holds four of twelve blocks reads a
third of the file.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import GENERATION_CONFIG_NAME, logging
from transformers.utils.hub import cached_file

from collapipe_flwr.core.errors import CheckpointMissing, ModelError, prefix_errors
from collapipe_flwr.core.hub import expand_home, explain_unreachable, is_folder_only, silence
from collapipe_flwr.models.foreign_errors import first_lines, translate_errors
from collapipe_flwr.models.skeleton import build_skeleton, builder_of, derive_constant, read_config
from collapipe_flwr.models.spec import ModelSpec

_TIE_FLAGS = ("tie_word_embeddings", "share_encoder_decoder_embeddings")


def read_pretrained_config(pretrained: str) -> PreTrainedConfig:
    """Read the configuration of a checkpoint (folder or hub name); raises ModelError."""
    folder = expand_home(pretrained)
    if not folder.is_dir() and is_folder_only(pretrained):
        raise CheckpointMissing(
            f"cannot read the checkpoint {pretrained!r}: there is no folder {folder.absolute()}; "
            "correct the path, or give a hub name such as owner/model"
        )
    offline = "" if folder.is_dir() else explain_unreachable(pretrained)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(_source(pretrained))
    except (OSError, ValueError, KeyError, StrictDataclassError) as cause:
        raise CheckpointMissing(
            f"cannot read the checkpoint {pretrained!r}: {offline or first_lines(cause)}; "
            "give a folder with config.json or a hub name that this machine can reach"
        ) from cause
    if quantized := getattr(config, "quantization_config", None):
        if not (isinstance(quantized, dict) and quantized.get("load_in_4bit")):
            raise ModelError(
                f"the checkpoint {pretrained!r} is quantised, but not to 4 bits by bitsandbytes, "
                f"so its tensors are not those of a {config.model_type!r} model: name the one that "
                "it was made from"
            )
        del config.quantization_config  # tensors are widened where they are read
    return config


def check_stored(pretrained: str) -> None:
    """Raise ModelError where the weights in a folder are missing or not whole, by their headers."""
    folder = expand_home(pretrained)
    if not pretrained or not folder.is_dir():
        return
    with prefix_errors("model.pretrained"):
        read_pretrained_config(pretrained)
    files = [folder / name for name in (_FILE, _INDEX, *_PICKLED) if (folder / name).exists()]
    if not files:
        raise ModelError(
            f"model.pretrained {pretrained!r} has no weights, such as {_FILE}: copy the whole "
            "folder, or leave model.pretrained empty to begin with random ones"
        )
    with prefix_errors("model.pretrained"):
        if files[0].name in (_FILE, _INDEX):
            list(_list_tensors(pretrained))
        elif files[0].suffix == ".bin":
            kinds = (OSError, RuntimeError, ValueError, EOFError, UnpicklingError)
            with translate_errors(_unreadable(pretrained), kinds):
                mapped = is_zipfile(files[0])
                torch.load(files[0], map_location="meta", weights_only=True, mmap=mapped)


def load_checkpoint(
    spec: ModelSpec, seed: int, *, body: frozenset[str]
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Load the model of ``spec.pretrained``; also return the sorted keys that it lacks.

    A head that the checkpoint lacks, or has for other classes, is drawn from ``seed``. Raises
    ModelError if the checkpoint cannot be read or lacks one of the ``body`` keys.
    """
    config = _read_checkpoint_config(spec)
    assert spec.pretrained is not None
    unread = f"cannot load the checkpoint {spec.pretrained!r}"
    kinds = OSError, ValueError, RuntimeError, SafetensorError
    source: str | None = _source(spec.pretrained)
    builder, state = builder_of(spec, config), None
    if "quantization_config" in PreTrainedConfig.get_config_dict(_source(spec.pretrained))[0]:
        builder, source = type(build_published_skeleton(spec)), None
        state = CheckpointSource(spec).read_all()
    with translate_errors(unread, kinds), silence(logging), torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model, report = builder.from_pretrained(
            source,
            config=config,
            state_dict=state,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # judged below
            output_loading_info=True,
        )
    lacking = set[str]()
    for problem in ("missing", "mismatched"):
        entries = report[f"{problem}_keys"]  # of mismatched ones with their shapes
        keys = {entry if isinstance(entry, str) else entry[0] for entry in entries}
        keys.difference_update(model.all_tied_weights_keys)
        if wrong := sorted(keys & body):
            raise checkpoint_misfit(spec, problem, wrong)
        lacking |= keys
    return model, tuple(sorted(lacking))


def build_published_skeleton(spec: ModelSpec) -> PreTrainedModel:
    """Build the skeleton of ``spec`` without adapters, with the ties of its checkpoint."""
    config = _read_checkpoint_config(spec)
    return build_skeleton(
        replace(spec.unadapted, config_json=config.to_json_string(use_diff=False))
    )


def _read_checkpoint_config(spec: ModelSpec) -> PreTrainedConfig:
    """Read the configuration of ``spec``, with tables tied as in its checkpoint."""
    assert spec.pretrained is not None
    config = read_config(spec)
    source = read_pretrained_config(spec.pretrained)
    for flag in _TIE_FLAGS:
        if hasattr(source, flag):
            setattr(config, flag, getattr(source, flag))
    return config


def checkpoint_misfit(spec: ModelSpec, problem: str, keys: Sequence[str]) -> ModelError:
    """Make the error for ``missing`` or ``mismatched`` tensors of a checkpoint's body."""
    return ModelError(
        f"the checkpoint {spec.pretrained!r} does not fit a {spec.model_type!r} model for "
        f"{spec.task!r}: {len(keys)} {problem} tensors, first {keys[0]!r}"
    )


# File, name in it, and the converter that joins several (experts, say) with the pattern it knows.
Piece = tuple[Path, str, WeightConverter | None, str]
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BLOCKS = 2**12  # of 4-bit codes that are widened at a time
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class CheckpointSource:
    """The tensors of ``spec.pretrained`` under the keys of the unadapted model.

    ``in`` tests for tensors of the files; ``read`` also computes the model's constants, which
    checkpoints leave out. Raises ModelError if there is no such checkpoint on this machine.
    """

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.pretrained is not None
        self._pretrained = spec.pretrained
        self._skeleton = build_published_skeleton(spec)
        self._places = _find_places(spec.pretrained, self._skeleton)
        self._computing = threading.Lock()  # constants are computed within the skeleton

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def read(self, key: str) -> Tensor:
        """Read the tensor of one key as the checkpoint has it; raises ModelError if it has none."""
        if key in self._places:
            with translate_errors(_unreadable(self._pretrained), (OSError, SafetensorError)):
                return _read(self._places[key], key, self._skeleton)
        with self._computing:
            constant = derive_constant(self._skeleton, key)
        if constant is None:
            raise ModelError(f"the checkpoint {self._pretrained!r} lacks the tensor {key!r}")
        return constant

    def read_all(self) -> dict[str, Tensor]:
        """Read every stored tensor, under one of its keys where several are tied."""
        once = {str(pieces): key for key, pieces in reversed(self._places.items())}
        return {key: self.read(key) for key in once.values()}


class Completed(dict[str, Tensor]):
    """Given weights, and ``resident`` ones that ``read`` gets from the checkpoint at each access.

    Iteration yields the given ones only.
    """

    def __init__(
        self,
        given: Mapping[str, Tensor],
        resident: frozenset[str],
        read: Callable[[str], Tensor],
    ) -> None:
        super().__init__(given)
        self._resident = resident
        self._read = read

    def __missing__(self, key: str) -> Tensor:
        if key not in self._resident:
            raise KeyError(key)
        return self._read(key)


def digest_of(tensor: Tensor) -> str:
    """Compute a digest of a tensor's values in single precision, in which parts hold them."""
    flat = tensor.detach().to("cpu", torch.float32).contiguous().reshape(-1)
    return blake2b(flat.view(torch.uint8).numpy().data, digest_size=4).hexdigest()


def _read(pieces: Sequence[Piece], key: str, model: PreTrainedModel) -> Tensor:
    file, name, joining, _ = pieces[0]
    if joining is None:
        return _read_tensor(file, name)
    converter = deepcopy(joining)  # it accumulates tensors
    for file, name, _, pattern in pieces:
        converter.add_tensor(key, name, pattern, _read_tensor(file, name))  # type: ignore[arg-type]
    joined = converter.convert(key, model=model, config=model.config)[key]
    whole: Tensor = joined[0] if isinstance(joined, list) else joined
    return whole


def _read_tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor if tensor.dtype != torch.uint8 else _widen(tensor, _read_scales(file, name))


def _read_scales(file: Path, name: str) -> dict[str, Tensor]:
    """Read what bitsandbytes keeps beside the 4-bit codes ``name``, maybe in another shard."""
    found, prefix = {}, f"{name}."
    for shard in sorted(file.parent.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as tensors:
            for other in tensors.keys():  # noqa: SIM118 - not a mapping
                if other.startswith(prefix):
                    found[other.removeprefix(prefix)] = tensors.get_tensor(other)
    return found


def _widen(codes: Tensor, beside: Mapping[str, Tensor]) -> Tensor:
    """Widen 4-bit codes of bitsandbytes to float32, as `QuantState` in its functional.py has them.

    Two codes to a byte, the higher half first; a scale per block, which may be 8-bit codes itself.
    """
    (state,) = (value for key, value in beside.items() if key.startswith("quant_state."))
    told = json.loads(state.numpy().tobytes())
    scales = beside["absmax"]
    if "nested_absmax" in beside:
        outer = beside["nested_absmax"].repeat_interleave(told["nested_blocksize"])
        scales = beside["nested_quant_map"][scales.long()] * outer[: len(scales)]
        scales = scales + told["nested_offset"]
    wide = torch.empty(told["shape"])
    flat, size = wide.view(-1), told["blocksize"]
    for first in range(0, len(scales), _BLOCKS):  # indices take 16 times the memory of codes
        here = slice(first * size, (first + _BLOCKS) * size)
        packed = codes.view(-1)[here.start // 2 : -(-here.stop // 2)]
        each = torch.stack([packed >> 4, packed & 15], dim=-1).view(-1)
        scale = scales[first : first + _BLOCKS].repeat_interleave(size)
        count = len(flat[here])
        flat[here] = beside["quant_map"][each[:count].long()] * scale[:count]
    return wide


def _find_places(pretrained: str, skeleton: PreTrainedModel) -> dict[str, list[Piece]]:
    """Find where each tensor is stored, except those that a converter would divide."""
    wanted = skeleton.state_dict()
    found: dict[str, list[Piece]] = {}
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    joining = {p: c for c in converters if len(c.target_patterns) == 1 for p in c.source_patterns}
    prefix = skeleton.base_model_prefix
    for file, name in sorted(
        _list_tensors(pretrained), key=lambda stored: dot_natural_key(stored[1])
    ):
        key, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if key not in wanted and name in wanted:
            key, pattern = name, None
        if key in wanted and (pattern is None or pattern in joining):
            piece = (file, name, joining[pattern] if pattern else None, pattern or "")
            found.setdefault(key, []).append(piece)
    ties = list(skeleton.all_tied_weights_keys.items())  # stored once, under any of their names
    for known, other in (*ties, *((source, alias) for alias, source in ties)):
        if known in found:
            found.setdefault(other, found[known])
    return found


def _list_tensors(pretrained: str) -> Iterator[tuple[Path, str]]:
    """Yield file and name of every stored tensor; only headers are read."""
    kinds = OSError, SafetensorError, ValueError, KeyError
    with translate_errors(_unreadable(pretrained), kinds):
        for file in _find_files(pretrained):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    yield file, name


def _find_files(pretrained: str) -> list[Path]:
    """Find the safetensors files in a folder or the hub's cache; download them if need be."""
    source = _source(pretrained)
    one = cached_file(source, _FILE, _raise_exceptions_for_missing_entries=False)
    if one is not None:
        return [Path(one)]
    index = cached_file(source, _INDEX, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise ModelError(
            f"the checkpoint {pretrained!r} has no {_FILE}; load it once with transformers and "
            "save it again, which writes one"
        )
    shards = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    return [Path(str(cached_file(source, shard))) for shard in shards]


def find_generation_settings(pretrained: str) -> Path | None:
    """Find the file of the checkpoint's own generation settings; None if it has none."""
    with suppress(OSError):
        found = cached_file(
            _source(pretrained), GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False
        )
        return None if found is None else Path(found)
    return None


def _source(pretrained: str) -> str:
    """Return the checkpoint's folder or hub name as the library knows it, without ``~``."""
    folder = expand_home(pretrained)
    return str(folder) if folder.is_dir() else pretrained


def _unreadable(pretrained: str) -> str:
    return f"cannot read the checkpoint {pretrained!r}"
