"""Channels: where members stand, what the path loses, and how that changes over rounds.

Free-space loss at one metre, then a power law with distance (Rappaport, Wireless Communications,
log-distance model). Models: ``static``; ``block-fading`` multiplies every link by a unit-mean
exponential each round (Rayleigh); ``mobility`` moves members on circles; ``trace`` replays gains
relative to the static ones. Everything is a pure function of (seed, round).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collapipe_flwr.core.domain import ChannelState
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.costs.arrays import Array

LIGHT_M_PER_S = 2.998e8
NEAREST_M = 1.0
FADE_FLOOR = 1e-2  # links that fade deeper than 20 dB are retried within the round
PERIOD_ROUNDS = 40.0
CHANNEL_MODELS = ("static", "block-fading", "mobility", "trace:FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPositions:
    """Positions in metres relative to the edge's antenna; member 0 is the control unit."""

    cluster_id: str
    member_m: Array  # (members, 2)
    orbit_m: Array  # (members,) radius of each member's movement
    carrier_hz: float
    exponent: float


ChannelModel = Callable[[MemberPositions, int, int], ChannelState]
"""The gains of one cluster by seed and round; equal arguments give equal results."""


def static(placement: MemberPositions, seed: int, round_index: int) -> ChannelState:
    """Apply path loss only: the same gains in every round."""
    del seed, round_index
    return _make_state(*_compute_gains(placement, placement.member_m))


def block_fading(placement: MemberPositions, seed: int, round_index: int) -> ChannelState:
    """Apply Rayleigh fading, independent by round: path loss times exponential fades."""
    d2d, edge = _compute_gains(placement, placement.member_m)
    rng = _make_rng(placement, seed, round_index)
    fade = np.maximum(rng.exponential(size=d2d.shape), FADE_FLOOR)
    fade = np.triu(fade) + np.triu(fade, 1).T
    fade_edge = np.maximum(rng.exponential(size=edge.shape), FADE_FLOOR)
    return _make_state(d2d * fade, edge * fade_edge)


def mobility(placement: MemberPositions, seed: int, round_index: int) -> ChannelState:
    """Apply path loss to members that circle around their places in ``PERIOD_ROUNDS``."""
    phases = _make_rng(placement, seed, 0).uniform(0.0, 2.0 * math.pi, len(placement.orbit_m))
    angle = phases + 2.0 * math.pi * round_index / PERIOD_ROUNDS
    offset = placement.orbit_m[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return _make_state(*_compute_gains(placement, placement.member_m + offset))


def trace(factors: Sequence[float]) -> ChannelModel:
    """Multiply path loss by recorded factors, one per round, from the start again at the end."""

    def state(placement: MemberPositions, seed: int, round_index: int) -> ChannelState:
        del seed
        d2d, edge = _compute_gains(placement, placement.member_m)
        factor = factors[(round_index - 1) % len(factors)]
        return _make_state(d2d * factor, edge * factor)

    return state


def channel_model(name: str) -> ChannelModel:
    """Find ``static``, ``block-fading``, ``mobility`` or ``trace:FILE``; raises ConfigError.

    The file holds a JSON list of positive factors.
    """
    plain = {"static": static, "block-fading": block_fading, "mobility": mobility}
    if name in plain:
        return plain[name]
    if name.startswith("trace:"):
        return trace(_read_trace(Path(name.removeprefix("trace:"))))
    raise ConfigError(f"unknown channel {name!r}: choose one of {', '.join(CHANNEL_MODELS)}")


def _read_trace(path: Path) -> tuple[float, ...]:
    try:
        factors = [float(value) for value in json.loads(path.read_text())]
    except OSError as error:
        raise ConfigError(
            f"channel trace {str(path)!r} cannot be read ({error.strerror}): correct its path"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"channel trace {str(path)!r} is no JSON list of numbers") from error
    if not factors or not all(math.isfinite(f) and f > 0 for f in factors):
        raise ConfigError(f"channel trace {str(path)!r} needs at least one factor, all > 0")
    return tuple(factors)


def _make_rng(placement: MemberPositions, seed: int, round_index: int) -> np.random.Generator:
    return np.random.default_rng([seed, round_index, *map(ord, placement.cluster_id)])


def _compute_gains(placement: MemberPositions, member_m: Array) -> tuple[Array, Array]:
    apart = np.linalg.norm(member_m[:, None, :] - member_m[None, :, :], axis=2)
    return _compute_loss(placement, apart), _compute_loss(
        placement, np.linalg.norm(member_m, axis=1)
    )


def _compute_loss(placement: MemberPositions, metres: Array) -> Array:
    at_one = (LIGHT_M_PER_S / (4.0 * math.pi * placement.carrier_hz)) ** 2
    return np.asarray(at_one * np.maximum(metres, NEAREST_M) ** -placement.exponent)


def _make_state(d2d: Array, edge: Array) -> ChannelState:
    return ChannelState(d2d_gain=tuple(map(tuple, d2d.tolist())), edge_gain=tuple(edge.tolist()))
