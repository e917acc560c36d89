"""Bandwidth with which clusters at full power end their rounds together.

The radio's program counts every hop as part of a round. Under 1F1B most hops are hidden behind
computing, so that its bandwidths suit no cluster. At full power the length of a
cluster's round depends on its own bandwidth alone, falls with it, and is cheap to tell.
"""

from __future__ import annotations

import numpy as np

from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import Chain, compute_full_power_times, compute_latency_s
from collapipe_flwr.costs.radio import compute_send_time_s

FACTORS = (  # of bandwidths, at which rounds are timed: widely first, then near what was found
    np.geomspace(0.125, 8.0, 7),
    np.geomspace(0.8, 1.25, 5),
    np.geomspace(0.98, 1.02, 3),
)
BISECTIONS = 20
SAME = 1e-9  # relative difference of latencies below which they count as equal


def equalize_hz(chain: Chain, hz_m: Array, bandwidth_hz: float) -> Array:
    """Find bandwidths near ``hz_m`` with which the slowest cluster ends as early as it can, (M,).

    Rounds of 1F1B are taken to last as long as their lower bound.
    """
    for factors in FACTORS:
        hz_fm = factors[:, None] * hz_m
        hz_m = _equalize_ends(_compute_latency_fm(chain, hz_fm), hz_fm, bandwidth_hz)
    return hz_m


def _compute_latency_fm(chain: Chain, hz_fm: Array) -> Array:
    """Compute latencies with each of these bandwidths, which only the hop to the edge uses."""
    hops, every = chain.hops, np.arange(len(chain.rows))
    last = hops.to_edge.argmax(1)
    snr = chain.power_max_w[every, last] / chain.noise_over_gain[every, last, None]
    times = np.tile(compute_full_power_times(chain, hz_fm[0]), (len(hz_fm), 1, 1, 1))
    shared, own_hz = hops.shared[every, last], chain.d2d_hz_rh[every, last]
    width = np.where(shared, hz_fm, own_hz)[:, :, None]
    times[:, every, last] = compute_send_time_s(hops.bits[every, last, None], width, snr)
    return compute_latency_s(chain, times)


def _equalize_ends(late_fm: Array, hz_fm: Array, bandwidth_hz: float) -> Array:
    """Equalize ends over rising bandwidths ``hz_fm`` where rounds last ``late_fm`` seconds."""
    low, high = float(late_fm[-1].max()), float(late_fm[0].max())
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        if _find_needed_hz(late_fm, hz_fm, middle).sum() > bandwidth_hz:
            low = middle
        else:
            high = middle
    hz_m = _find_needed_hz(late_fm, hz_fm, high)
    return np.asarray(hz_m * (bandwidth_hz / hz_m.sum()))


def _find_needed_hz(late_fm: Array, hz_fm: Array, late_s: float) -> Array:
    """Return the bandwidths needed to end within ``late_s``, interpolated between logarithms."""
    places = np.arange(hz_fm.shape[1])
    behind = np.minimum((late_fm > late_s * (1.0 + SAME)).sum(0), len(hz_fm) - 1)
    before = np.maximum(behind - 1, 0)
    slow, quick = late_fm[before, places], late_fm[behind, places]
    part = np.clip((slow - late_s) / np.maximum(slow - quick, SAME), 0.0, 1.0)
    less, more = hz_fm[before, places], hz_fm[behind, places]
    return np.asarray(less * (more / less) ** part)
