"""What the frozen part of a model makes of each example, computed once and kept on disk.

The control unit holds the embedding and the frozen blocks behind it (`models.front`). Their results
for an example never change, so it writes them to a file and reads that at the next visit: nothing
of the frozen part is computed then, or even loaded.

An example is known by what the frozen part reads of it, without its padding, and that part by its
weights, its configuration and whatever else decides about bits: a file that is found is right. It
begins with the digest of its content, so that a torn or damaged one is computed again. Padding
counts as zeros, which nothing behind it reads. An approximate codec is applied at the first visit
already, so that all visits are equal.

Up to a number of bytes are kept: states of frozen parts that are no longer used make room, those of
the present one do not, since each round needs all of them as much.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from collapipe_flwr.cluster.order import TrainingOrder
from collapipe_flwr.core.measurements import CacheUse
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.compute import CPU, bring, bring_home, compute_in, hold
from collapipe_flwr.pipeline.config import CacheConfig
from collapipe_flwr.pipeline.offload import view_bytes
from collapipe_flwr.pipeline.state import compute_digest
from collapipe_flwr.transport.codec import WIRE_CODECS

log = logging.getLogger(__name__)
_MASK = "attention_mask"
_DIGEST_BYTES = 16
_LENGTH = struct.Struct("<I")  # of the header: dtype, shape, seconds
_DRAFT, _DRAFT_S = ".partial", 3600.0  # of a file, and when nobody writes it any more
_LOOKS = 64  # at the folder's size, while it is filled


def build_front(splitter: AnySplitter, order: TrainingOrder) -> nn.Module:
    """Build the control unit's part, which keeps its results where the order says so."""
    if splitter.held_blocks and order.learning.cache.active:
        assert isinstance(splitter, Splitter)
        return CachedFront(splitter, order)
    return splitter.build_front(order.weights)


def find_folder() -> Path:
    """Return the folder of all kept states of this user."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "collapipe" / "activations"


@dataclass(frozen=True, slots=True)
class _Example:
    """The name of its file, and its positions without padding; None: all of them."""

    digest: str
    length: int | None


class CachedFront(nn.Module):
    """The frozen part, which is built when an example is visited for the first time.

    ``use`` counts the examples of training so far.
    """

    def __init__(self, splitter: Splitter, order: TrainingOrder) -> None:
        super().__init__()
        self.use = CacheUse()
        self._splitter, self._weights = splitter, order.weights
        self._place, self._precision = order.compute, order.learning.execution.precision
        self._kept = KeptStates(find_folder(), self._name_part(order), order.learning.cache)
        # The rest of a micro-batch may decide about last bits, and audits compare all of them.
        self._whole = order.learning.audit_share > 0
        self._built: tuple[nn.Module, ...] = ()  # in a tuple it is no module of this one

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return owned tensors by absolute key: those that came, as none trains."""
        del args, kwargs
        return {key: self._weights[key] for key in self._splitter.embedding_keys()}

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states (B, T, D) behind the frozen part; those of padding are 0."""
        width, examples = self._find_examples(inputs)
        found = [self._kept.read(example.digest) for example in examples]
        missing = [row for row, kept in enumerate(found) if kept is None]
        use = CacheUse(
            hits=len(found) - len(missing),
            misses=len(missing),
            spared_s=sum(kept.computed_s for kept in found if kept is not None),
        )
        if missing:
            rows = list(range(len(found))) if self._whole else missing
            self._build()
            start_s = time.perf_counter()
            states = self._compute({name: tensor[rows] for name, tensor in inputs.items()})
            each_s = (time.perf_counter() - start_s) / len(rows)
            for row in missing:
                example = examples[row]
                state = states[rows.index(row), : example.length]
                found[row], stored = self._kept.write(example.digest, state, each_s)
                use += CacheUse(stored=int(stored))
        if self.training:
            self.use += use
        return _join([kept.state for kept in found if kept is not None], width)

    def _build(self) -> None:
        if not self._built:
            self._built = (hold(self._splitter.build_front(self._weights), self._place),)

    def _compute(self, inputs: Mapping[str, Tensor]) -> Tensor:
        (front,) = self._built
        with compute_in(self._precision, self._place):
            hidden_BTD: Tensor = front(bring(inputs, self._place))
        return bring_home({"": hidden_BTD})[""]

    def _name_part(self, order: TrainingOrder) -> str:
        """Compute a digest of all that decides about the bits of states, but the examples."""
        splitter, place = self._splitter, self._place
        spec, resident = splitter.spec, {*splitter.resident_keys}
        name = CPU.type
        if place != CPU:
            name = torch.get_device_module(place.type).get_device_name(place)
        facts = (
            *(
                spec.config_json,
                spec.model_class,
                spec.held_blocks,
                spec.lora and spec.lora.frozen_dtype,
            ),
            *(spec.adapter_json, self._precision, order.learning.cache.codec),
            *(torch.__version__, transformers.__version__, name),
            torch.backends.cpu.get_cpu_capability(),
        )
        digest = blake2b(json.dumps(facts).encode(), digest_size=_DIGEST_BYTES)
        for key in splitter.front_keys(splitter.held_blocks):
            own = splitter.read_resident((key,)) if key in resident else self._weights
            digest.update(f"{key} {compute_digest(own[key])} ".encode())
        return digest.hexdigest()

    def _find_examples(self, inputs: Mapping[str, Tensor]) -> tuple[int, list[_Example]]:
        """Name each row's example, without padding at the end; also the width with it.

        Padding is left out where masks hide it from all that comes behind: heads and losses of a
        user might read it, and models that are not known.
        """
        splitter, mask = self._splitter, inputs.get(_MASK)
        unread = splitter.targets_of(inputs)
        read = [(name, tensor) for name, tensor in sorted(inputs.items()) if name not in unread]
        hides = splitter.has_record and not splitter.has_own_loss
        if mask is None or not hides or splitter.input_name != "input_ids":
            return 0, [_name(read, row, None, 0) for row in range(len(read[0][1]))]
        width, kept = mask.shape[1], mask.cpu() != 0
        counts = kept.sum(1)
        ahead = torch.arange(width) < counts[:, None]
        padded = (kept == ahead).all(1) & (counts > 0)
        lengths = torch.where(padded, counts, width).tolist()
        return width, [_name(read, row, n, width) for row, n in enumerate(lengths)]


def _name(read: Sequence[tuple[str, Tensor]], row: int, length: int | None, width: int) -> _Example:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for key, tensor in read:
        own = tensor[row]
        if length is not None and own.dim() and len(own) == width:
            own = own[:length]
        digest.update(f"{key} {own.dtype} {tuple(own.shape)} ".encode())
        digest.update(view_bytes(own))
    return _Example(digest.hexdigest(), length)


def _join(states: Sequence[Tensor], width: int) -> Tensor:
    """Stack states (T, D) of examples, of which shorter ones end with zeros."""
    width = max(width, *map(len, states))
    found = states[0].new_zeros(len(states), width, *states[0].shape[1:])
    for row, state in enumerate(states):
        found[row, : len(state)] = state
    return found


@dataclass(frozen=True, slots=True)
class Kept:
    """The hidden states (T, D) of an example, and the seconds that computing them took."""

    state: Tensor
    computed_s: float


class KeptStates:
    """A folder with a file for each example, within the folder of all frozen parts.

    A disk that is full, or cannot be written, is a warning: states are computed again then.
    """

    def __init__(self, root: Path, part: str, config: CacheConfig) -> None:
        self._root, self._folder = root, root / part
        self._most_bytes = int(config.max_gb * 1e9)
        self._codec = WIRE_CODECS[config.codec]
        self._room = 0  # bytes to write before the folder is looked at again
        self._full = False
        with suppress(OSError):  # writing says what is wrong
            os.utime(self._folder)  # it is in use

    def read(self, digest: str) -> Kept | None:
        """Read the hidden states of an example; None if none are kept, or the file is damaged."""
        path = self._folder / digest
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error)
            return None
        proof, body = content[:_DIGEST_BYTES], memoryview(content)[_DIGEST_BYTES:]
        if proof != _prove(digest, body):
            log.warning("%s is damaged: its example is computed again", path)
            path.unlink(missing_ok=True)
            return None
        (size,) = _LENGTH.unpack(body[: _LENGTH.size])
        start = _LENGTH.size + size
        dtype, shape, computed_s = json.loads(bytes(body[_LENGTH.size : start]))
        return Kept(self._unpack(bytearray(body[start:]), dtype, shape), computed_s)

    def write(self, digest: str, state: Tensor, computed_s: float) -> tuple[Kept, bool]:
        """Write the states of an example while there is room; returns them as `read` will."""
        dtype, shape = str(state.dtype).removeprefix("torch."), tuple(state.shape)
        packed = self._codec.pack(state.contiguous())
        header = json.dumps((dtype, shape, computed_s)).encode()
        body = b"".join((_LENGTH.pack(len(header)), header, packed))
        kept = Kept(self._unpack(bytearray(packed), dtype, shape), computed_s)
        return kept, self._write(self._folder / digest, _prove(digest, body) + body)

    def _unpack(self, packed: bytearray, dtype: str, shape: Sequence[int]) -> Tensor:
        flat = self._codec.unpack(packed, getattr(torch, dtype))
        return flat[: math.prod(shape)].view(*shape)

    def _write(self, path: Path, content: bytes) -> bool:
        draft = path.with_name(f"{path.name}.{os.getpid()}{_DRAFT}")
        try:
            if not self._has_room(len(content)):
                return False
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(content)  # not flushed: a torn file is found by its digest
            draft.replace(path)
        except OSError as error:
            log.warning("hidden states cannot be kept in %s: %s", self._folder, error)
            self._full = True
            draft.unlink(missing_ok=True)
            return False
        self._room -= len(content)
        return True

    def _has_room(self, size: int) -> bool:
        if self._full:
            return False
        if self._room < size:
            left = self._make_room(size)
            self._room = max(min(left, self._most_bytes // _LOOKS), min(left, size))
            self._full = left < size
        return not self._full

    def _make_room(self, size: int) -> int:
        """Remove what is kept for other parts, the oldest first, until ``size`` more bytes fit.

        Returns the bytes that are left.
        """
        self._root.mkdir(0o700, parents=True, exist_ok=True)
        folders = sorted(self._root.iterdir(), key=lambda folder: folder.stat().st_mtime)
        sizes = {folder: _size_of(folder) for folder in folders}
        left = self._most_bytes - sum(sizes.values())
        for folder in folders:
            if left < size and folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)
                left += sizes[folder]
        return left


def _size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder, drafts of killed writers excepted: they go."""
    size = 0
    for file in os.scandir(folder):
        with suppress(FileNotFoundError):  # another process works here, too
            if file.name.endswith(_DRAFT) and file.stat().st_mtime < time.time() - _DRAFT_S:
                os.unlink(file)
            else:
                size += file.stat().st_size
    return size


def _prove(name: str, body: bytes | memoryview) -> bytes:
    """Compute what a file of this name begins with."""
    return blake2b(body, digest_size=_DIGEST_BYTES, key=name.encode()).digest()
