"""Lower bounds on a cluster's round under any plan, and on its average within energy budgets.

Derived in docs/theory.md, section 10, for plans that give every device at most one contiguous
segment. A stage works J times; before, the first micro-batch has passed the stages ahead of it, and
after, the last gradient passes them. With y_k the seconds of device k per micro-batch, both passes,
and h those of the quickest hop between devices, any order of actions takes a step of at least

    ends + max_k ( J y_k + sum_{i < k} (y_i + h) ),        the edge being the last stage.

The least of this over all orders of devices and cuts is a shortest path over (devices used, blocks
covered). Within energy budgets, the seconds of a round plus its priced joules bound the average, at
any prices of energy. Suffixes: ``_p`` pair of micro-batch size and count, ``_g`` step length,
``_n`` device, ``_r`` round. Work is in FLOP per example, both passes of the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.layouts import sum_spans
from collapipe_flwr.costs.radio import SHARES, compute_send_time_s
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import (
    OPTIMISER_FLOP_PER_BYTE,
    PricingOptions,
    compute_edge_speeds,
    compute_server_s,
    count_local_steps,
    count_segment_bytes,
    count_share_bytes,
)

EXACT = 1e-3  # relative width to which the least step is enclosed; its lower end counts
LONGER = 1.01 ** np.arange(80)  # multiples of the least step at which energy is priced
MOST_DEVICES = 9  # up to so many, all orders are tried
ASCENTS = 150  # of the prices of energy
FIRST_STEP = 0.3  # of the unpriced bound, in seconds for a whole budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Air:
    """The quickest radio of one round; seconds per example of a micro-batch, both ways."""

    first_s: float  # from the control unit to some device
    between_s: float  # from one device to another
    last_s: float  # from some device to the edge
    fixed_s: float  # of the round: server, weights handed out and collected


class ClusterBound:
    """Cluster ``m`` of snapshots that differ in their channels alone, one per round.

    Memories are those of the first of ``rounds``, with the caps that plans must keep. Raises
    ValueError for no rounds.
    """

    def __init__(
        self, rounds: Sequence[Tables], m: int, options: PricingOptions, batches: Ints
    ) -> None:
        if not rounds:
            raise ValueError("a bound needs at least one round")
        tables = rounds[0]
        members = tables.members
        self.batches = batches
        self._blocks, self._options = tables.blocks.of(int(tables.model_m[m])), options
        self._tables, self._cluster = tables, m
        here = np.flatnonzero(members.present_mi[m, 1:]) + 1
        self.speed_n = members.speed_mi[m, here]
        self.joule_n = members.energy_per_flop_mi[m, here]
        self.budget_n = members.budget_mi[m, here]
        self._room_n = (1.0 - options.memory_margin) * members.memory_mi[m, here]
        self._first_n = members.first_mi[m, here]
        again = 1.0 + float(options.recompute)
        self._flop = sum_spans(again * self._blocks.forward_flop_l + self._blocks.backward_flop_l)
        self.air_r = [_time_air(each, m, here) for each in rounds]
        speed = (float(members.speed_mi[m, 0]), float(compute_edge_speeds(tables, options)[m]))
        parts = [end.of(m) for end in tables.ends]
        flops = [part.forward_flop + part.backward_flop for part in parts]
        self._control_s, self._edge_s = (float(f / c) for f, c in zip(flops, speed, strict=True))
        updates_s = sum(part.trained_bytes / c for part, c in zip(parts, speed, strict=True))
        updates_s += self._blocks.trained_bytes_l[-1] / self.speed_n.max()
        size_p, count_p = batches[:, 0].astype(float), batches[:, 1].astype(float)
        steps_p = count_local_steps(np.asarray(tables.examples_m[m]), size_p * count_p)
        self._examples_p, self._singles_p = steps_p * size_p * count_p, steps_p * size_p
        self._update_s_p = steps_p * OPTIMISER_FLOP_PER_BYTE * updates_s

    @cached_property
    def _held_p(self) -> list[Array]:
        """For every pair, (N, L + 1, L + 1): a span's work, infinite where it does not fit."""
        held = []
        for size, count in self.batches.tolist():
            flight = count if self._options.schedule == "gpipe" else 1
            need = count_segment_bytes(self._blocks, self._options, size, flight)
            good = np.triu(np.ones_like(need), k=1) > 0
            share = count_share_bytes(self._tables, self._cluster, size, count, self._options)
            room_n = np.minimum(self._room_n, share)
            good = good[None] & (need[None] <= room_n[:, None, None])
            good &= np.arange(len(need))[:, None] >= self._first_n[:, None, None]
            held.append(np.where(good, self._flop[None], np.inf))
        return held

    @cached_property
    def _step_s_p(self) -> Array:
        """The least step between control unit and edge, in seconds per example of a micro-batch."""
        between, last = (min(getattr(a, n) for a in self.air_r) for n in ("between_s", "last_s"))
        known: dict[tuple[int, bytes], float] = {}
        found = []
        for held, count in zip(self._held_p, self.batches[:, 1].tolist(), strict=True):
            same = (count, np.isfinite(held).tobytes())
            if same not in known:
                spans_s = held / self.speed_n[:, None, None]
                known[same] = find_shortest_step_s(spans_s, count, between, last, self._edge_s)
            found.append(known[same])
        return np.array(found)

    @cached_property
    def _most_pgn(self) -> Array:
        """The most work that each device can do per example in steps up to each length."""
        most = []
        for held, step_s, count in zip(
            self._held_p, self._step_s_p, self.batches[:, 1], strict=True
        ):
            pace_g = np.append(step_s * LONGER[1:] / count, np.inf)
            work_n = [np.sort(each[np.isfinite(each)]) for each in held]
            reach = [
                np.append(0.0, w)[np.searchsorted(w, pace_g * c * (1.0 + EXACT), side="right")]
                for w, c in zip(work_n, self.speed_n, strict=True)
            ]
            most.append(np.stack(reach, axis=1))
        return np.stack(most)

    def find_least_s(self, price_n: Array | None = None) -> tuple[Array, Array]:
        """Find every round's least seconds plus priced joules, (R,), and the joules spent, (R, N).

        ``price_n`` is in seconds per joule. Infinite where nothing fits.
        """
        inner_p, done_pn = self._bound_steps(price_n)
        least, joules = [], []
        for air in self.air_r:
            ends_p = self._singles_p * (self._control_s + air.first_s) + self._update_s_p
            p = int((inner_p + ends_p).argmin())
            least.append(air.fixed_s + inner_p[p] + ends_p[p])
            joules.append(self._examples_p[p] * self.joule_n * done_pn[p])
        return np.array(least), np.array(joules)

    def _bound_steps(self, price_n: Array | None) -> tuple[Array, Array]:
        """Bound the seconds plus priced energy of all steps, and the devices' work, for every pair.

        A step between two lengths takes at least the seconds of the shorter and the energy of the
        longer one.
        """
        step_s = self._singles_p * self._step_s_p
        if price_n is None:
            return step_s, np.zeros((len(step_s), len(self.speed_n)))
        order = np.argsort(price_n * self.joule_n, kind="stable")
        work = float(self._flop[0, -1])
        filled = np.minimum(np.cumsum(self._most_pgn[:, :, order], axis=2), work)
        done = np.empty_like(filled)
        done[:, :, order] = np.diff(filled, axis=2, prepend=0.0)
        worth = self._examples_p[:, None] * (done @ (price_n * self.joule_n))
        total = step_s[:, None] * LONGER + worth
        best = total.argmin(axis=1)
        rows = np.arange(len(total))
        return total[rows, best], done[rows, best]

    def bound_within_budgets_s(self) -> float:
        """Return a lower bound on mean seconds per round if all energy budgets hold on average.

        By weak duality the bound is the least of seconds plus priced joules, less the price of the
        budgets, at any prices. Prices rise where the least plans spend more than the budget.
        """
        best = float(self.find_least_s()[0].mean())
        bounded = np.isfinite(self.budget_n)
        if not bounded.any() or not np.isfinite(best):
            return best
        step, worth = FIRST_STEP * best, np.zeros_like(self.budget_n)
        budget = np.where(bounded, self.budget_n, 1.0)
        for k in range(ASCENTS):
            least, joules = self.find_least_s(worth / budget)
            best = max(best, float(least.mean() - worth.sum()))
            excess = np.where(bounded, joules.mean(0) / budget - 1.0, 0.0)
            worth = np.maximum(worth + step / (1.0 + k) ** 0.75 * excess, 0.0)
        return best


def find_shortest_step_s(
    spans_s: Array, count: int, between_s: float, last_s: float, edge_s: float
) -> float:
    """Return the least ``max_k (J y_k + sum before it)`` over all orders of devices and all cuts.

    ``spans_s`` are seconds of every span of blocks on every device, (N, L + 1, L + 1), infinite
    where it must not lie. The result is at most ``EXACT`` too small; infinite where nothing fits.
    Of more than ``MOST_DEVICES`` devices only the slowest counts, in any order.
    """
    low = count * _find_least_pace(spans_s)
    if len(spans_s) > MOST_DEVICES or not np.isfinite(low):
        return low
    high, trial = np.inf, low * (1.0 + EXACT)
    if not _is_reachable(np.inf, spans_s, count, between_s, last_s, edge_s):
        return np.inf
    while not high <= low * (1.0 + EXACT):
        if _is_reachable(trial, spans_s, count, between_s, last_s, edge_s):
            high = trial
        else:
            low = trial
        trial = 2.0 * trial if not np.isfinite(high) else 0.5 * (low + high)
    return low


def _find_least_pace(spans_s: Array) -> float:
    """Return the least y for which spans of at most y seconds, one per device, add up to the model.

    Blocks are counted and need not be distinct.
    """
    blocks = spans_s.shape[1] - 1
    length = np.subtract.outer(np.arange(blocks + 1), np.arange(blocks + 1)).T
    paces = np.unique(spans_s[np.isfinite(spans_s)])
    low, high = -1, len(paces)
    while high - low > 1:
        middle = (low + high) // 2
        longest = np.where(spans_s <= paces[middle], length, 0).max((1, 2))
        low, high = (low, middle) if longest.sum() >= blocks else (middle, high)
    return float(paces[high]) if high < len(paces) else np.inf


def _is_reachable(
    limit_s: float, spans_s: Array, count: int, between_s: float, last_s: float, edge_s: float
) -> bool:
    """Return whether some chain of devices keeps a step within ``limit_s``.

    ``ahead_s[used, l]`` is the least sum of seconds before a device that starts at block l.
    """
    devices, blocks = spans_s.shape[0], spans_s.shape[1] - 1
    ahead_s = np.full((2**devices, blocks + 1), np.inf)
    ahead_s[0, 0] = 0.0
    used = np.arange(2**devices)
    size = sum((used >> n) & 1 for n in range(devices))
    for depth in range(min(devices, blocks)):
        for n in range(devices):
            free = used[(size == depth) & ((used >> n) & 1 == 0)]
            before = ahead_s[free][:, :, None]
            after = np.where(
                count * spans_s[n] + before <= limit_s, before + spans_s[n] + between_s, np.inf
            ).min(1)
            ahead_s[free | 1 << n] = np.minimum(ahead_s[free | 1 << n], after)
    whole = ahead_s[:, blocks].min() - between_s
    return bool(whole + last_s + count * edge_s <= limit_s and np.isfinite(whole))


def _time_air(tables: Tables, m: int, here: Ints) -> Air:
    """Return the shortest radio times of cluster ``m``, at full power with all of the band."""
    noise, power = tables.snapshot.radio.noise_w_per_hz, tables.members.power_max_mi[m]
    gain, width, edge = tables.gain_mij[m], tables.d2d_hz_mij[m], tables.edge
    cut = tables.blocks.cut_bytes_l[tables.model_m[m]]

    def seconds(size: float, ends: tuple[Ints, Ints], hz: Array, power_w: Array) -> Array:
        """Time ``size`` uncoded bytes on every link between ``ends``, with the link's codec."""
        bits = 8.0 * size * SHARES[tables.codec_mij[m][ends]] / tables.share_mij[m][ends]
        return compute_send_time_s(bits, hz, power_w * gain[ends] / noise)

    out = (np.zeros_like(here), here)
    first = [seconds(cut[0], out, width[out], p) for p in (power[0], power[here])]
    up, home = (here, np.full_like(here, edge)), tables.edges.home_m[m]
    band = np.where(home, width[up], tables.snapshot.radio.bandwidth_hz)
    beam = np.asarray(tables.edges.power_m[m])
    last = [seconds(cut[-1], up, band, p) for p in (power[here], beam)]
    between = 0.0
    if len(here) > 1 and len(cut) > 2:
        i, j = (a[~np.eye(len(here), dtype=bool)] for a in np.meshgrid(here, here, indexing="ij"))
        hop = [seconds(cut[1:-1].min(), (i, j), width[i, j], p) for p in (power[i], power[j])]
        between = float((hop[0] + hop[1]).min())
    back = (here, np.zeros_like(here))
    weights_s = _time_weights_s(tables, m, out, power[0]) + _time_weights_s(
        tables, m, back, power[here]
    )
    return Air(
        first_s=float((first[0] + first[1]).min()),
        between_s=between,
        last_s=float((last[0] + last[1]).min()),
        fixed_s=float(compute_server_s(tables, m) + weights_s.min()),
    )


def _time_weights_s(tables: Tables, m: int, ends: tuple[Ints, Ints], power_w: Array) -> Array:
    """Compute the seconds that the blocks' weights take over each of these links."""
    whole = tables.blocks.trained_bytes_l[tables.model_m[m], -1]
    bits = 8.0 * whole / tables.share_mij[m, 0, np.maximum(*ends)]
    snr = power_w * tables.gain_mij[m][ends] / tables.snapshot.radio.noise_w_per_hz
    return compute_send_time_s(bits, tables.d2d_hz_mij[m, 0, np.maximum(*ends)], snr)
