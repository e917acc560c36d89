"""Every way to spread a cluster's blocks over its devices, and what no plan with it undercuts.

Blocks are equal here, so what computing takes depends on how many blocks each device holds, under
GPipe not on the order of the devices (under 1F1B see `orders`). The order decides over which links
activations travel; ``least_s`` takes the fastest link into and out of every device and all of the
edge's band. Formulas are those of docs/theory.md, written again: nothing here searches, and nothing
is the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.scheduling.orders import Way, least_step_s
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.convergence import sum_bound
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import count_share_bytes
from collapipe_flwr.scheduler.problem import NEVER, Learning
from collapipe_flwr.scheduler.protocol import SchedulerConfig

UPDATE_FLOP_PER_BYTE = 3.0


def spreads(devices: int, blocks: int) -> Ints:
    """All (A, N) counts of blocks per device that add up to ``blocks``."""
    if devices == 1:
        return np.array([[blocks]])
    parts = []
    for first in range(blocks + 1):
        rest = spreads(devices - 1, blocks - first)
        parts.append(np.concatenate([np.full((len(rest), 1), first), rest], axis=1))
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a world as plain arrays, for what its plans take at least."""

    tables: Tables
    settings: SchedulerConfig

    def __post_init__(self) -> None:
        blocks = set(self.tables.snapshot.model.blocks)
        if len(blocks) > 1 or self.settings.recompute:
            raise ConfigError("the clairvoyant bound is for equal blocks without re-computation")

    def steps(self, m: int, batch: int) -> float:
        """Optimiser steps of cluster m."""
        return float(max(np.ceil(self.tables.examples_m[m] / batch), 1.0))

    def fits(self, m: int, spread: Ints, size: int, count: int) -> Mask:
        """Which of (A, N) keep within all memories."""
        model, margin = self.tables.snapshot.model, 1.0 - self.settings.memory_margin
        block, room = model.blocks[0], margin * self.tables.members.memory_mi[m]
        here = self.tables.members.present_mi[m, 1:]
        share = count_share_bytes(self.tables, m, size, count, self.settings)
        # 1F1B keeps a micro-batch on the edge and at least one more on every stage ahead of it.
        flights = (count,) * 3 if self.settings.schedule == "gpipe" else (3, 2, 1)
        first, device, last = (size * min(flight, count) for flight in flights)
        need = spread * (block.state_bytes + device * block.stash_bytes)
        edge = margin * self.tables.snapshot.edge.memory_bytes / self.tables.num_clusters
        ends = model.embedding.state_bytes + first * model.embedding.stash_bytes <= room[0]
        ends &= model.decoder.state_bytes + last * model.decoder.stash_bytes <= edge
        good = (need <= np.minimum(room[1:], share)) & (here | (spread == 0))
        return np.asarray(good.all(1) & ends)

    def _flight(self, m: int, spread: Ints, size: int, count: int) -> Array:
        """Micro-batches that fit on control unit and devices, (A, N + 1), infinite without work."""
        model, margin = self.tables.snapshot.model, 1.0 - self.settings.memory_margin
        block, first = model.blocks[0], model.embedding
        room = margin * self.tables.members.memory_mi[m]
        room[1:] = np.minimum(
            room[1:], count_share_bytes(self.tables, m, size, count, self.settings)
        )
        own = np.full(len(spread), (room[0] - first.state_bytes) / max(size * first.stash_bytes, 1))
        free = room[1:] - spread * block.state_bytes
        kept = np.maximum(size * spread * block.stash_bytes, 1)
        devices = np.where(spread > 0, free / kept, np.inf)
        return np.floor(np.column_stack([own, devices]) * (1.0 + 1e-9))

    def joule(self, m: int, batch: int) -> Array:
        """Joules of every device of cluster m per block it holds, transmissions of a step apart."""
        block, members = self.tables.snapshot.model.blocks[0], self.tables.members
        flop = batch * (block.forward_flop + block.backward_flop)
        flop += UPDATE_FLOP_PER_BYTE * block.parameter_bytes
        home = self._seconds_per_bit(m, members.power_max_mi[m])[1:, 0]
        bulk = members.power_max_mi[m, 1:] * 8.0 * block.parameter_bytes * home
        computing = self.steps(m, batch) * members.energy_per_flop_mi[m, 1:] * flop
        return np.asarray(computing + bulk)

    def _seconds_per_bit(self, m: int, watt_i: Array) -> Array:
        """Of every link (sender, receiver) of cluster m, the edge last; all of its band."""
        tables, radio = self.tables, self.tables.snapshot.radio
        width = tables.d2d_hz_mij[m].copy()
        width[:, -1] = radio.bandwidth_hz
        snr = watt_i[:, None] * tables.gain_mij[m] / (radio.noise_w_per_hz * width)
        return np.asarray(1.0 / (tables.share_mij[m] * width * np.log2(1.0 + snr)))

    def least_s(
        self,
        m: int,
        spread: Ints,
        pair: tuple[int, int],
        *,
        air: bool = True,
        known_s: Array | None = None,
    ) -> Array:
        """Seconds of the round that no order, power or split of the band undercuts, (A,).

        Without ``air`` transmissions take no time at all. Rounds that take ``known_s`` or more need
        not be told apart.
        """
        size, count = pair
        model, members = self.tables.snapshot.model, self.tables.members
        block, used = model.blocks[0], spread > 0
        speed, watt = members.speed_mi[m], members.power_max_mi[m]
        ahead = self._seconds_per_bit(m, watt)
        edge_w = self.tables.snapshot.edge.tx_power_w
        down = self._seconds_per_bit(m, np.full_like(watt, edge_w))[:, -1]
        others = np.where(np.eye(len(watt), dtype=bool), np.inf, ahead[:, :-1])
        bits = 8.0 * size * block.output_bytes * air
        # Into every device comes one hop from some member, and out of it one gradient to some.
        into, out = bits * others.min(0)[1:], bits * others.min(1)[1:]
        up = bits * np.where(used, ahead[1:, -1], np.inf).min(1)
        home = bits * np.where(used, down[1:], np.inf).min(1)
        edge = self.tables.snapshot.edge.speed_flop_per_s
        edge = edge / self.tables.num_clusters if self.settings.edge_shared else edge
        first, last = model.embedding, model.decoder
        ways = []
        for flop, start, end, hop, outer in (
            (block.forward_flop, first.forward_flop, last.forward_flop, into, up),
            (block.backward_flop, first.backward_flop, last.backward_flop, out, home),
        ):
            ends = size * np.array([start / speed[0], end / edge])
            hops = np.concatenate([np.where(used, hop, 0.0), outer[:, None]], axis=1)
            ways.append(Way(size * flop * spread / speed[1:], hops, ends))
        update = spread * block.parameter_bytes / speed[1:]
        rest = first.parameter_bytes / speed[0] + last.parameter_bytes / edge
        bulk = 8.0 * block.parameter_bytes * air * (ahead[0, 1:-1] + ahead[1:, 0])
        whole = first.parameter_bytes + self.tables.num_blocks * block.parameter_bytes
        server, steps = 16.0 * whole / self.tables.server_rate_m[m], self.steps(m, size * count)
        fixed = steps * UPDATE_FLOP_PER_BYTE * (update.sum(1) + rest) + spread @ bulk + server
        if self.settings.schedule == "gpipe":
            step = gpipe_s(ways[0], ways[1], count)
        else:
            flight = self._flight(m, spread, size, count)
            limit_s = None if known_s is None else (known_s - fixed) / steps
            step = least_step_s(ways[0], ways[1], count, flight, limit_s)
        return np.asarray(steps * step + fixed)


def gpipe_s(ahead: Way, back: Way, count: int) -> Array:
    """A step of GPipe, (A,)."""
    step = np.zeros(len(ahead.stage_s))
    for way in (ahead, back):
        step += way.stage_s.sum(1) + way.hop_s.sum(1) + way.end_s.sum()
        slowest = np.maximum(way.stage_s.max(1), way.hop_s.max(1))
        step += (count - 1) * np.maximum(slowest, way.end_s.max())
    return step


def rho_of(learning: Learning, tables: Tables, batch_km: Ints) -> Array:
    """Rounds to the target over the reference's, of the batches of all clusters, (K, M)."""
    if learning.constants is None:
        return np.ones(len(batch_km))
    examples = tables.examples_m
    steps = np.maximum(np.ceil(examples / batch_km), 1.0)
    sums = sum_bound(examples / examples.sum(), steps, batch_km.astype(float))
    return np.minimum(learning.constants.count_rounds(sums) / learning.reference_rounds, NEVER)


def batch_choices(settings: SchedulerConfig, clusters: int) -> tuple[Ints, Ints]:
    """The batches of the grid, (B,), and every choice of one per cluster by place, (K, M)."""
    batches = np.unique(np.array(settings.batches).prod(1))
    return batches, np.array(list(product(range(len(batches)), repeat=clusters)))
