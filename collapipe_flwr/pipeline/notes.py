"""Notes of the frames that a stage took and gave; an audit compares them to find a wrong stage.

A note of a frame has two parts: a digest of every byte, and a short sketch. Sketches of tensors
that differ by rounding only, as on two kinds of machines, are close to each other.
"""

from __future__ import annotations

import base64
import json
import platform
from collections.abc import Iterator
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from collapipe_flwr.core.measurements import MOST_NOTES
from collapipe_flwr.pipeline.compute import describe
from collapipe_flwr.pipeline.link import HIDDEN, Frame, FrameKind

DIGEST_BYTES, SKETCH_SIZE = 12, 8
TAKEN, GIVEN = "taken", "given"
# The frames of a step in the order in which one causes the next: kind, and whether down the chain.
CAUSES = (
    (FrameKind.BEGIN, True),
    (FrameKind.ROWS, False),
    (FrameKind.ACTIVATION, True),
    (FrameKind.GRADIENT, False),
    (FrameKind.ROWS, True),
    (FrameKind.TOTALS, False),
    (FrameKind.COMMIT, True),
)
_MOST_SIGNS = 16  # sizes of tensors whose signs are kept


class FrameNotes:
    """The notes of one stage, by step, cause (see `CAUSES`) and side of the stage."""

    def __init__(self) -> None:
        self._notes: dict[str, _Note] = {}

    def add(self, side: str, frame: Frame, *, down: bool) -> None:
        """Note a frame that was ``TAKEN`` or ``GIVEN``; other kinds than causes are left out."""
        if (frame.kind, down) in CAUSES:
            key = make_note_key(frame.step, CAUSES.index((frame.kind, down)), side)
            if len(self._notes) < MOST_NOTES or key in self._notes:  # a longer audit is refused
                self._notes.setdefault(key, _Note()).add(frame)

    def encode(self) -> dict[str, str]:
        """All notes so far, as text that a report holds."""
        return {key: note.encode() for key, note in self._notes.items()}


def make_note_key(step: int, cause: int, side: str) -> str:
    """Return the key of a note in a report."""
    return f"{step}/{cause}/{side}"


def agree(told: str, due: str, tolerance: float) -> bool:
    """Return whether a note says the same as another, up to ``tolerance`` relative (0: exactly).

    Text that is not a note agrees with no note.
    """
    if not tolerance or told == due:
        return told == due
    try:
        (passed, found), (same, wanted) = _read(told), _read(due)
    except ValueError:
        return False
    near = bool((found - wanted).norm() <= tolerance * wanted.norm())
    return passed == same and near


def _read(text: str) -> tuple[bytes, Tensor]:
    """Return the digest of what is passed on, and the sketch; raises ValueError for no note."""
    raw = bytearray(base64.b64decode(text, validate=True))
    if len(raw) != 2 * DIGEST_BYTES + 4 * SKETCH_SIZE:
        raise ValueError("no note")
    sketch = torch.frombuffer(raw, dtype=torch.float32, offset=2 * DIGEST_BYTES)
    return bytes(raw[:DIGEST_BYTES]), sketch


class _Note:
    """All frames of one kind in one step: digests of what is only passed on, and of what is new."""

    def __init__(self) -> None:
        self._passed, self._made = (blake2b(digest_size=DIGEST_BYTES) for _ in range(2))
        self._sketch = torch.zeros(SKETCH_SIZE, dtype=torch.float64)

    def add(self, frame: Frame) -> None:
        passes = frame.kind in (FrameKind.BEGIN, FrameKind.ACTIVATION)
        scalars = [(name, float(value)) for name, value in sorted(frame.scalars.items())]
        digest = self._passed if passes else self._made
        digest.update(json.dumps([frame.micro_batch, scalars]).encode())
        numbers = []
        for name, tensor in sorted(frame.tensors.items()):
            flat = tensor.detach().contiguous().reshape(-1)
            is_passed = not flat.is_floating_point() or (passes and name != HIDDEN)
            digest = self._passed if is_passed else self._made
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(flat.view(torch.uint8).numpy().data)
            if not is_passed:
                numbers.append(flat)
        if not (numbers or passes):
            numbers = [torch.tensor([value for _, value in scalars], dtype=torch.float64)]
        for each in numbers:
            self._sketch += _sketch(each)

    def encode(self) -> str:
        sketch = self._sketch.to(torch.float32).numpy().tobytes()
        return base64.b64encode(self._passed.digest() + self._made.digest() + sketch).decode()


def _sketch(flat: Tensor) -> Tensor:
    """Sum up numbers with random signs: its relative change is about that of the numbers.

    The sums are of doubles, so that a large tensor is not rounded more than a small one.
    """
    rest = -flat.numel() % SKETCH_SIZE
    signed = torch.nn.functional.pad(flat.to(torch.float64), (0, rest)) * _draw_signs(
        flat.numel() + rest
    )
    return signed.view(-1, SKETCH_SIZE).sum(0)


@lru_cache(maxsize=_MOST_SIGNS)
def _draw_signs(count: int) -> Tensor:
    random = torch.Generator().manual_seed(count)
    return torch.randint(0, 2, (count,), generator=random, dtype=torch.int8) * 2 - 1


@cache
def describe_rounding(place: torch.device) -> str:
    """Describe what decides how a machine rounds: equal descriptions mean equal bits."""
    build = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    threads = f"{torch.get_num_threads()} threads"
    machine = f"{platform.machine()}, {next(_list_processors(), '')}"
    return f"{machine}, {build}, {threads}, {describe(place)}"


def _list_processors() -> Iterator[str]:
    """Yield the names of this machine's processors, as far as Linux tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "CPU part"):
            yield value.strip()
