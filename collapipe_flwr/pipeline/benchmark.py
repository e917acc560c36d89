"""Training speed of this machine: timed forward and backward passes of one transformer block."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from collapipe_flwr.core import bounds
from collapipe_flwr.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

_MOST = {"width": 4096, "tokens": 2048, "examples": 128, "seconds": 30.0}
_MOST_ELEMENTS = 2**22  # 16 MB a tensor: a member may not fill the memory of another
_HEAD_WIDTH = 32
_LEAST_REPEATS, _MOST_REPEATS = 3, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRequest:
    """The block, its batch, and for how long to repeat it."""

    width: int = 256
    tokens: int = 64
    examples: int = 8
    seconds: float = 1.0

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 0 < value <= most:
                raise ConfigError(f"{name} of a benchmark must be > 0 and <= {most:g}, got {value}")
        if self.width * self.tokens * self.examples > _MOST_ELEMENTS:
            raise ConfigError(
                f"width x tokens x examples of a benchmark must be <= {_MOST_ELEMENTS}, got "
                f"{self.width * self.tokens * self.examples}"
            )
        if self.width % _HEAD_WIDTH:
            raise ConfigError(f"width must be a multiple of {_HEAD_WIDTH}, got {self.width}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkAnswer:
    """The `flop` and `seconds` of one forward and backward pass, and the memory free before it.

    It ran on the device that `computes` names, with the installed build of `torch`.
    """

    flop: bounds.Work
    seconds: bounds.Duration
    memory_bytes: bounds.Bytes
    computes: bounds.Text = ""
    torch: bounds.Text = ""

    @property
    def speed_flop_per_s(self) -> float:
        return self.flop / self.seconds


def run_benchmark(
    request: BenchmarkRequest,
    place: torch.device | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> BenchmarkAnswer:
    """Time the mean of some repeats after one warm-up, on `place` (None: the CPU).

    It uses as many threads as training. Under a CPU quota, as in a container, a pass runs at full
    speed or waits for the next period: training gets the mean, and the median would be one of both.
    """
    import torch
    from torch import nn

    from collapipe_flwr.pipeline.compute import (
        CPU,
        describe,
        describe_torch,
        finish,
        measure_free_bytes,
        use_one_thread,
    )

    place = place or CPU
    memory_bytes = measure_free_bytes(place)
    block = nn.TransformerEncoderLayer(
        request.width,
        request.width // _HEAD_WIDTH,
        4 * request.width,
        dropout=0.0,
        batch_first=True,
        device=place,
    )
    shape = (request.examples, request.tokens, request.width)
    hidden_BTD = torch.randn(shape, device=place, requires_grad=True)

    def once() -> float:
        start_s = clock()
        with use_one_thread(place):
            block(hidden_BTD).square().mean().backward()
        finish(place)
        return clock() - start_s

    once()
    until_s, times = clock() + request.seconds, [once()]
    while len(times) < _LEAST_REPEATS or (clock() < until_s and len(times) < _MOST_REPEATS):
        times.append(once())
    return BenchmarkAnswer(
        flop=count_block_flop(request),
        seconds=fmean(times),
        memory_bytes=memory_bytes,
        computes=describe(place),
        torch=describe_torch(),
    )


def count_block_flop(request: BenchmarkRequest) -> float:
    """Count the FLOP of a forward and backward pass; backward takes twice as many.

    These are the matrix products of attention (4 d^2), MLP (8 d^2) and scores (2 T d).
    """
    width, tokens = request.width, request.tokens
    forward = 2.0 * request.examples * tokens * (12 * width**2 + 2 * tokens * width)
    return 3.0 * forward
