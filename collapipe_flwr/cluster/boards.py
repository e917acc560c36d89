"""Choice of boards that train a model together, by predicted memory from the costs of plans.

One board is the control unit. The head is on the same board or on one of its own, and the others
hold the blocks. Besides the costs of plans, a process holds its libraries, and glibc's heap keeps
memory between activations; both are fitted to peaks on x86-64 (docs/choosing.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

import numpy as np

from collapipe_flwr.cluster.forecast import ModelChoice, build_model
from collapipe_flwr.core.domain import BlockCost, ModelProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.json_codec import to_plain
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.tables import BlockTable, tabulate_blocks
from collapipe_flwr.costs.work import (
    PricingOptions,
    count_held_bytes,
    count_segment_bytes,
    find_least_flight,
)
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.simulation.devices import PRESETS

LIBRARY_BYTES = 412 * 2**20  # of a process that trains: torch, transformers, grpc
ADAPTER_LIBRARY_BYTES = 53 * 2**20  # peft besides
HEAP_BYTES = 96 * 2**20  # that glibc keeps between tensors, at most as much as the tensors
LEAST_KINDS = ("2gb", "4gb", "8gb")  # for which the least number of boards is reported
_SIZED = re.compile(r"(?:.*-)?(\d+(?:\.\d+)?)gb")
_SYSTEM_SHARE, _SYSTEM_MOST_GIB = 0.25, 1.5  # that the operating system keeps, as in the presets
_GIB = 2**30
_ADAMW_COPIES = 4  # weights, gradients and two moments
_BISECTIONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The memory of one board in bytes; plans may use ``room_bytes``."""

    board: str
    part: str
    frozen_bytes: int
    trained_bytes: int  # weights with gradients and optimizer state
    flight_bytes: int  # activations until their backward pass
    passing_bytes: int
    message_bytes: int = 0  # of a control unit before and after training, when it holds no other
    library_bytes: int  # with what the heap keeps
    room_bytes: int

    @property
    def bytes(self) -> int:
        """The predicted peak of the process."""
        parts = (self.frozen_bytes, self.trained_bytes, self.flight_bytes, self.passing_bytes)
        return max(sum(parts), self.message_bytes) + self.library_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSetting:
    """One way to train: type of frozen weights ("" without any), and shape of a micro-batch."""

    frozen_dtype: str
    length: int
    size: int
    count: int  # micro-batches of a step

    @property
    def words(self) -> str:
        """The setting in words."""
        what = f"adapters over {self.frozen_dtype}" if self.frozen_dtype else "all weights"
        return f"{what}, {self.size} x {self.length} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether boards can train in a ``setting``: their ``loads``, which are empty if they cannot.

    ``least`` is the least number of equal boards that can.
    """

    setting: BoardSetting
    loads: tuple[Load, ...]
    least: dict[str, int | None]  # by kind of board; None where no number does


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The verdicts on ``boards``, in the order of the settings."""

    model: str
    boards: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def fitting(self) -> tuple[Verdict, ...]:
        """The settings in which the boards train the model."""
        return tuple(verdict for verdict in self.verdicts if verdict.loads)

    @property
    def answer(self) -> str:
        """The result in one sentence."""
        who = describe_boards(self.boards)
        if not self.fitting:
            least = self.verdicts[-1].least
            enough = [f"{n} of {kind}" for kind, n in least.items() if n]
            hint = f"; in the last setting {' or '.join(enough)} do" if enough else ""
            return f"{who} do not train {self.model} in any of these settings{hint}"
        first = self.fitting[0]
        fullest = max(first.loads, key=lambda load: load.bytes / load.room_bytes)
        return (
            f"{who} train {self.model} ({first.setting.words}): the fullest, {fullest.board} with "
            f"{fullest.part}, holds {fullest.bytes / _GIB:.2f} of the "
            f"{fullest.room_bytes / _GIB:.2f} GiB that plans may use"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything in bytes, for a file."""
        values: dict[str, Any] = to_plain(self)
        return {**values, "fits": bool(self.fitting), "answer": self.answer}


def survey(
    request: ModelChoice,
    boards: Sequence[str],
    dtypes: Sequence[str],
    lengths: Sequence[int],
    sizes: Sequence[int],
    count: int,
    options: PricingOptions,
) -> Survey:
    """Judge every frozen type (one, if all weights train), length and size of micro-batches."""
    for board in boards:
        find_board_bytes(board)
    verdicts = [
        judge(cut, boards) for cut in make_cuts(request, dtypes, lengths, sizes, count, options)
    ]
    return Survey(model=request.model, boards=tuple(boards), verdicts=tuple(verdicts))


def find_board_bytes(name: str) -> int:
    """Return the bytes that a board has beside its operating system; raises ConfigError."""
    if name in PRESETS:
        return PRESETS[name].memory_bytes
    sized = _SIZED.fullmatch(name)
    if sized is None or not (gib := float(sized[1])):
        raise ConfigError(
            f"--boards: unknown board {name!r}; give one of {', '.join(PRESETS)}, or any name that "
            "ends in its memory, such as raspberry-pi-5-8gb or my-board-4gb"
        )
    return int((gib - min(_SYSTEM_SHARE * gib, _SYSTEM_MOST_GIB)) * _GIB)


def make_cuts(
    request: ModelChoice,
    dtypes: Sequence[str],
    lengths: Sequence[int],
    sizes: Sequence[int],
    count: int,
    options: PricingOptions,
) -> Iterator[Cut]:
    """Yield the model for every frozen type (one, if all weights train), length and size."""
    for dtype, length in product(dtypes if request.lora_rank else ("",), lengths):
        shape = replace(request.shape, source_length=length)
        asked = replace(request, frozen_dtype=dtype or "float32", shape=shape, only_shapes=True)
        model = profile_model(build_model(asked), shape)
        for size in sizes:
            setting = BoardSetting(frozen_dtype=dtype, length=length, size=size, count=count)
            yield Cut(model, setting, options)


def judge(cut: Cut, boards: Sequence[str]) -> Verdict:
    """Predict how ``boards`` share a model, and the least number of equal ones that can."""
    return Verdict(
        setting=cut.setting,
        loads=cut.share(boards),
        least={kind: cut.find_least_number(kind) for kind in LEAST_KINDS},
    )


class Cut:
    """One model and setting, to be shared among boards."""

    def __init__(self, model: ModelProfile, setting: BoardSetting, options: PricingOptions) -> None:
        self._model, self.setting, self._options = model, setting, options
        self._table: BlockTable = tabulate_blocks(model)
        adapters = ADAPTER_LIBRARY_BYTES if setting.frozen_dtype else 0
        self._libraries = LIBRARY_BYTES + adapters
        self._needs: dict[float, Array] = {}

    def share(self, boards: Sequence[str]) -> tuple[Load, ...]:
        """Give parts to boards so that the fullest is emptiest; none if they do not fit."""
        found: tuple[float, tuple[Load, ...]] = (np.inf, ())
        for unit, head in _distinct_ends(boards):
            others = [name for n, name in enumerate(boards) if n not in (unit, head)]
            ends = self.load_ends(boards[unit], boards[head] if head != unit else None)
            if any(load.bytes > load.room_bytes for load in ends):
                continue
            if not (spread := self.spread(others)):
                continue
            loads = (*ends, *spread)
            fullest = max(load.bytes / load.room_bytes for load in loads)
            if fullest < found[0]:
                found = fullest, loads
        return found[1]

    def spread(self, boards: Sequence[str]) -> tuple[Load, ...]:
        """Give all blocks to boards so that the fullest is emptiest; none if they do not fit."""
        if not self._pack(boards, 1.0):
            return ()
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._pack(boards, middle) else (middle, high)
        return self._pack(boards, high)

    def find_least_number(self, board: str) -> int | None:
        """Return the least number of such boards that trains the model."""
        for number in range(2, len(self._model.blocks) + 3):
            for head in (None, board):
                devices = [board] * (number - (1 if head is None else 2))
                ends = self.load_ends(board, head)
                if all(e.bytes <= e.room_bytes for e in ends) and self._pack(devices, 1.0):
                    return number
        return None

    def load_ends(self, unit: str, head: str | None) -> list[Load]:
        """Load the control unit, and the head on it or on a board of its own.

        The message from and to the server has all that trains; while it is read or written, one
        tensor, at most a table of an end, is there as bytes and as numbers.
        """
        model, count = self._model, self.setting.count
        first = (model.embedding, float(find_least_flight(count, 2, self._options)))
        last = (model.decoder, float(find_least_flight(count, 0, self._options)))
        ends = (model.embedding, model.decoder)
        trained = sum(piece.parameter_bytes for piece in (*ends, *model.blocks))
        message = trained + max(end.parameter_bytes for end in ends)
        if head is None:
            both = self._load(unit, "control unit and head", first, last)
            return [replace(both, message_bytes=message)]
        control_unit = self._load(unit, "control unit", first)
        return [replace(control_unit, message_bytes=message), self._load(head, "head", last)]

    def _pack(self, boards: Sequence[str], share: float) -> tuple[Load, ...]:
        """Fill boards up to a share of their memory, from the last block on, the largest last.

        The method is that of `scheduler.model_share.packs`; empty if blocks are left over.
        """
        stop, loads = len(self._model.blocks), list[Load]()
        for name in sorted(boards, key=lambda name: -find_board_bytes(name)):
            flight = float(find_least_flight(self.setting.count, len(loads) + 1, self._options))
            needs = self._segments(flight)[:stop, stop]
            needs = needs + self._libraries + HEAP_BYTES
            starts = np.flatnonzero(needs <= share * self._room(name))
            if not len(starts):
                continue
            start = int(starts[0])
            loads.insert(0, self.load_segment(name, start, stop, flight))
            stop = start
            if not stop:
                return tuple(loads)
        return ()

    def load_segment(self, board: str, start: int, stop: int, flight: float) -> Load:
        """Load a board with blocks ``start`` to ``stop - 1``."""
        part = f"block {start}" if stop == start + 1 else f"blocks {start}-{stop - 1}"
        blocks = [(block, flight) for block in self._model.blocks[start:stop]]
        # Plans count the same passing bytes for all blocks.
        return self._load(board, part, *blocks, passing_bytes=float(self._table.passing_bytes))

    def _segments(self, flight: float) -> Array:
        if flight not in self._needs:
            size = self.setting.size
            self._needs[flight] = count_segment_bytes(self._table, self._options, size, flight)
        return self._needs[flight]

    def _load(
        self, board: str, part: str, *costs: tuple[BlockCost, float], passing_bytes: float = 0.0
    ) -> Load:
        """Load a board with pieces of the model, each with its micro-batches in flight."""
        size = self.setting.size
        trained = sum(_ADAMW_COPIES * cost.parameter_bytes for cost, _ in costs)
        state = sum(cost.state_bytes for cost, _ in costs)
        held = [count_held_bytes(cost, size, count) for cost, count in costs]
        flight = int(sum(float(kept) for kept, _ in held))
        passing = int(max(size * passing_bytes, *(float(once) for _, once in held)))
        return Load(
            board=board,
            part=part,
            frozen_bytes=max(state - trained, 0),
            trained_bytes=min(trained, state),
            flight_bytes=flight,
            passing_bytes=passing,
            library_bytes=self._libraries + min(HEAP_BYTES, flight + passing),
            room_bytes=int(self._room(board)),
        )

    def _room(self, board: str) -> float:
        return (1.0 - self._options.memory_margin) * find_board_bytes(board)


def _distinct_ends(boards: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield places of control unit and head, once for every pair of kinds; they may be equal."""
    seen = set[tuple[str, str, bool]]()
    for unit, head in product(range(len(boards)), repeat=2):
        kind = (boards[unit], boards[head], unit == head)
        if kind not in seen:
            seen.add(kind)
            yield unit, head


def describe_boards(boards: Sequence[str]) -> str:
    """Say ``2 x raspberry-pi-4-4gb and raspberry-pi-5-8gb``."""
    counted = [(name, len(list(group))) for name, group in groupby(sorted(boards))]
    return " and ".join(name if n == 1 else f"{n} x {name}" for name, n in counted)
