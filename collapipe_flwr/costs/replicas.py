"""Prices of a round for a cluster whose stages have replicas.

A replica does a share of its stage's micro-batches, and all of the optimiser's work. Every hop of a
plan stays one channel: it carries one payload at a time between any replicas, and is as slow as the
slowest pair. At the end of a step the gradients of a stage pass up and down the line of its
replicas in pieces (`pipeline.gradient_sums`) at full power, for all stages at once; their seconds
count as if none began before the pipeline's last action.

Times, energies and memories come from rows of the common tables (`variants`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.replay import StepTimes, replay
from collapipe_flwr.core.schedule import PIECE_BYTES, count_pieces_ahead
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import find_hop_bandwidth_hz, make_chain
from collapipe_flwr.costs.layouts import set_planned_codecs, sum_segments
from collapipe_flwr.costs.radio import compute_power_w, compute_rate_bit_per_s, compute_send_time_s
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.variants import ReplicaRows
from collapipe_flwr.costs.work import (
    OPTIMISER_FLOP_PER_BYTE,
    PricingOptions,
    compute_edge_speeds,
    compute_hand_out_s,
    compute_server_s,
    count_capacity_bytes,
    count_peak_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedCluster:
    """The price of a plan for one cluster."""

    cluster_id: str
    latency_s: float  # of the round
    step_s: float  # of one optimiser step's pipeline
    energy_j: Mapping[str, float]  # every member, 0 for devices without work
    memory_bytes: Mapping[str, int]  # members with work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicatedCosts(PricedCluster):
    """The price with replicas of stages; ``step_s`` excludes their exchange of gradients."""

    exchange_s: float  # of one step
    slowest_stage: int  # the place of the segment whose share of a step takes longest
    room_bytes: dict[str, float]  # that plans may use
    hop_s: Array  # (K + 1, 2) of a payload, there and back, over the slowest pair of every hop
    rates: Array  # (K + 1, 2) bits per second

    @property
    def spent_j(self) -> dict[str, float]:
        """The joules of members with work."""
        return {name: self.energy_j[name] for name in self.memory_bytes}

    @property
    def fits(self) -> bool:
        """Whether every member keeps within its memory."""
        return all(size <= self.room_bytes[name] for name, size in self.memory_bytes.items())


def compute_exchange_s(legs: Sequence[float], size_bytes: float) -> float:
    """Compute the seconds in which ``size_bytes`` pass a line whose links take ``legs``, both ways.

    In equal pieces they are a flow shop, exactly so for two replicas. With more it is an upper
    bound: a replica between others passes totals on after later pieces (`count_pieces_ahead`).
    """
    pieces = max(math.ceil(size_bytes / PIECE_BYTES), 1)
    late = sum(count_pieces_ahead(replica) for replica in range(1, len(legs) // 2))
    return (sum(legs) + (pieces - 1 + min(late, pieces - 1)) * max(legs)) / pieces


class ReplicatedPricing:
    """Prices the plan of cluster ``m``, whose devices are all present; see `ReplicaRows`."""

    def __init__(self, tables: Tables, m: int, plan: ClusterPlan, options: PricingOptions) -> None:
        self.tables, self.m, self.plan, self.options = tables, m, plan, options
        self.at = ReplicaRows(tables, m, plan)
        rows = self.at.make_rows()
        coded = set_planned_codecs(tables, rows, [plan] * len(rows))
        self.chain = make_chain(coded, rows, options)
        self.steps = float(self.chain.steps_r[0])
        self.bytes_s = sum_segments(tables, tables.blocks.trained_bytes_l, rows)[0]
        self.width = find_hop_bandwidth_hz(self.chain, np.full(len(rows), plan.bandwidth_hz))[
            :, :, None
        ]
        self.powers = self._gather_powers()
        snr = self.powers / self.chain.noise_over_gain[:, :, None]
        bits = self.chain.hops.bits[:, :, None]
        self.times = np.asarray(bits / compute_rate_bit_per_s(self.width, snr))
        self.meetings = [self.at.count_meetings(hop) for hop in range(self.at.edge)]

        self.hop_s = np.array([self._time_hop(hop) for hop in range(self.at.edge)])
        out, self.back = compute_hand_out_s(tables, rows)
        self.handed_s = sum(float(out[self.at.find_row(s, r), s - 1]) for s, r in self.at.devices)
        self.exchange_s = max(self._compute_exchange_s(stage) for stage in self.at.segments)

    def bound_costs(self) -> tuple[float, dict[str, float]]:
        """Bound the seconds under any schedule, and sum the joules of every member with work.

        In the bound, the busiest device or hop is never idle.
        """
        busiest_s = max(self._sum_busy_s(stage) for stage in range(self.at.edge + 1))
        hop_s = self.plan.micro_batches * float(self.hop_s.max())
        return self._compute_latency_s(max(busiest_s, hop_s)), self._sum_energy_j()

    def price(self) -> ReplicatedCosts:
        """Price a round by the plan's schedule."""
        step_s = self._replay_step_s()
        need, room = self._count_memory()
        members = self.tables.snapshot.clusters[self.m].profile.members
        return ReplicatedCosts(
            cluster_id=self.plan.cluster_id,
            latency_s=self._compute_latency_s(step_s),
            step_s=step_s,
            exchange_s=self.exchange_s,
            slowest_stage=max(self.at.segments, key=self._sum_busy_s) - 1,
            energy_j={member.device_id: 0.0 for member in members} | self._sum_energy_j(),
            hop_s=self.hop_s,
            rates=(self.chain.hops.bits * self.chain.hops.share)[0, :, None] / self.hop_s,
            memory_bytes=need,
            room_bytes=room,
        )

    # -- hops -------------------------------------------------------------------------------

    def _gather_powers(self) -> Array:
        """Gather the planned powers, (V, K + 1, 2); the edge sends at its own full power."""
        powers, at = self.chain.power_max_w.copy(), self.at
        for row, hop in np.ndindex(*powers.shape[:2]):
            sender = at.find_name(hop, at.pick(hop, row))
            powers[row, hop, 0] = self.plan.tx_power_w[sender]
            if hop + 1 < at.edge:
                receiver = at.find_name(hop + 1, at.pick(hop + 1, row))
                powers[row, hop, 1] = self.plan.gradient_power_w[receiver]
        return powers

    def _time_hop(self, hop: int) -> tuple[float, float]:
        found = [self.times[self.at.find_row(hop, *pair), hop] for pair in self.meetings[hop]]
        there, home = np.max(found, axis=0).tolist()
        return there, home

    def save_power(self, hop_s: Array) -> ClusterPlan:
        """Set the least powers that keep hops to ``hop_s``, (K + 1, 2), up to the maximum.

        A sender that reaches several replicas has the power for the worst of them.
        """
        chain, at = self.chain, self.at
        bits, noise = chain.hops.bits[:, :, None], chain.noise_over_gain[:, :, None]
        need = compute_power_w(bits, self.width, noise, hop_s[None])
        need = np.minimum(need, chain.power_max_w)
        ahead: dict[str, float] = {}
        back: dict[str, float] = {}
        for hop, meetings in enumerate(self.meetings):
            for sender, receiver in meetings:
                there, home = need[at.find_row(hop, sender, receiver), hop].tolist()
                name = at.find_name(hop, sender)
                ahead[name] = max(ahead.get(name, 0.0), there)
                if hop + 1 < at.edge:
                    name = at.find_name(hop + 1, receiver)
                    back[name] = max(back.get(name, 0.0), home)
        return replace(self.plan, tx_power_w=ahead, gradient_power_w=back)

    # -- seconds ----------------------------------------------------------------------------

    def _time_passes(self, stage: int, replica: int) -> tuple[float, float]:
        """Return the seconds of a micro-batch, forward and backward."""
        place = self.at.find_row(stage, replica), stage
        return float(self.chain.forward_stage_s[place]), float(self.chain.backward_stage_s[place])

    def _sum_busy_s(self, stage: int) -> float:
        """Sum the seconds of a step in which the busiest replica computes."""
        replicas = range(self.at.replicas[stage])
        return max(self.at.count_own(stage, r) * sum(self._time_passes(stage, r)) for r in replicas)

    def _compute_latency_s(self, step_s: float) -> float:
        """Compute the seconds of a round with such steps."""
        collected_s = float(self.back[0].sum())
        fixed_s = float(compute_server_s(self.tables, self.m)) + self.handed_s + collected_s
        round_i = self.tables.members.round_mi[self.m]
        fixed_s += max(float(round_i[self.at.find_member(*place)]) for place in self.at.devices)
        return fixed_s + self.steps * (step_s + self.exchange_s + self._compute_optimiser_s())

    def _replay_step_s(self) -> float:
        passes = [self._time_passes(*place) for place in (*self.at.members, (self.at.edge, 0))]
        ahead, back = zip(*passes, strict=True)
        times = StepTimes(
            stage_s=(ahead, back),
            hop_s=(tuple(self.hop_s[:, 0].tolist()), tuple(self.hop_s[:, 1].tolist())),
            replicas=self.at.replicas,
        )
        return replay(times, self.plan.warmup_depth, self.plan.micro_batches).makespan_s

    def _time_legs(self, stage: int) -> list[tuple[float, float]]:
        """Compute the seconds up and down every link of a stage's line of replicas, in one step."""
        tables, m, noise = self.tables, self.m, self.tables.snapshot.radio.noise_w_per_hz
        line = [self.at.find_member(stage, replica) for replica in range(self.at.replicas[stage])]

        def seconds(sender: int, receiver: int) -> float:
            link = m, sender, receiver
            snr = tables.members.power_max_mi[m, sender] * tables.gain_mij[link] / noise
            bits = 8.0 * self.bytes_s[stage - 1] / tables.share_mij[link]
            return float(compute_send_time_s(bits, tables.d2d_hz_mij[link], snr))

        return [
            (seconds(behind, ahead), seconds(ahead, behind)) for ahead, behind in pairwise(line)
        ]

    def _compute_exchange_s(self, stage: int) -> float:
        """Compute the seconds of all pieces."""
        legs = [seconds for pair in self._time_legs(stage) for seconds in pair]
        return compute_exchange_s(legs, float(self.bytes_s[stage - 1])) if legs else 0.0

    def _compute_optimiser_s(self) -> float:
        """Compute the seconds of all stages, one after the other, each by its slowest replica."""
        speed = self.tables.members.speed_mi[self.m]
        first, last = (float(end.trained_bytes[self.m]) for end in self.tables.ends)
        ends = first / speed[0] + last / float(
            compute_edge_speeds(self.tables, self.options)[self.m]
        )
        slowest = np.full(self.at.edge, np.inf)
        for stage, replica in self.at.devices:
            slowest[stage] = min(slowest[stage], speed[self.at.find_member(stage, replica)])
        return float(OPTIMISER_FLOP_PER_BYTE * (ends + (self.bytes_s / slowest[1:]).sum()))

    # -- joules and bytes -------------------------------------------------------------------

    def _sum_energy_j(self) -> dict[str, float]:
        at, full_w = self.at, self.tables.members.power_max_mi[self.m]
        found = {at.find_name(*place): self._compute_energy_j(*place) for place in at.members}
        profile = self.tables.snapshot.clusters[self.m].profile
        edge = at.find_name(0, 0) if profile.edge_at_home else profile.edge_device
        if profile.edge_device:
            found[edge] = float(self.chain.edge_j[0])

        def send(stage: int, replica: int, seconds: float) -> None:
            found[at.find_name(stage, replica)] += (
                float(full_w[at.find_member(stage, replica)]) * seconds
            )

        send(0, 0, self.handed_s)
        for stage in at.segments:
            send(stage, 0, float(self.back[0, stage - 1]))
            for replica, (up_s, down_s) in enumerate(self._time_legs(stage)):
                send(stage, replica + 1, self.steps * up_s)
                send(stage, replica, self.steps * down_s)
        for hop, meetings in enumerate(self.meetings):
            for (sender, receiver), count in meetings.items():
                place = at.find_row(hop, sender, receiver), hop
                there, home = (self.steps * count * self.powers[place] * self.times[place]).tolist()
                found[at.find_name(hop, sender)] += there
                if hop + 1 < at.edge:
                    found[at.find_name(hop + 1, receiver)] += home
                elif edge:
                    found[edge] += home
        return found

    def _compute_energy_j(self, stage: int, replica: int) -> float:
        if not stage and self.tables.edges.home_m[self.m]:
            return float(self.chain.computing_j[0, 0])  # both parts
        members, member = self.tables.members, self.at.find_member(stage, replica)
        busy_s = self.at.count_own(stage, replica) * sum(self._time_passes(stage, replica))
        embedding = float(self.tables.embeddings.trained_bytes[self.m])
        held = float(self.bytes_s[stage - 1]) if stage else embedding
        flop = busy_s * members.speed_mi[self.m, member] + OPTIMISER_FLOP_PER_BYTE * held
        return float(self.steps * members.energy_per_flop_mi[self.m, member] * flop)

    def _count_memory(self) -> tuple[dict[str, int], dict[str, float]]:
        """Count the peak bytes of every member, and those that plans may use."""
        at, rows, depths = self.at, self.chain.rows, self.plan.warmup_depth
        flight = np.tile(np.array(depths, dtype=np.float64), (len(rows), 1))
        for row, stage in np.ndindex(*flight.shape):
            flight[row, stage] = min(depths[stage], at.count_own(stage, at.pick(stage, row)))
        need = count_peak_bytes(self.tables, rows, self.options, flight)
        room = count_capacity_bytes(self.tables, rows, self.options)
        places = {at.find_name(s, r): (at.find_row(s, r), s) for s, r in at.members}
        peak = {name: int(need[place]) for name, place in places.items()}
        return peak, {name: float(room[place]) for name, place in places.items()}
