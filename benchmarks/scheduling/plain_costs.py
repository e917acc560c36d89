"""What a plan costs at full power and equal bandwidth: plain code of its own, for rivals.

Written from docs/theory.md, without the scheduler's scorer, layouts or radio solver: GPipe's closed
form, the lower bound of 1F1B, energies, memory, re-computation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.convergence import sum_bound
from collapipe_flwr.costs.layouts import Layouts
from collapipe_flwr.costs.radio import SHARES
from collapipe_flwr.scheduler.planner import PlanSolver
from collapipe_flwr.scheduler.problem import NEVER

NONE = -1  # a slot without a device
UPDATE_FLOP_PER_BYTE = 3.0


@dataclass(slots=True)
class Rows:
    """Layouts of single clusters: devices in order, blocks of each, micro-batches."""

    cluster: Ints  # (R,)
    device: Ints  # (R, N), NONE behind the last one; from 1, 0 being the control unit
    blocks: Ints  # (R, N), 0 on unused slots
    size: Ints  # (R,)
    count: Ints

    def __len__(self) -> int:
        return len(self.cluster)

    @property
    def depth(self) -> Ints:
        """Devices with blocks, (R,)."""
        return np.asarray((self.device != NONE).sum(1))

    def take(self, index: Ints) -> Rows:
        """The rows at ``index``."""
        return Rows(*(column[index] for column in self.columns))

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """All arrays."""
        return self.cluster, self.device, self.blocks, self.size, self.count

    def put(self, index: Ints, rows: Rows) -> None:
        """Overwrite the rows at ``index``."""
        for mine, theirs in zip(self.columns, rows.columns, strict=True):
            mine[index] = theirs

    def layouts(self) -> Layouts:
        """The same as the scheduler's rows."""
        stops = np.minimum(np.cumsum(self.blocks, axis=1), self.blocks.sum(1, keepdims=True))
        return Layouts(
            cluster_r=self.cluster.copy(),
            member_rs=self.device.copy(),
            stop_rs=stops,
            micro_batch_size_r=self.size.copy(),
            micro_batches_r=self.count.copy(),
        )


def rows_of(layouts: Layouts, devices: int) -> Rows:
    """The scheduler's rows in this form, ``devices`` slots wide."""
    width = min(layouts.member_rs.shape[1], devices)
    member, stop = layouts.member_rs[:, :width], layouts.stop_rs[:, :width]
    pad = ((0, 0), (0, devices - width))
    blocks = np.where(member >= 0, np.diff(stop, axis=1, prepend=0), 0)
    return Rows(
        layouts.cluster_r.copy(),
        np.pad(member, pad, constant_values=NONE),
        np.pad(blocks, pad),
        layouts.micro_batch_size_r.copy(),
        layouts.micro_batches_r.copy(),
    )


class PlainCosts:
    """Prices rows and plans of one decision: full power, equal parts of the edge's band."""

    def __init__(self, planner: PlanSolver) -> None:
        self.planner, tables = planner, planner.tables
        self.overlapped = planner.settings.schedule == "1f1b"
        snapshot, members, blocks = tables.snapshot, tables.members, tables.blocks.of(0)
        self.tables, self.clusters, self.num_blocks = tables, tables.num_clusters, tables.num_blocks
        self.devices = members.speed_mi.shape[1] - 1
        self.present = members.present_mi
        self.model, self.prefix = snapshot.model, blocks
        self.back_flop_l, self.kept_l, self.once = blocks.backward_flop_l, blocks.stash_bytes_l, 0.0
        if planner.settings.recompute:  # block inputs alone are kept, and one block's activations
            self.back_flop_l = self.back_flop_l + blocks.forward_flop_l
            self.kept_l = np.concatenate([[0.0], np.cumsum(blocks.cut_bytes_l[:-1])])
            self.once = float(np.diff(blocks.stash_bytes_l).max())
        width = tables.d2d_hz_mij.copy()
        width[:, :, -1] = snapshot.radio.bandwidth_hz / self.clusters
        over = tables.gain_mij / (snapshot.radio.noise_w_per_hz * width)
        watt = members.power_max_mi
        back_watt = np.concatenate([watt, np.full((self.clusters, 1), snapshot.edge.tx_power_w)], 1)
        rate = width * tables.share_mij
        self.ahead = 8.0 / (rate * np.log2(1.0 + watt[:, :, None] * over))  # seconds per byte
        self.back = 8.0 / (rate * np.log2(1.0 + back_watt[:, None, :] * over))
        self.coded = SHARES[tables.codec_mij]  # part of an activation's bytes that is sent
        self.price, self.send_worth = planner.price_mi, watt * planner.price_mi
        self.back_worth = np.concatenate([self.send_worth, np.zeros((self.clusters, 1))], 1)
        self.room = (1.0 - planner.settings.memory_margin) * members.memory_mi
        self.most_share_m = tables.most_share_m
        edge_room = snapshot.edge.memory_bytes / self.clusters
        self.edge_room = (1.0 - planner.settings.memory_margin) * edge_room
        share = self.clusters if planner.settings.edge_shared else 1
        edge, own, end = snapshot.edge.speed_flop_per_s / share, members.speed_mi[:, 0], self.model
        self.ends_2em = np.array(
            [
                [
                    end.embedding.forward_flop / own,
                    np.full(len(own), end.decoder.forward_flop / edge),
                ],
                [
                    end.embedding.backward_flop / own,
                    np.full(len(own), end.decoder.backward_flop / edge),
                ],
            ]
        )
        update = end.embedding.parameter_bytes / own + end.decoder.parameter_bytes / edge
        self.update_s_m = UPDATE_FLOP_PER_BYTE * update
        whole = end.embedding.parameter_bytes + blocks.parameter_bytes_l[-1]
        self.server_s_m = 16.0 * whole / tables.server_rate_m
        self.sizes = np.array(sorted(set(planner.settings.batches)))

    def steps(self, cluster: Ints, batch: Ints) -> Array:
        """Optimiser steps of a round."""
        return np.asarray(np.maximum(np.ceil(self.tables.examples_m[cluster] / batch), 1.0))

    def price_of(self, rows: Rows) -> tuple[Array, Array]:
        """Seconds of a round and priced energy of every row; infinite where memory forbids it."""
        m, own, used = rows.cluster, rows.cluster[:, None], rows.device != NONE
        device, members = np.maximum(rows.device, 0), self.tables.members
        stop = np.cumsum(rows.blocks, axis=1)
        first, size, count = stop - rows.blocks, rows.size.astype(float), rows.count.astype(float)
        steps = self.steps(m, rows.size * rows.count)
        speed, worth = members.speed_mi[own, device], self.price[own, device]

        def blocks(prefix: Array) -> Array:
            return np.asarray(prefix[stop] - prefix[first])  # 0 on unused slots

        ahead_flop, back_flop = blocks(self.prefix.forward_flop_l), blocks(self.back_flop_l)
        weights = blocks(self.prefix.parameter_bytes_l)
        step_s, sent = self._pipeline(rows, (ahead_flop / speed, back_flop / speed), stop)
        update = UPDATE_FLOP_PER_BYTE * weights
        out, collect = weights * self.ahead[own, 0, device], weights * self.ahead[own, device, 0]
        seconds = steps * (step_s + (update / speed).sum(1) + self.update_s_m[m])
        seconds += (out + collect).sum(1) + self.server_s_m[m]
        flop = (size * count)[:, None] * (ahead_flop + back_flop) + update
        joules = (worth * members.energy_per_flop_mi[own, device] * flop).sum(1)
        start, end = self.model.embedding, self.model.decoder
        cu_flop = size * count * (start.forward_flop + start.backward_flop)
        cu_flop = cu_flop + UPDATE_FLOP_PER_BYTE * start.parameter_bytes
        joules += self.price[m, 0] * members.energy_per_flop_mi[m, 0] * cu_flop
        energy = steps * (joules + count * sent) + self.send_worth[m, 0] * out.sum(1)
        energy += (self.send_worth[own, device] * collect).sum(1)
        flight = self._in_flight(rows)
        need = blocks(self.prefix.state_bytes_l)
        need = need + size[:, None] * (flight[:, 1:-1] * blocks(self.kept_l) + self.once)
        cap = np.minimum(self.room[own, device], self.most_bytes(m, size, count)[:, None])
        good = ((need <= cap) | ~used).all(1) & used.any(1)
        good &= start.state_bytes + size * flight[:, 0] * start.stash_bytes <= self.room[m, 0]
        good &= end.state_bytes + size * flight[:, -1] * end.stash_bytes <= self.edge_room
        return np.where(good, seconds, np.inf), np.where(good, energy, np.inf)

    def most_bytes(self, m: Ints, size: Array, count: Array) -> Array:
        """A cluster's share of what training the whole model takes with these micro-batches."""
        ends, most = (self.model.embedding, self.model.decoder), 1 if self.overlapped else count
        stash = self.kept_l[-1] + sum(end.stash_bytes for end in ends)
        state = self.prefix.state_bytes_l[-1] + sum(end.state_bytes for end in ends)
        whole = state + size * (most * stash + self.once)
        return np.asarray(self.most_share_m[m] * whole * (1.0 + 1e-12))

    def _pipeline(self, rows: Rows, stages: tuple[Array, Array], stop: Ints) -> tuple[Array, Array]:
        """Seconds of a step's pipeline; priced joules of a micro-batch's transmissions, (R,)."""
        own, size, none = (
            rows.cluster[:, None],
            rows.size.astype(float),
            np.zeros((len(rows), 1), int),
        )
        device, depth = np.maximum(rows.device, 0), rows.depth
        sender, receiver = np.concatenate([none, device], 1), np.concatenate([device, none], 1)
        receiver[np.arange(len(rows)), depth] = self.ahead.shape[2] - 1
        cut = np.concatenate([none, stop], axis=1)
        sends = (np.arange(sender.shape[1]) <= depth[:, None]) * self.coded[own, sender, receiver]
        data = size[:, None] * self.prefix.cut_bytes_l[cut] * sends
        hops = [data * way[own, sender, receiver] for way in (self.ahead, self.back)]
        ends = self.ends_2em[:, :, rows.cluster] * size
        times = [
            np.column_stack([ends[way, 0], size[:, None] * stages[way], ends[way, 1]])
            for way in (0, 1)
        ]
        sent = self.send_worth[own, sender] * hops[0] + self.back_worth[own, receiver] * hops[1]
        seconds = _one_f_one_b if self.overlapped else _gpipe
        return seconds(times, hops, rows.count.astype(float)), sent.sum(1)

    def _in_flight(self, rows: Rows) -> Array:
        """Micro-batches that control unit, slots and edge must hold at once, (R, N + 2)."""
        count = rows.count.astype(float)[:, None]
        if not self.overlapped:
            return np.broadcast_to(count, (len(rows), self.devices + 2))
        behind = rows.depth[:, None] + 2.0 - np.arange(self.devices + 2)
        return np.asarray(np.minimum(np.maximum(behind, 1.0), count))

    def rho(self, batch: Ints) -> Array:
        """Rounds to the target over the reference's, of batches (K, M)."""
        learning = self.planner.learning
        if learning.constants is None:
            return np.ones(len(batch))
        examples = self.tables.examples_m
        steps = np.maximum(np.ceil(examples / batch), 1.0)
        sums = sum_bound(examples / examples.sum(), steps, batch.astype(float))
        return np.minimum(learning.constants.count_rounds(sums) / learning.reference_rounds, NEVER)

    def objective(self, seconds: Array, energy: Array, batch: Ints) -> Array:
        """``V rho max T / T_ref`` plus priced energy of plans, all (K, M)."""
        late = self.planner.latency_price * self.rho(batch) * seconds.max(1)
        return np.asarray(late + energy.sum(1))


def _gpipe(stages: list[Array], hops: list[Array], count: Array) -> Array:
    """All forwards, then all backwards: the first micro-batch, then the slowest for the others."""
    seconds: Array = np.zeros(len(count))
    for stage, hop in zip(stages, hops, strict=True):
        slowest = np.maximum(stage.max(1), hop.max(1))
        seconds = seconds + stage.sum(1) + hop.sum(1) + (count - 1.0) * slowest
    return seconds


def _one_f_one_b(stages: list[Array], hops: list[Array], count: Array) -> Array:
    """No step is shorter: a stage's own work behind what must come before it, or the busiest link.

    Slots without a device lie before the edge and take no time.
    """
    stage, hop = stages[0] + stages[1], hops[0] + hops[1]
    before = np.cumsum(np.column_stack([np.zeros(len(count)), stage[:, :-1] + hop]), axis=1)
    busy = (before + count[:, None] * stage).max(1)
    one_way = np.max([times.max(1) for times in (*stages, *hops)], axis=0)
    return np.asarray(np.maximum(busy, before[:, -1] + stage[:, -1] + (count - 1.0) * one_way))
