"""What a round costs a cluster whose stages have replicas.

A replica does a share of its stage's micro-batches, and all of the optimiser's work. The hops of a
plan stay one channel each: whichever replicas it joins, it carries one payload at a time, and is as
slow as the slowest of them. At the end of a step the gradients of a stage pass up and down the line
of its replicas in pieces (`pipeline.siblings`) at full power, for all stages at once; their seconds
count as if none began before the pipeline's last action.

Times, energies and memories come from rows of the common tables: each variant picks one replica of
every stage, in such a way that any two neighbours stand next to each other in one of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from collapipe_flwr.core.domain import ClusterPlan, Segment
from collapipe_flwr.core.replay import StepTimes, replay
from collapipe_flwr.core.turns import PIECE_BYTES, pieces_ahead, turns
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import chain_of, hop_bandwidth_hz
from collapipe_flwr.costs.layouts import (
    Layouts,
    hops_of,
    member_indices,
    segment_sums,
    with_codecs,
)
from collapipe_flwr.costs.radio import (
    codec_index,
    power_for_time_w,
    rate_bit_per_s,
    send_time_s,
)
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import (
    OPTIMISER_FLOP_PER_BYTE,
    PricingOptions,
    capacity_bytes,
    edge_speed,
    hand_out_s,
    peak_bytes,
    server_s,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedCosts:
    """Of one cluster; ``step_s`` is its pipeline's, without what the replicas exchange."""

    latency_s: float
    step_s: float
    exchange_s: float  # of one step
    slowest_stage: int  # the place of the segment whose share of a step takes longest
    energy_j: dict[str, float]  # of members with work
    memory_bytes: dict[str, int]
    room_bytes: dict[str, float]  # that plans may use
    hop_s: Array  # (K + 1, 2) of a payload, there and back, over the slowest pair of every hop
    rates: Array  # (K + 1, 2) bits per second

    @property
    def fits(self) -> bool:
        """Whether every member keeps within its memory."""
        return all(size <= self.room_bytes[name] for name, size in self.memory_bytes.items())


def price_replicated(
    tables: Tables, m: int, plan: ClusterPlan, options: PricingOptions
) -> ReplicatedCosts:
    """Price the plan of cluster ``m``, whose devices are all there."""
    return _Pricing(tables, m, plan, options).costs()


def thrifty(
    tables: Tables, m: int, plan: ClusterPlan, options: PricingOptions, hop_s: Array
) -> ClusterPlan:
    """The plan with the least powers that keep its hops to ``hop_s``, (K + 1, 2), if any do."""
    return _Pricing(tables, m, plan, options).with_hops_of(hop_s)


def exchange_s(legs: Sequence[float], size_bytes: float) -> float:
    """Seconds in which ``size_bytes`` pass a line; each of ``legs``, up and down, takes so long.

    In n equal pieces they are a flow shop, exactly so for two replicas. Of more, each that stands
    between others passes a total on after some later pieces (`pieces_ahead`): an upper bound.
    """
    pieces = max(math.ceil(size_bytes / PIECE_BYTES), 1)
    late = sum(pieces_ahead(replica) for replica in range(1, len(legs) // 2))
    return (sum(legs) + (pieces - 1 + min(late, pieces - 1)) * max(legs)) / pieces


class _Pricing:
    """One plan; stages are numbered from the control unit (0) to the edge (K + 1)."""

    def __init__(self, tables: Tables, m: int, plan: ClusterPlan, options: PricingOptions) -> None:
        self.tables, self.m, self.plan, self.options = tables, m, plan, options
        self.replicas, self.members = plan.replicas, member_indices(tables, m)
        self.even = max(self.replicas[2:-1:2], default=1)  # variants of the stages 2, 4, ...
        rows = self._rows(max(self.replicas[1:-1:2]))
        codecs = hops_of(tables, rows).codec.copy()
        if plan.hops:
            codecs[:] = [codec_index(hop.codec) for hop in plan.hops]
        self.chain = chain_of(with_codecs(tables, rows, codecs), rows, options)
        self.powers = self._powers()
        self.times = self._times()
        self.steps = float(self.chain.steps_r[0])
        self.meetings = [self._meetings(hop) for hop in range(len(self.replicas) - 1)]

    def costs(self) -> ReplicatedCosts:
        hop_s = np.array([self._hop_s(hop) for hop in range(len(self.meetings))])
        out, back = hand_out_s(self.tables, self.chain.rows)
        handed = sum(float(out[self._variant(s, r), s - 1]) for s, r in self._devices())
        collected = float(back[0].sum())
        exchange_s = max(self._exchange_s(stage) for stage in range(1, len(self.replicas) - 1))
        step_s = self._step_s(hop_s)
        need, room = self._memory()
        fixed_s = float(server_s(self.tables, self.chain.rows)[0]) + handed + collected
        working_s = step_s + exchange_s + self._optimiser_s()
        return ReplicatedCosts(
            latency_s=fixed_s + self.steps * working_s,
            step_s=step_s,
            exchange_s=exchange_s,
            slowest_stage=max(range(1, len(self.replicas) - 1), key=self._busy_s) - 1,
            energy_j=self._energy_j(handed, back),
            hop_s=hop_s,
            rates=np.array(self.chain.hops.bits * self.chain.hops.share)[0, :, None] / hop_s,
            memory_bytes=need,
            room_bytes=room,
        )

    def with_hops_of(self, hop_s: Array) -> ClusterPlan:
        """A sender that reaches several replicas has the power for the worst of them."""
        chain, last = self.chain, len(self.replicas) - 1
        width = hop_bandwidth_hz(chain, np.full(len(chain.rows), self.plan.bandwidth_hz))
        need = power_for_time_w(
            chain.hops.bits[:, :, None],
            width[:, :, None],
            chain.noise_over_gain[:, :, None],
            hop_s[None],
        )
        need = np.minimum(need, chain.power_max_w)
        ahead: dict[str, float] = {}
        back: dict[str, float] = {}
        for hop, meetings in enumerate(self.meetings):
            for sender, receiver in meetings:
                found = need[self._variant(hop, sender, receiver), hop]
                name = self._name(hop, sender)
                ahead[name] = max(ahead.get(name, 0.0), float(found[0]))
                if hop + 1 < last:
                    name = self._name(hop + 1, receiver)
                    back[name] = max(back.get(name, 0.0), float(found[1]))
        return replace(self.plan, tx_power_w=ahead, gradient_power_w=back)

    # -- variants ---------------------------------------------------------------------------

    def _rows(self, odd: int) -> Layouts:
        segments, plan = self.plan.segments, self.plan
        members = [
            [
                self._member(segment, self._digit(stage, v))
                for stage, segment in enumerate(segments, 1)
            ]
            for v in range(odd * self.even)
        ]
        stops = [segment.stop_block for segment in segments]
        count = len(members)
        return Layouts(
            cluster_r=np.full(count, self.m),
            member_rs=np.array(members, dtype=np.int64),
            stop_rs=np.tile(np.array(stops, dtype=np.int64), (count, 1)),
            micro_batch_size_r=np.full(count, plan.micro_batch_size),
            micro_batches_r=np.full(count, plan.micro_batches),
        )

    def _digit(self, stage: int, variant: int) -> int:
        return variant // self.even if stage % 2 else variant % self.even

    def _member(self, segment: Segment, digit: int) -> int:
        name = segment.device_ids[digit % len(segment.device_ids)]
        return self.members[name]

    def _variant(self, stage: int, replica: int, behind: int = 0) -> int:
        """In which a replica stands beside that replica of the stage behind; ends have one."""
        if stage % 2:
            return replica * self.even + behind
        return replica + behind * self.even

    def _name(self, stage: int, replica: int) -> str:
        if stage == 0:
            return self.plan.member_ids[0]
        return self.plan.segments[stage - 1].device_ids[replica]

    def _devices(self) -> list[tuple[int, int]]:
        """Stage and replica of every device."""
        stages = range(1, len(self.replicas) - 1)
        return [(s, r) for s in stages for r in range(self.replicas[s])]

    def _own(self, stage: int, replica: int) -> int:
        """Micro-batches of a step that pass a replica."""
        turn = turns(self.replicas[stage])[replica]
        return len(turn.own(self.plan.micro_batches))

    # -- hops -------------------------------------------------------------------------------

    def _powers(self) -> Array:
        """(V, K + 1, 2), as planned; the edge sends at its own full power."""
        powers = self.chain.power_max_w.copy()
        for variant, hop in np.ndindex(*powers.shape[:2]):
            sender = self._name(hop, self._digit(hop, variant) % self.replicas[hop])
            powers[variant, hop, 0] = self.plan.tx_power_w[sender]
            if hop + 1 < len(self.replicas) - 1:
                digit = self._digit(hop + 1, variant) % self.replicas[hop + 1]
                powers[variant, hop, 1] = self.plan.gradient_power_w[self._name(hop + 1, digit)]
        return powers

    def _times(self) -> Array:
        chain = self.chain
        width = hop_bandwidth_hz(chain, np.full(len(chain.rows), self.plan.bandwidth_hz))
        snr = self.powers / chain.noise_over_gain[:, :, None]
        return np.asarray(chain.hops.bits[:, :, None] / rate_bit_per_s(width[:, :, None], snr))

    def _meetings(self, hop: int) -> Counter[tuple[int, int]]:
        """How many micro-batches of a step pass from which replica to which one behind."""
        ahead, behind = self.replicas[hop], self.replicas[hop + 1]
        return Counter((j % ahead, j % behind) for j in range(self.plan.micro_batches))

    def _hop_s(self, hop: int) -> tuple[float, float]:
        found = [self.times[self._variant(hop, *pair), hop] for pair in self.meetings[hop]]
        there, home = np.max(found, axis=0).tolist()
        return there, home

    def _busy_s(self, stage: int) -> float:
        """Seconds of a step in which the busiest replica computes."""
        chain = self.chain
        return max(
            self._own(stage, r)
            * float(chain.forward_stage_s[v, stage] + chain.backward_stage_s[v, stage])
            for r in range(self.replicas[stage])
            if (v := self._variant(stage, r)) >= 0
        )

    # -- seconds ----------------------------------------------------------------------------

    def _step_s(self, hop_s: Array) -> float:
        chain, edge = self.chain, len(self.replicas) - 1
        places = [(0, 0), *self._devices()]
        stages = tuple(
            (*(float(s[self._variant(k, r), k]) for k, r in places), float(s[0, edge]))
            for s in (chain.forward_stage_s, chain.backward_stage_s)
        )
        times = StepTimes(
            stage_s=(stages[0], stages[1]),
            hop_s=(tuple(hop_s[:, 0].tolist()), tuple(hop_s[:, 1].tolist())),
            half_duplex=self.options.half_duplex,
            replicas=self.replicas,
        )
        return replay(times, self.plan.warmup_depth, self.plan.micro_batches).makespan_s

    def _exchanges(self, stage: int) -> list[tuple[float, float]]:
        """Seconds up and down every link of the line of a stage's replicas, in one step."""
        tables, m = self.tables, self.m
        noise, power = tables.snapshot.radio.noise_w_per_hz, tables.members.power_max_mi[m]
        bits = 8.0 * float(
            segment_sums(tables.blocks.parameter_bytes_l, self.chain.rows)[0, stage - 1]
        )
        line = [self._member(self.plan.segments[stage - 1], r) for r in range(self.replicas[stage])]

        def seconds(sender: int, receiver: int) -> float:
            width, share = (
                tables.d2d_hz_mij[m, sender, receiver],
                tables.share_mij[m, sender, receiver],
            )
            snr = power[sender] * tables.gain_mij[m, sender, receiver] / noise
            return float(send_time_s(bits / share, width, snr))

        return [(seconds(b, a), seconds(a, b)) for a, b in pairwise(line)]

    def _exchange_s(self, stage: int) -> float:
        """Of all pieces up and down the line; half-duplex links carry them one after the other."""
        legs = [seconds for pair in self._exchanges(stage) for seconds in pair]
        if self.options.half_duplex or not legs:
            return sum(legs)
        return exchange_s(legs, self._parameters(stage))

    def _optimiser_s(self) -> float:
        """Of a step, one stage after the other; a stage takes as long as its slowest replica."""
        model, speed = self.tables.snapshot.model, self.tables.members.speed_mi[self.m]
        ends = model.embedding.parameter_bytes / speed[0]
        ends += model.decoder.parameter_bytes / edge_speed(self.tables, self.options)
        found = np.zeros(len(self.replicas))
        for stage, replica in self._devices():
            found[stage] = max(found[stage], self._parameters(stage) / self._speed(stage, replica))
        return float(OPTIMISER_FLOP_PER_BYTE * (ends + found.sum()))

    def _parameters(self, stage: int) -> float:
        return float(
            segment_sums(self.tables.blocks.parameter_bytes_l, self.chain.rows)[0, stage - 1]
        )

    def _speed(self, stage: int, replica: int) -> float:
        member = self._member(self.plan.segments[stage - 1], replica) if stage else 0
        return float(self.tables.members.speed_mi[self.m, member])

    # -- joules and bytes -------------------------------------------------------------------

    def _energy_j(self, handed_s: float, back: Array) -> dict[str, float]:
        power = {self._name(s, r): self._full_power(s, r) for s, r in [(0, 0), *self._devices()]}
        found = {self._name(s, r): self._computing_j(s, r) for s, r in [(0, 0), *self._devices()]}
        found[self._name(0, 0)] += power[self._name(0, 0)] * handed_s
        for stage in range(1, len(self.replicas) - 1):
            first = self._name(stage, 0)
            found[first] += power[first] * float(back[0, stage - 1])
            for ahead, (up, down) in enumerate(self._exchanges(stage)):
                for replica, seconds in ((ahead + 1, up), (ahead, down)):
                    name = self._name(stage, replica)
                    found[name] += self.steps * power[name] * seconds
        for hop, meetings in enumerate(self.meetings):
            for (sender, receiver), count in meetings.items():
                variant = self._variant(hop, sender, receiver)
                joule = self.steps * count * self.powers[variant, hop] * self.times[variant, hop]
                found[self._name(hop, sender)] += float(joule[0])
                if hop + 1 < len(self.replicas) - 1:
                    found[self._name(hop + 1, receiver)] += float(joule[1])
        return found

    def _full_power(self, stage: int, replica: int) -> float:
        member = self._member(self.plan.segments[stage - 1], replica) if stage else 0
        return float(self.tables.members.power_max_mi[self.m, member])

    def _computing_j(self, stage: int, replica: int) -> float:
        chain, variant = self.chain, self._variant(stage, replica)
        member = self._member(self.plan.segments[stage - 1], replica) if stage else 0
        per_flop = float(self.tables.members.energy_per_flop_mi[self.m, member])
        busy_s = chain.forward_stage_s[variant, stage] + chain.backward_stage_s[variant, stage]
        flop = self._own(stage, replica) * float(busy_s) * self._speed(stage, replica)
        embedding = float(self.tables.snapshot.model.embedding.parameter_bytes)
        flop += OPTIMISER_FLOP_PER_BYTE * (self._parameters(stage) if stage else embedding)
        return self.steps * per_flop * flop

    def _memory(self) -> tuple[dict[str, int], dict[str, float]]:
        """Peak bytes of every member, and those that plans may use."""
        chain, depths = self.chain, self.plan.warmup_depth
        flight = np.tile(np.array(depths, dtype=np.float64), (len(chain.rows), 1))
        for variant, stage in np.ndindex(*flight.shape):
            replica = self._digit(stage, variant) % self.replicas[stage]
            flight[variant, stage] = min(depths[stage], self._own(stage, replica))
        need = peak_bytes(self.tables, chain.rows, self.options, flight)
        room = capacity_bytes(self.tables, chain.rows, self.options)
        places = {self._name(s, r): (self._variant(s, r), s) for s, r in [(0, 0), *self._devices()]}
        peak = {name: int(need[place]) for name, place in places.items()}
        return peak, {name: float(room[place]) for name, place in places.items()}
