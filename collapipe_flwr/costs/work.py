"""Costs of layout rows: stage times, once-a-round transfers, energy and peak memory.

Stages are the control unit (embedding), the segment slots and the edge (decoder), (R, S + 2). An
edge that is no member is mains-powered and the link to the Flower server is no battery-driven
radio: neither counts in energies. A control unit that is the edge is one processor
(`find_busier_ends`), which spends the energy of both parts. Our reconstruction.

A pass of a micro-batch of s examples through a stage of n blocks takes ``s FLOP / speed`` plus n
times the overhead of its device: what starting an operation costs, however small its operands are.
A forward pass takes a third of ``overhead_s`` and a backward pass two thirds, as they have
operations. While it computes, a board draws ``speed x energy per FLOP`` watts, overheads included.

Memory is the hard constraint of every plan. A device holds the state of its blocks (weights,
gradients, optimizer) and, for every micro-batch in flight, the activations between forward and
backward; besides, the temporary tensors of a pass (gradients of activations: the largest of a
segment counts). With re-computation only each block's input stays, plus one block's activations
while it is computed again. Tensors that a device keeps from one round to the next are smaller than
the state of its blocks, and freed or reused before the new blocks are complete, so they are not
priced again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike

from collapipe_flwr.core.domain import (
    MEMORY_MARGIN,
    BlockCost,
    ClusterPlan,
    ModelProfile,
    PlannedExecution,
)
from collapipe_flwr.core.keys import key, one_of
from collapipe_flwr.core.schedule import SCHEDULES
from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.layouts import Layouts, gather_members, sum_segments, sum_spans
from collapipe_flwr.costs.radio import compute_send_time_s
from collapipe_flwr.costs.tables import BlockTable, EndTable, Tables

SAME = 1e-12  # relative: a plan may hold its share exactly
OPTIMISER_FLOP_PER_BYTE = 3.0  # AdamW: about 12 operations on each 4-byte parameter
NO_ROOM = -1.0  # bytes: a device that may hold no block here
AHEAD, BACK = 1 / 3, 2 / 3  # shares of ``overhead_s`` in a forward and a backward pass
NOTHING = BlockCost(
    forward_flop=0.0,
    backward_flop=0.0,
    parameter_bytes=0,
    state_bytes=0,
    stash_bytes=0.0,
    output_bytes=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricingOptions:
    """How a plan is executed, as far as prices depend on it."""

    recompute: bool = False  # forward again in the backward pass instead of keeping activations
    edge_shared: bool = False  # the snapshot's edge divides its speed by its clusters
    memory_margin: float = MEMORY_MARGIN  # share of every memory that plans leave free
    schedule: str = key("1f1b", one_of(*SCHEDULES))

    @property
    def execution(self) -> PlannedExecution:
        """The execution of plans with these options."""
        return PlannedExecution(schedule=self.schedule, recompute=self.recompute)

    @staticmethod
    def from_plan(plan: ClusterPlan) -> PricingOptions:
        """Return the options of a plan, as far as it states them."""
        asked = plan.execution
        return PricingOptions(
            schedule=asked.schedule, recompute=asked.recompute, memory_margin=plan.memory_margin
        )


def price_computing(
    tables: Tables, rows: Layouts, options: PricingOptions
) -> tuple[Array, Array, Array, Array]:
    """Return computing seconds, and joules of the round, (R, S + 2).

    Seconds are those of a micro-batch forward and backward, (R, S + 2) each, and of all stages'
    optimisers in one step, (R,).
    """
    blocks, cluster = tables.blocks, rows.cluster_r
    ends = [end.of(cluster) for end in tables.ends]

    def stages(prefix_l: Array, values: list[Array]) -> Array:
        first, last = (value[:, None] for value in values)
        return np.concatenate([first, sum_segments(tables, prefix_l, rows), last], axis=1)

    forward = stages(blocks.forward_flop_l, [end.forward_flop for end in ends])
    backward = stages(blocks.backward_flop_l, [end.backward_flop for end in ends])
    count = stages(blocks.count_l, [np.ones(len(rows))] * 2)
    ahead, back = AHEAD * count, BACK * count
    if options.recompute:
        backward[:, 1:-1] += forward[:, 1:-1]
        back[:, 1:-1] += ahead[:, 1:-1]
    trained = stages(blocks.trained_bytes_l, [end.trained_bytes for end in ends])
    optimiser = OPTIMISER_FLOP_PER_BYTE * trained
    edge = compute_edge_speeds(tables, options)[rows.cluster_r][:, None]
    members = gather_members(tables.members.speed_mi, rows, padding=1.0)
    speed = np.concatenate([members, edge], axis=1)
    edge = tables.edges.overhead_m[rows.cluster_r][:, None]
    overhead = np.concatenate([gather_members(tables.members.overhead_mi, rows), edge], axis=1)
    size = rows.micro_batch_size_r[:, None].astype(np.float64)
    flop = rows.batch_r[:, None] * (forward + backward) + optimiser
    flop += rows.micro_batches_r[:, None] * (ahead + back) * overhead * speed
    members = gather_members(tables.members.energy_per_flop_mi, rows)
    edge = tables.edges.energy_per_flop_m[rows.cluster_r][:, None]
    joule = count_steps(tables, rows)[:, None] * np.concatenate([members, edge], axis=1)
    forward_s = size * forward / speed + ahead * overhead
    backward_s = size * backward / speed + back * overhead
    home = tables.edges.home_m[cluster]
    busier = find_busier_ends(tables)[cluster][home]
    for seconds in (forward_s, backward_s):
        seconds[home, busier] = (seconds[:, 0] + seconds[:, -1])[home]
    flop[home, 0] += flop[home, -1]
    return forward_s, backward_s, (optimiser / speed).sum(1), joule * flop


def find_busier_ends(tables: Tables) -> Ints:
    """Return the stage, 0 or -1, whose passes stand for both where one processor runs both, (M,).

    It is as busy as both, so that it paces the pipeline as that does. Only in the first and the
    last moments of a step the lighter part's pass counts twice.
    """
    first, last = (end.forward_flop + end.backward_flop for end in tables.ends)
    return np.where(first > last, 0, -1)


def compute_edge_speeds(tables: Tables, options: PricingOptions) -> Array:
    """Return the operations per second that each cluster gets of its edge, (M,).

    A cluster file's edge is divided by its clusters, that of the snapshot only on request.
    """
    edges = tables.edges
    shared = edges.own_m | np.bool_(options.edge_shared)
    return np.asarray(edges.speed_m / np.where(shared, edges.clusters_m, 1.0))


def count_local_steps(examples: Array, batch: ArrayLike) -> Array:
    """Count steps of one pass over the cluster's examples: ``ceil(D / (b J))``, at least one."""
    return np.asarray(np.maximum(np.ceil(examples / np.asarray(batch, dtype=np.float64)), 1.0))


def count_steps(tables: Tables, rows: Layouts) -> Array:
    """Return the local steps H of every row, (R,)."""
    return count_local_steps(tables.examples_m[rows.cluster_r], rows.batch_r)


def price_bulk(tables: Tables, rows: Layouts) -> tuple[Array, Array]:
    """Price a round's fixed part: seconds, (R,), and joules of transfers at full power, (R, S + 1).

    The control unit gets the weights from the Flower server, hands each device its segment,
    collects the segments and returns the weights. Devices begin and end their rounds at once.
    """
    out, back = compute_hand_out_s(tables, rows)
    power = gather_members(tables.members.power_max_mi, rows)
    sending = np.concatenate([out.sum(1)[:, None], back], axis=1)
    slowest_s = gather_members(tables.members.round_mi, rows)[:, 1:].max(1, initial=0.0)
    return compute_server_s(tables, rows.cluster_r) + out.sum(1) + back.sum(
        1
    ) + slowest_s, power * sending


def compute_server_s(tables: Tables, clusters: Ints | int) -> Array:
    """Return the seconds that weights take from the Flower server to ``clusters`` and back."""
    blocks = tables.blocks.parameter_bytes_l[tables.model_m[clusters], -1]
    whole = tables.embeddings.parameter_bytes[clusters] + blocks
    return np.asarray(2.0 * 8.0 * whole / tables.server_rate_m[clusters])


def compute_hand_out_s(tables: Tables, rows: Layouts) -> tuple[Array, Array]:
    """Return the seconds of each slot's weights to its device, and back, (R, S) each.

    Frozen ones travel once, before the first round with a layout, which is not priced.
    """
    cluster = rows.cluster_r
    member = np.maximum(rows.member_rs, 0)
    share = tables.share_mij[cluster[:, None], 0, member]
    bits = 8.0 * sum_segments(tables, tables.blocks.trained_bytes_l, rows) / share
    width = tables.d2d_hz_mij[cluster[:, None], 0, member]
    noise = tables.snapshot.radio.noise_w_per_hz
    gain_out = tables.gain_mij[cluster[:, None], 0, member]
    gain_back = tables.gain_mij[cluster[:, None], member, 0]
    power = tables.members.power_max_mi
    out = compute_send_time_s(bits, width, power[cluster, 0][:, None] * gain_out / noise)
    back = compute_send_time_s(bits, width, power[cluster[:, None], member] * gain_back / noise)
    return out, back


def sum_radio_energy_j(count_r: Array, forward_hop_j: Array, backward_hop_j: Array) -> Array:
    """Return the joules of the pipeline's transmissions, (R, S + 1), from those of one each.

    Hop k is sent forward by stage k and backward by stage k + 1; the edge's share is dropped.
    """
    sent = forward_hop_j.copy()
    sent[..., 1:] += backward_hop_j[..., :-1]
    return np.asarray(count_r[:, None] * sent)


def count_peak_bytes(
    tables: Tables, rows: Layouts, options: PricingOptions, flight_rs: Array
) -> Array:
    """Return peak bytes of every stage, (R, S + 2), with ``flight_rs`` micro-batches in flight."""
    size_r, cluster = rows.micro_batch_size_r.astype(np.float64), rows.cluster_r
    state = sum_segments(tables, tables.blocks.state_bytes_l, rows)
    kept_l, once = count_kept_bytes(tables.blocks, options)
    once_r = once[tables.model_m[cluster]][:, None]
    kept = flight_rs[:, 1:-1] * sum_segments(tables, kept_l, rows) + once_r * rows.used_rs
    first, last = (
        count_end_bytes(end.of(cluster), size_r, flight)[:, None]
        for end, flight in zip(tables.ends, (flight_rs[:, 0], flight_rs[:, -1]), strict=True)
    )
    return np.concatenate([first, state + size_r[:, None] * kept, last], axis=1)


def count_end_bytes(
    cost: BlockCost | EndTable, size: Array | float, flight: Array | float
) -> Array:
    """Return peak bytes of embedding or decoder, ``flight`` micro-batches of ``size`` in flight."""
    kept, passing = count_held_bytes(cost, size, flight)
    return np.asarray(cost.state_bytes + (kept + passing))


def count_held_bytes(
    cost: BlockCost | EndTable, size: Array | float, flight: Array | float
) -> tuple[Array, Array]:
    """Return bytes of ``flight`` micro-batches in flight, and of temporary tensors in a pass."""
    in_flight = np.asarray(size * np.asarray(flight))
    kept, passing = in_flight * cost.stash_bytes, size * np.asarray(cost.passing_bytes)
    kept_beside = in_flight * cost.piece_stash_bytes
    whole = kept + passing <= kept_beside + cost.piece_bytes
    return np.where(whole, kept, kept_beside), np.where(whole, passing, cost.piece_bytes)


def count_kept_bytes(blocks: BlockTable, options: PricingOptions) -> tuple[Array, Array]:
    """Return bytes per example: prefix sums of what stays in flight, and what a pass adds."""
    if not options.recompute:
        return blocks.stash_bytes_l, blocks.passing_bytes
    inputs_l = np.zeros_like(blocks.cut_bytes_l)
    np.cumsum(blocks.cut_bytes_l[..., :-1], axis=-1, out=inputs_l[..., 1:])
    return inputs_l, np.diff(blocks.stash_bytes_l).max(-1) + blocks.passing_bytes


def count_segment_bytes(
    blocks: BlockTable, options: PricingOptions, size: float, flight: float
) -> Array:
    """Return peak bytes of a device with blocks l..k-1, (L + 1, L + 1), ``flight`` in flight."""
    kept_l, once = count_kept_bytes(blocks, options)
    return sum_spans(blocks.state_bytes_l) + size * (flight * sum_spans(kept_l) + once)


def count_capacity_bytes(tables: Tables, rows: Layouts, options: PricingOptions) -> Array:
    """Return the bytes that plans may use on every stage, (R, S + 2).

    An edge is divided by its clusters. `NO_ROOM` stands for blocks that a device must not hold.
    """
    edge = tables.edges.memory_m[rows.cluster_r][:, None]
    members = gather_members(tables.members.memory_mi, rows)
    room = np.concatenate([members, edge], axis=1)
    room = (1.0 - options.memory_margin) * room
    batch = (rows.micro_batch_size_r, rows.micro_batches_r)
    cap = count_share_bytes(tables, rows.cluster_r, *batch, options)
    room[:, 1:-1] = np.minimum(room[:, 1:-1], cap[:, None])
    if tables.members.guarded:
        member = np.maximum(rows.member_rs, 0)
        first = tables.members.first_mi[rows.cluster_r[:, None], member]
        room[:, 1:-1] = np.where(rows.first_rs < first, NO_ROOM, room[:, 1:-1])
    return room


def count_share_bytes(
    tables: Tables,
    clusters: Ints | int,
    size: ArrayLike,
    count: ArrayLike,
    options: PricingOptions,
) -> Array:
    """Return the cap on a device's bytes: a share of the whole model with these micro-batches."""
    whole = count_whole_bytes(tables, clusters, size, count, options)
    return np.asarray(tables.most_share_m[clusters] * whole * (1.0 + SAME))


def fits(tables: Tables, rows: Layouts, options: PricingOptions) -> Mask:
    """Tell which rows fit into every stage's memory at the schedule's least depth, (R,)."""
    need = count_peak_bytes(tables, rows, options, count_least_in_flight(rows, options))
    room = count_capacity_bytes(tables, rows, options)
    needed = np.pad(rows.used_rs, ((0, 0), (1, 1)), constant_values=True)
    return np.asarray(((need <= room) | ~needed).all(1))


def count_most_in_flight(tables: Tables, rows: Layouts, options: PricingOptions) -> Ints:
    """Return the most micro-batches that fit on each stage, at least 1 and at most J, (R, S + 2).

    No stage may be deeper than the one before it: it would wait for forwards that the shallower
    one holds back until a backward returns, and both would wait for ever.
    """
    most, shape = rows.micro_batches_r[:, None], (len(rows), rows.member_rs.shape[1] + 2)
    empty = count_peak_bytes(tables, rows, options, np.zeros(shape))
    each = count_peak_bytes(tables, rows, options, np.ones(shape)) - empty
    room = count_capacity_bytes(tables, rows, options) - empty
    fits = np.floor(np.divide(room, each, out=np.full(shape, np.inf), where=each > 0))
    own = np.clip(fits, 1, most)
    # Unused slots hold nothing back, and the edge comes behind the used ones.
    own[:, 1:-1] = np.where(rows.used_rs, own[:, 1:-1], most)
    return np.minimum.accumulate(own, axis=1).astype(np.int64)


def count_least_in_flight(rows: Layouts, options: PricingOptions) -> Array:
    """Return the fewest micro-batches in flight that the schedule needs, (R, S + 2).

    GPipe keeps all J micro-batches on every stage; 1F1B one per stage from here to the edge.
    """
    width = rows.member_rs.shape[1] + 2
    behind = np.maximum(rows.depth_r[:, None] + 1 - np.arange(width)[None, :], 0)
    return find_least_flight(rows.micro_batches_r[:, None].astype(np.float64), behind, options)


def find_least_flight(count: ArrayLike, behind: ArrayLike, options: PricingOptions) -> Array:
    """Return how many of ``count`` a stage with ``behind`` stages behind it has in flight."""
    most = np.asarray(count if options.schedule == "gpipe" else np.add(behind, 1.0))
    return np.asarray(np.minimum(most + np.zeros_like(behind, dtype=np.float64), count))


def count_whole_bytes(
    tables: Tables,
    clusters: Ints | int,
    size: ArrayLike,
    count: ArrayLike,
    options: PricingOptions,
) -> Array:
    """Return the bytes that training a cluster's whole model on one device takes.

    With ``count`` micro-batches of ``size``: all in flight under GPipe, one at a time under 1F1B.
    """
    model, flight = (
        tables.model_m[clusters],
        np.asarray(count if options.schedule == "gpipe" else 1),
    )
    kept_l, once = count_kept_bytes(tables.blocks, options)
    first, last = (end.of(clusters) for end in tables.ends)
    blocks = tables.blocks.state_bytes_l[model, -1]
    state = blocks + (first.state_bytes + last.state_bytes)
    stash = kept_l[model, -1] + (first.stash_bytes + last.stash_bytes)
    once = (once - tables.blocks.passing_bytes)[model]  # shares are of kept bytes only
    return np.asarray(state + np.asarray(size, dtype=np.float64) * (flight * stash + once))


def merge_ends(model: ModelProfile) -> ModelProfile:
    """Move embedding and decoder of ``model`` into its first and last block.

    A device that holds every block of the result trains the whole model; control unit and edge
    have nothing to do and nothing crosses the air but weights.
    """
    blocks = list(model.blocks)
    blocks[0] = _sum(model.embedding, blocks[0])
    blocks[-1] = _sum(blocks[-1], model.decoder)
    silent = tuple(replace(block, output_bytes=0.0) for block in blocks)
    return replace(model, embedding=NOTHING, blocks=silent, decoder=NOTHING)


def _sum(one: BlockCost, other: BlockCost) -> BlockCost:
    return BlockCost(**{f.name: getattr(one, f.name) + getattr(other, f.name) for f in fields(one)})
