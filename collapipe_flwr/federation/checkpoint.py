"""A run's checkpoints, from which a new server process resumes.

There is one folder per finished round: ``global.safetensors`` (the model), ``arrays.safetensors``
and ``tensors.safetensors`` (memory of the strategy, its planner and other parts), ``state.json``
(everything else) and ``chance.json`` (random generators, updated when the next round begins). There
is no pickle: a checkpoint cannot run code. A folder gets its name once all of it is on disk, and
older ones are deleted after that, so a crash or a power cut leaves one of the two.

The inner strategy's memory is its attributes that changed since it was made, as JSON and arrays:
numbers, strings, lists, dicts, named tuples, numpy arrays, Flower's records, and wrapped
strategies. Unchanged attributes are not saved, so a resumed run may change its settings.
"""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors
from torch import Tensor

from collapipe_flwr.core.durable import clean, draft, make_folder, publish, write_text
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors

VERSION = 6
KEPT_CHECKPOINTS = 2  # so that a damaged one leaves another
_NAME = re.compile(r"round-(\d{6,})")
_MODEL, _ARRAYS, _TENSORS = "global.safetensors", "arrays.safetensors", "tensors.safetensors"
_STATE, _CHANCE = "state.json", "chance.json"

Arrays = dict[str, NDArray[Any]]
Found = TypeVar("Found")
_KIND = "__kind__"  # marks an object in JSON that is not a dict of the strategy
_DICTS: Mapping[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
}
_Key = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentState:
    """What one part of the run keeps between rounds: text, arrays, tensors of any dtype."""

    text: str = ""
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def by_name(parts: Mapping[str, Mapping[str, Tensor]]) -> ComponentState:
        """Join the tensors of several owners, whose names may hold any text."""
        numbered = {str(index): tensors for index, tensors in enumerate(parts.values())}
        return ComponentState(text=json.dumps(list(parts)), tensors=_join(numbered))

    def named_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return what :meth:`by_name` was given."""
        names = json.loads(self.text or "[]")
        return {name: _select(str(index), self.tensors) for index, name in enumerate(names)}


@runtime_checkable
class Resumable(Protocol):
    """A part of the run whose memory a checkpoint keeps."""

    def dump(self) -> ComponentState:
        """Return everything that the next round depends on."""

    def load(self, memory: ComponentState) -> None:
        """Restore what :meth:`dump` returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The run after ``server_round``; ``memories`` are by part, whose names hold no slash."""

    server_round: int
    arrays: ArrayRecord
    strategy: str  # class name of the inner strategy
    memories: Mapping[str, ComponentState] = field(default_factory=dict)
    rng_state: str = field(repr=False, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """A folder of checkpoints, one per ``every`` rounds; ``resume`` continues from the newest.

    Each takes the bytes of the model once, plus the state of the inner strategy (twice the model
    for FedAdam).
    """

    folder: Path
    resume: bool = False
    every: int = 1

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then delete all but the newest two; raises RunError."""
        path = self.folder / f"round-{checkpoint.server_round:06d}"
        with _translate_errors(path):
            make_folder(self.folder)
            clean(self.folder)
            with draft(path) as folder:
                folder.mkdir()
                _write(folder, checkpoint)
                publish(folder, path)
            for old in self._paths()[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)
        return path

    def is_due(self, server_round: int) -> bool:
        return server_round % self.every == 0

    def note_rng_state(self, server_round: int) -> None:
        """Update the generator state of this round's checkpoint, before the next round draws."""
        paths = self._paths()
        if paths and _round_of(paths[-1]) == server_round:
            with _translate_errors(paths[-1]):
                write_text(paths[-1] / _CHANCE, rng_state())

    def read_newest(self) -> Checkpoint | None:
        """Read the newest checkpoint, if any; raises RunError if it cannot be read."""
        paths = self._paths()
        return _read(paths[-1]) if paths else None

    def newest_round(self) -> int:
        """Return the round of the newest checkpoint; 0 if there is none."""
        paths = self._paths()
        return _round_of(paths[-1]) if paths else 0

    def _paths(self) -> list[Path]:
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_round_of)


def _round_of(path: Path) -> int:
    return int(path.name.removeprefix("round-"))


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """Raise RunError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the checkpoint {path} cannot be written ({error}); make room, then resume the run"
        ) from error


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    model = decode_tensors(checkpoint.arrays)
    memories = checkpoint.memories
    arrays = _join({part: memory.arrays for part, memory in memories.items()})
    tensors = _join({part: memory.tensors for part, memory in memories.items()})
    save_tensors({k: v.contiguous() for k, v in model.items()}, folder / _MODEL)
    save_arrays(
        {k: np.ascontiguousarray(v).reshape(v.shape) for k, v in arrays.items()}, folder / _ARRAYS
    )
    save_tensors({k: v.contiguous() for k, v in tensors.items()}, folder / _TENSORS)
    state = {
        "version": VERSION,
        "server_round": checkpoint.server_round,
        "strategy": checkpoint.strategy,
        "keys": list(model),
        "memories": {part: memory.text for part, memory in memories.items()},
    }
    (folder / _STATE).write_text(json.dumps(state))
    (folder / _CHANCE).write_text(checkpoint.rng_state or rng_state())


def _read(folder: Path) -> Checkpoint:
    try:
        state = json.loads((folder / _STATE).read_text())
        if state["version"] != VERSION:
            raise RunError(f"{folder} is of version {state['version']}, this program of {VERSION}")
        model = load_tensors(folder / _MODEL)
        arrays, tensors = load_arrays(folder / _ARRAYS), load_tensors(folder / _TENSORS)
        return Checkpoint(
            server_round=state["server_round"],
            arrays=encode_tensors({key: model[key] for key in state["keys"]}),
            strategy=state["strategy"],
            memories={
                part: ComponentState(
                    text=text, arrays=_select(part, arrays), tensors=_select(part, tensors)
                )
                for part, text in state["memories"].items()
            },
            rng_state=(folder / _CHANCE).read_text(),
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(
            f"the checkpoint {folder} cannot be read ({error}); delete it to use the one before"
        ) from error


def _join(parts: Mapping[str, Mapping[str, Found]]) -> dict[str, Found]:
    return {f"{part}/{key}": value for part, held in parts.items() for key, value in held.items()}


def _select(part: str, joined: Mapping[str, Found]) -> dict[str, Found]:
    prefix = f"{part}/"
    return {k.removeprefix(prefix): v for k, v in joined.items() if k.startswith(prefix)}


def rng_state() -> str:
    """Return the state of Python's, numpy's and torch's generators, as JSON."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": [str(name), np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    return json.dumps(state)


def restore_rng_state(text: str) -> None:
    """Set the generators; raises RunError unless ``text`` came from :func:`rng_state`."""
    try:
        state = json.loads(text)
        version, internal, gauss = state["random"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(state["numpy"]))
        raw = np.frombuffer(base64.b64decode(state["torch"]), dtype=np.uint8)
        torch.set_rng_state(torch.from_numpy(raw.copy()))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"the checkpoint's random state cannot be read: {error}") from error


def encode_state(strategy: Strategy, arrays: Arrays, path: str = "inner") -> dict[str, Any]:
    """Encode the attributes of ``strategy`` as JSON; arrays go into ``arrays`` by their path.

    Functions are left out: only the constructor can set them. Raises RunError for an attribute that
    has no plain form.
    """
    return {
        name: _encode(value, arrays, f"{path}.{name}")
        for name, value in vars(strategy).items()
        if not callable(value)
    }


def select_changed(now: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Select the attributes that changed; those of a wrapped strategy one by one."""
    changed = {}
    for name, value in now.items():
        if _is_kind(value, "strategy"):
            inner = select_changed(value["state"], first.get(name, {}).get("state", {}))
            changed[name] = {**value, "state": inner}
        elif name not in first or value != first[name] or _holds_arrays(value):
            changed[name] = value
    return changed


def restore_state(strategy: Strategy, saved: Mapping[str, Any], arrays: Arrays) -> None:
    for name, value in saved.items():
        if _is_kind(value, "strategy"):
            wrapped = getattr(strategy, name)
            check_same_class(wrapped, value["class"])
            restore_state(wrapped, value["state"], arrays)
        else:
            setattr(strategy, name, _decode(value, arrays))


def check_same_class(strategy: Strategy, saved: str) -> None:
    """Raise RunError unless the checkpoint is of the same kind of strategy."""
    if type(strategy).__name__ != saved:
        raise RunError(
            f"the checkpoint holds the state of {saved}, this run uses {type(strategy).__name__}: "
            "use the same strategy or start anew"
        )


def _encode(value: Any, arrays: Arrays, path: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, bytes):
        arrays[path] = np.frombuffer(value, dtype=np.uint8)
        return {_KIND: "bytes", "path": path}
    if isinstance(value, np.ndarray):
        arrays[path] = value
        return {_KIND: "array", "path": path}
    if isinstance(value, ArrayRecord):
        items = {k: _encode(a.numpy(), arrays, f"{path}.{k}") for k, a in value.items()}
        return {_KIND: "record", "items": items}
    if isinstance(value, Strategy):
        state = encode_state(value, arrays, path)
        return {_KIND: "strategy", "class": type(value).__name__, "state": state}
    return _encode_container(value, arrays, path)


def _encode_container(value: Any, arrays: Arrays, path: str) -> Any:
    if isinstance(value, list | tuple):
        items = [_encode(v, arrays, f"{path}.{i}") for i, v in enumerate(value)]
        if isinstance(value, list):
            return items
        if not hasattr(value, "_fields"):
            return {_KIND: "tuple", "items": items}
        kind = type(value)
        where = {"module": kind.__module__, "class": kind.__qualname__}
        if _find_named_tuple(where) is kind:
            return {_KIND: "named tuple", **where, "items": items}
    if type(value) in _DICTS.values() and all(isinstance(k, _Key) for k in value):
        pairs = [[k, _encode(v, arrays, f"{path}.{k}")] for k, v in value.items()]
        return {_KIND: type(value).__name__, "pairs": pairs}
    raise RunError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "run without checkpoints or with a strategy of plain values"
    )


def _decode(value: Any, arrays: Arrays) -> Any:
    if isinstance(value, list):
        return [_decode(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if value[_KIND] == "array":
        return arrays[value["path"]]
    if value[_KIND] == "bytes":
        return arrays[value["path"]].tobytes()
    if value[_KIND] == "record":
        record = ArrayRecord()
        for key, item in value["items"].items():
            record[key] = Array(np.asarray(_decode(item, arrays)))
        return record
    if value[_KIND] == "tuple":
        return tuple(_decode(v, arrays) for v in value["items"])
    if value[_KIND] == "named tuple":
        if (kind := _find_named_tuple(value)) is None:
            raise RunError(
                f"the checkpoint holds a {value['class']} of {value['module']}, which this run has "
                "not: use the same code or start anew"
            )
        return kind._make(_decode(v, arrays) for v in value["items"])
    return _DICTS[value[_KIND]]({k: _decode(v, arrays) for k, v in value["pairs"]})


def _find_named_tuple(where: Mapping[str, Any]) -> Any:
    """Look up a named tuple's class, None without one; a checkpoint never imports anything."""
    found: Any = sys.modules.get(where["module"])
    for name in where["class"].split("."):
        found = getattr(found, name, None)
    is_named = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_make")
    return found if is_named else None


def _is_kind(value: Any, kind: str) -> bool:
    return isinstance(value, dict) and value.get(_KIND) == kind


def _holds_arrays(value: Any) -> bool:
    """Return whether a value holds arrays: compared by path only, these count as changed."""
    if isinstance(value, list):
        return any(_holds_arrays(v) for v in value)
    if not isinstance(value, dict):
        return False
    return value.get(_KIND) in ("array", "bytes") or any(
        _holds_arrays(v) for k, v in value.items() if k != _KIND
    )
