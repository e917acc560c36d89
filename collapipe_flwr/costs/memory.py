"""Memory: the hard constraint of every plan.

A device holds the state of its blocks (weights, gradients, optimiser) and, for every micro-batch
in flight, the activations between forward and backward. With re-computation only each block's
input stays, plus one block's activations while it is computed again.

What a device keeps of a round for the next one is less than the state of its blocks, and is gone or
part of the new blocks before these are complete, so it is not priced again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.costs.compute import PricingOptions
from collapipe_flwr.costs.layouts import Layouts, segment_sums
from collapipe_flwr.costs.tables import BlockTable, Tables

Array = NDArray[np.float64]


def peak_bytes(tables: Tables, rows: Layouts, options: PricingOptions, flight_rs: Array) -> Array:
    """Peak bytes of every stage, (R, S + 2); ``flight_rs`` micro-batches are in flight there."""
    model, size = tables.snapshot.model, rows.micro_batch_size_r[:, None].astype(np.float64)
    state = segment_sums(tables.blocks.state_bytes_l, rows)
    stash = size * _stash(tables, rows, options, flight_rs[:, 1:-1])
    ends = []
    for cost, flight in ((model.embedding, flight_rs[:, :1]), (model.decoder, flight_rs[:, -1:])):
        ends.append(cost.state_bytes + size * flight * cost.stash_bytes)
    return np.concatenate([ends[0], state + stash, ends[1]], axis=1)


def kept_bytes(blocks: BlockTable, options: PricingOptions) -> tuple[Array, float]:
    """Per example: prefix sums of what a micro-batch in flight keeps, and what one more needs."""
    if not options.recompute:
        return blocks.stash_bytes_l, 0.0
    inputs_l = np.concatenate([[0.0], np.cumsum(blocks.cut_bytes_l[:-1])])
    return inputs_l, float(np.diff(blocks.stash_bytes_l).max())


def _stash(tables: Tables, rows: Layouts, options: PricingOptions, flight_rs: Array) -> Array:
    kept_l, once = kept_bytes(tables.blocks, options)
    return np.asarray(flight_rs * segment_sums(kept_l, rows) + once * rows.used_rs)


def capacity_bytes(tables: Tables, rows: Layouts, options: PricingOptions) -> Array:
    """Bytes that plans may use on every stage, (R, S + 2); the edge is divided by clusters."""
    keep = 1.0 - options.memory_margin
    memory = tables.members.memory_mi
    edge = tables.snapshot.edge.memory_bytes / tables.num_clusters
    member = np.maximum(rows.member_rs, 0)
    return keep * np.concatenate(
        [
            memory[rows.cluster_r, 0][:, None],
            memory[rows.cluster_r[:, None], member],
            np.full((len(rows), 1), float(edge)),
        ],
        axis=1,
    )


def fits(tables: Tables, rows: Layouts, options: PricingOptions) -> NDArray[np.bool_]:
    """Rows whose every stage keeps within its memory at the schedule's least depth, (R,)."""
    need = peak_bytes(tables, rows, options, least_in_flight(rows, options))
    room = capacity_bytes(tables, rows, options)
    needed = np.pad(rows.used_rs, ((0, 0), (1, 1)), constant_values=True)
    return np.asarray(((need <= room) | ~needed).all(1))


def least_in_flight(rows: Layouts, options: PricingOptions) -> Array:
    """The depth that a schedule cannot do without, (R, S + 2).

    GPipe keeps all J micro-batches on every stage; 1F1B one per stage from here to the edge.
    """
    count = rows.micro_batches_r.astype(np.float64)[:, None]
    width = rows.member_rs.shape[1] + 2
    if options.schedule == "gpipe":
        return np.broadcast_to(count, (len(rows), width))
    ahead = np.maximum(rows.depth_r[:, None] + 2.0 - np.arange(width)[None, :], 1.0)
    return np.asarray(np.minimum(ahead, count))
