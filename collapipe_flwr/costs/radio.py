"""Links and payloads: the codec's share and rounding; time, power and energy (Shannon).

A payload of ``A`` bits sent in time ``t`` over bandwidth ``w`` needs the power
``p = (N0 w / g) (2^(A / (t w)) - 1)`` (Shannon 1948); its energy ``p t`` depends on the product
``t w`` only. Gains are linear, noise is a density. All arguments broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import CODECS, TOP_K
from collapipe_flwr.costs.arrays import Array

LN2 = float(np.log(2.0))
_EXPONENT_MAX = 500.0  # exp beyond this is treated as infinitely expensive without overflow

# Bytes over those of single precision; int8 adds a scale of 4 bytes to every 128 elements, int4
# one of 2 to every 64, fp16 one to every tensor, which is not counted; top-k sends one element
# of 4 as int4 does, and a bit for each.
WIRE_SHARE: Mapping[str, float] = {
    "fp32": 1.0,
    "fp16": 0.5,
    "bf16": 0.5,
    "int8": 0.25 + 1 / 128,
    "int4": 0.125 + 1 / 128,
    TOP_K: 1 / 32 + (0.125 + 1 / 128) / 4,
}
# Root mean square error over root mean square, of normally distributed values.
ROUNDING: Mapping[str, float] = {
    "fp32": 0.0,
    "fp16": 2.1e-4,
    "bf16": 1.7e-3,
    "int8": 6.5e-3,
    "int4": 1.08e-1,
}

SHARES = np.array([WIRE_SHARE[name] for name in CODECS])  # by place in CODECS
NOISE = np.array([ROUNDING[name] ** 2 for name in CODECS])  # errors of links add as squares do


def find_codec(name: str) -> int:
    """Return the place in ``CODECS``; raises ConfigError with the names there are."""
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}: choose one of {', '.join(CODECS)}")
    return CODECS.index(name)


def rank_codecs(names: Sequence[str]) -> tuple[int, ...]:
    """Rank codecs worth a choice, the least lossy first: each is smaller than those before."""
    steps: list[int] = []
    for index in sorted({find_codec(name) for name in names}):
        if not steps or SHARES[index] < SHARES[steps[-1]]:
            steps.append(index)
    return tuple(steps)


def compute_rate_bit_per_s(bandwidth_hz: ArrayLike, snr_w: ArrayLike) -> Array:
    """Compute the rate ``w log2(1 + p g / (w N0))``; ``snr_w`` is ``p g / N0`` in Hz."""
    width = np.asarray(bandwidth_hz, dtype=np.float64)
    return width * np.log1p(np.asarray(snr_w) / width) / LN2


def compute_send_time_s(bits: ArrayLike, bandwidth_hz: ArrayLike, snr_w: ArrayLike) -> Array:
    """Compute the seconds that ``bits`` take at full use of the link."""
    return np.asarray(bits, dtype=np.float64) / compute_rate_bit_per_s(bandwidth_hz, snr_w)


def compute_power_w(
    bits: ArrayLike, bandwidth_hz: ArrayLike, noise_over_gain: ArrayLike, time_s: ArrayLike
) -> Array:
    """Compute the power that sends ``bits`` in exactly ``time_s`` (``noise_over_gain`` = N0/g)."""
    width = np.asarray(bandwidth_hz, dtype=np.float64)
    exponent = LN2 * np.asarray(bits) / (np.asarray(time_s) * width)
    return np.asarray(noise_over_gain) * width * np.expm1(np.minimum(exponent, _EXPONENT_MAX))


def solve_exponent(ratio: ArrayLike) -> Array:
    """Solve ``e^z (z - 1) + 1 = ratio`` for ``z >= 0`` (z = 1 + W((ratio - 1) / e)).

    A payload of A bits costs least in ``s t + energy(t)`` at ``t = A ln2 / (w z)``, with
    ``ratio = s g / (N0 w)``.

    Newton in ``ln`` form from a bracketed start; ratio 0 gives a tiny positive z.
    """
    value = np.clip(np.asarray(ratio, dtype=np.float64), 1e-18, 1e100)
    small = np.sqrt(2.0 * value)
    grown = np.log1p(value)
    z = np.where(value < 1.0, small / (1.0 + small / 3.0), grown)
    for _ in range(6):
        f, slope = _evaluate_log(z)
        z = np.maximum(z - (f - np.log(value)) / slope, z * 0.1)
    return z


GRID_FROM, GRID_TO, GRID_STEPS = -40.0, 92.0, 20_000  # ln of the ratios that a table covers


@lru_cache(maxsize=1)
def _tabulate_exponent() -> tuple[Array, Array]:
    """Tabulate ``solve_exponent`` and its logarithm at even steps of ln(ratio)."""
    exponent = solve_exponent(np.exp(np.linspace(GRID_FROM, GRID_TO, GRID_STEPS + 1)))
    return exponent, np.log(exponent)


def _find_place(log_ratio: Array) -> Array:
    return (log_ratio - GRID_FROM) * (GRID_STEPS / (GRID_TO - GRID_FROM))


def interpolate_exponent(log_ratio: Array) -> Array:
    """Interpolate ``solve_exponent`` of ``exp(log_ratio)``, to about 1e-5 relative."""
    exponent, _ = _tabulate_exponent()
    place = np.clip(_find_place(log_ratio), 0.0, GRID_STEPS - 1e-6)
    whole = place.astype(np.intp)
    below = exponent.take(whole)
    return np.asarray(below + (place - whole) * (exponent.take(whole + 1) - below))


def look_up_log_exponent(log_ratio: Array) -> Array:
    """Look up the logarithm of ``interpolate_exponent`` at the nearest entry: to about 0.3 %."""
    place = (_find_place(log_ratio) + 0.5).astype(np.intp)
    return np.asarray(_tabulate_exponent()[1].take(place, mode="clip"))


def _evaluate_log(z: Array) -> tuple[Array, Array]:
    """Evaluate ``ln(e^z (z - 1) + 1)`` and its derivative ``z e^z / (e^z (z - 1) + 1)``."""
    series = z * z * (0.5 + z / 3.0 + z * z / 8.0)
    big = np.minimum(z, _EXPONENT_MAX)
    direct = np.exp(big) * (big - 1.0) + 1.0
    body = np.where(z < 1e-2, series, direct)
    return np.log(body), z * np.exp(big) / body
