"""Link codecs as plans see them: what they leave of an activation's bytes, and what they lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import CODECS

# Bytes over those of single precision; int8 adds a scale of 4 bytes to every 128 elements, fp16
# one to every tensor, which is not counted.
WIRE_SHARE: Mapping[str, float] = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 0.25 + 1 / 128}
# Root mean square error over root mean square, of normally distributed values.
ROUNDING: Mapping[str, float] = {"fp32": 0.0, "fp16": 2.1e-4, "bf16": 1.7e-3, "int8": 6.5e-3}

SHARES = np.array([WIRE_SHARE[name] for name in CODECS])  # by place in CODECS
NOISE = np.array([ROUNDING[name] ** 2 for name in CODECS])  # errors of links add as squares do


def codec_index(name: str) -> int:
    """Place in ``CODECS``; raises ConfigError with the names there are."""
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}: choose one of {', '.join(CODECS)}")
    return CODECS.index(name)


def ladder(names: Sequence[str]) -> tuple[int, ...]:
    """The codecs worth choosing between, the least lossy first: each smaller than those before."""
    steps: list[int] = []
    for index in sorted({codec_index(name) for name in names}):
        if not steps or SHARES[index] < SHARES[steps[-1]]:
            steps.append(index)
    return tuple(steps)
