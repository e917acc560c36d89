"""The state that a cluster keeps from one round to the next, in its own files or in Flower's state.

The result of a round is pending until a later order names that round as the last accepted one; the
cluster continues from exactly that round, whatever it has trained since. A resumed run repeats the
rounds after its checkpoint, so the files that the server's checkpoints need are kept, too.

There is one file per order in a folder per run and cluster, readable by its owner only: a cluster
may still carry out an old order for a round that the server has repeated. A file is moved to its
place once it is on disk, and one that it replaces is deleted after that; its name ends with the
SHA-256 of its bytes, which detects damage.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Generic, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from safetensors import SafetensorError
from torch import Tensor

from collapipe_flwr.core.durable import clean, draft, make_folder, publish
from collapipe_flwr.core.errors import CollaPipeError, ConfigError, ModelError
from collapipe_flwr.federation.accepted import Progress
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.client import STATE_KEY
from collapipe_flwr.pipeline.offload import LazyMapping, read_tensors, write_tensors
from collapipe_flwr.pipeline.state import OptimizerState, PartState

log = logging.getLogger("flwr.collapipe")
_NAME = re.compile(r"round-(\d{6,})(?:-([0-9a-f]{8}))?-([0-9a-f]{64})")
T = TypeVar("T")
Record = ArrayRecord | ConfigRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCodec(Generic[T]):
    """One kind of state: how it is written to a file, and to a record of Flower's.

    ``read`` raises a CollaPipeError for another file; ``decode`` returns None for another record.
    """

    name: str
    suffix: str
    write: Callable[[T, Path], object]
    read: Callable[[Path], T]
    encode: Callable[[T], Record]
    decode: Callable[[Record], T | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The state of cluster number ``index`` in one round of a run.

    Files in ``state_dir`` survive a restart of the SuperNode and are used by a resumed run. Without
    one, Flower's ``records`` hold the state, which ends with the SuperNode or the run.
    """

    records: RecordDict
    server_round: int
    progress: Progress
    run_id: str
    index: int
    state_dir: Path | None
    attempt: int = 0  # of the orders for this round

    def recall(self, kept: StateCodec[T]) -> T | None:
        """Return the result of the last accepted round, if it can be read."""
        if files := self._round_files(kept):
            files.drop_outdated(self.progress.needed)
            return files.recall(self.progress.last_round, kept.read, self.progress.attempt)
        record = self._keep_accepted(kept.name)
        return None if record is None else kept.decode(record)

    def remember(self, kept: StateCodec[T], value: T) -> None:
        """Keep the result of this round beside that of the last accepted one."""
        if files := self._round_files(kept):
            write = partial(kept.write, value)
            files.remember(self.server_round, write, self.attempt)
        else:
            self.records[_key(kept.name, self.server_round, self.attempt)] = kept.encode(value)

    @property
    def advice(self) -> str:
        """How to keep missing state next time; empty if it was kept in files."""
        return "" if self.state_dir else f"; {STATE_KEY} in --node-config would keep it"

    def _round_files(self, kept: StateCodec[T]) -> StateFiles | None:
        if self.state_dir is None:
            return None
        return StateFiles.of(self.state_dir, self.run_id, self.index, kept.suffix)

    def _keep_accepted(self, name: str) -> Record | None:
        """Return the record of the last accepted round; drops all others."""
        accepted = _key(name, self.progress.last_round, self.progress.attempt)
        for key in [key for key in self.records if key.startswith(name) and key != accepted]:
            del self.records[key]
        found = self.records.get(accepted)
        return found if isinstance(found, ArrayRecord | ConfigRecord) else None


def recall_optimizer(state: NodeState) -> OptimizerState:
    """Return all parts' optimizer state of the last accepted round; empty for a fresh optimizer."""
    slots = state.recall(OPTIMIZER)
    if slots is None and state.progress.rounds:
        log.warning(
            "no optimiser state of an earlier round here (a new SuperNode, or a resumed "
            "run): it starts anew%s",
            state.advice,
        )
    return slots or {}


def write_slots(slots: OptimizerState, path: Path) -> None:
    """Write optimizer state as one safetensors file."""
    write_tensors(PartState(weights={}, optimizer=slots).flatten(), path)


def read_slots(path: Path) -> OptimizerState:
    """Read a file of `write_slots`; raises ModelError for another file."""
    return PartState.from_tensors(_read_file(path)).optimizer


def _read_file(path: Path) -> LazyMapping[Tensor]:
    try:
        return read_tensors(path)
    except SafetensorError as error:
        raise ModelError(str(error)) from error


def _decode_slots(record: Record) -> OptimizerState | None:
    if not isinstance(record, ArrayRecord):
        return None
    return PartState.from_tensors(decode_tensors(record)).optimizer


def _key(name: str, server_round: int, attempt: int) -> str:
    return f"{name}.{_order_name(server_round, attempt)}"


def _order_name(server_round: int, attempt: int) -> str:
    """Name the files and records of an order; those without a number are of older versions."""
    return f"round-{server_round:06d}" + (f"-{attempt:08x}" if attempt else "")


OPTIMIZER: StateCodec[OptimizerState] = StateCodec(
    name="collapipe.optimizer",
    suffix=".safetensors",
    write=write_slots,
    read=read_slots,
    encode=lambda slots: encode_tensors(PartState(weights={}, optimizer=slots).flatten()),
    decode=_decode_slots,
)

UPDATE_ERRORS: StateCodec[Mapping[str, Tensor]] = StateCodec(  # of coded replies, see `updates`
    name="collapipe.update-errors",
    suffix=".errors",
    write=write_tensors,
    read=_read_file,
    encode=encode_tensors,
    decode=lambda record: decode_tensors(record) if isinstance(record, ArrayRecord) else None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFiles:
    """The files with one ``suffix`` of one cluster in one run."""

    folder: Path
    suffix: str

    @staticmethod
    def of(state_dir: Path, run_id: str, place: int, suffix: str) -> StateFiles:
        """Return the files of cluster number ``place``; ``run_id`` may be any text."""
        run = sha256(run_id.encode()).hexdigest()[:32]
        return StateFiles(folder=state_dir / run / f"cluster-{place}", suffix=suffix)

    def recall(self, accepted: int, load: Callable[[Path], T], attempt: int = 0) -> T | None:
        """Return the result of the last accepted round, to the order ``attempt``, if readable.

        Files of other orders since, which the global model does not contain, are deleted. A file
        that is damaged, or that ``load`` refuses with a CollaPipeError, is named in the log.
        """
        kept = None
        for path, done, order in self._list_files():
            if (done, order) == (accepted, attempt):
                kept = path
            elif done >= accepted:
                path.unlink(missing_ok=True)
        return None if kept is None else _read(kept, load)

    def drop_outdated(self, needed: Collection[int]) -> None:
        """Delete the results of rounds before the newest of those still ``needed``, but for these.

        A new order does it, not the end of one, which may be an old order that was given up.
        """
        for path, done, _ in self._list_files():
            if done < max(needed) and done not in needed:
                path.unlink(missing_ok=True)

    def remember(self, server_round: int, save: Callable[[Path], object], attempt: int = 0) -> None:
        """Keep the result of this order beside those of other rounds.

        Nothing is kept if a later round has begun from the same files: the server has given this
        one up. Raises ConfigError when the file cannot be written.
        """
        try:
            if any(done > server_round for _, done, _ in self._list_files()):
                return
            for folder in (self.folder.parents[1], self.folder.parent, self.folder):
                make_folder(folder, 0o700)
            clean(self.folder)
            kept = self._write(_order_name(server_round, attempt), save)
            for path, done, order in self._list_files():
                if path != kept and (done, order) == (server_round, attempt):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f'state-dir: "{self.folder}" cannot be written: {error}') from error

    def _write(self, order: str, save: Callable[[Path], object]) -> Path:
        with draft(self.folder / f"{order}{self.suffix}") as written:
            save(written)
            written.chmod(0o600)
            with written.open("rb") as file:
                digest = file_digest(file, "sha256").hexdigest()
            path = self.folder / f"{order}-{digest}{self.suffix}"
            publish(written, path)
        return path

    def _list_files(self) -> Iterator[tuple[Path, int, int]]:
        """Yield the files with their rounds and orders."""
        paths = sorted(self.folder.iterdir()) if self.folder.is_dir() else ()
        for path in paths:
            named = _NAME.fullmatch(path.stem)
            if named and path.suffix == self.suffix:
                yield path, int(named[1]), int(named[2] or "0", 16)


def _read(path: Path, load: Callable[[Path], T]) -> T | None:
    named = _NAME.fullmatch(path.stem)
    assert named is not None
    try:
        with path.open("rb") as file:
            if file_digest(file, "sha256").hexdigest() != named[3]:
                raise ConfigError("its bytes are not those that were written")
        return load(path)
    except (OSError, CollaPipeError) as error:
        log.error("%s cannot be read: %s", path, error)
        return None
