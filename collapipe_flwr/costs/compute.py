"""Compute: stage times, work and the once-a-round transfers of every layout row.

Stages are the control unit (embedding), the segment slots and the edge (decoder), (R, S + 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.costs.latency import local_steps, optimiser_flop
from collapipe_flwr.costs.layouts import Layouts, segment_sums
from collapipe_flwr.costs.radio import send_time_s
from collapipe_flwr.costs.tables import Tables

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricingOptions:
    """How a plan is executed, as far as prices depend on it."""

    recompute: bool = False  # forward again in the backward pass instead of keeping activations
    edge_shared: bool = False  # the edge divides its speed by the number of clusters
    memory_margin: float = 0.05  # share of every memory that plans leave free
    schedule: str = "gpipe"  # or "1f1b"
    half_duplex: bool = False  # links carry one direction at a time; irrelevant to GPipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs per example of every stage, and of one optimiser step; speeds of the stages."""

    forward_flop: Array
    backward_flop: Array
    optimiser_flop: Array
    speed: Array


def work_of(tables: Tables, rows: Layouts, options: PricingOptions) -> Work:
    """Work and speed of every stage of every row."""
    model, blocks = tables.snapshot.model, tables.blocks
    ends = (model.embedding, model.decoder)

    def with_ends(inner_rs: Array, values: list[float]) -> Array:
        left, right = (np.full((len(rows), 1), value) for value in values)
        return np.concatenate([left, inner_rs, right], axis=1)

    forward = with_ends(segment_sums(blocks.forward_flop_l, rows), [e.forward_flop for e in ends])
    backward = with_ends(
        segment_sums(blocks.backward_flop_l, rows), [e.backward_flop for e in ends]
    )
    if options.recompute:
        backward[:, 1:-1] += forward[:, 1:-1]
    parameters = segment_sums(blocks.parameter_bytes_l, rows)
    optimiser = with_ends(parameters, [float(e.parameter_bytes) for e in ends])
    return Work(
        forward_flop=forward,
        backward_flop=backward,
        optimiser_flop=optimiser_flop(optimiser),
        speed=_speeds(tables, rows, options),
    )


def _speeds(tables: Tables, rows: Layouts, options: PricingOptions) -> Array:
    member = np.maximum(rows.member_rs, 0)
    speed = tables.members.speed_mi
    edge = tables.snapshot.edge.speed_flop_per_s
    if options.edge_shared:
        edge = edge / tables.num_clusters
    return np.concatenate(
        [
            speed[rows.cluster_r, 0][:, None],
            speed[rows.cluster_r[:, None], member],
            np.full((len(rows), 1), edge),
        ],
        axis=1,
    )


def steps_of(tables: Tables, rows: Layouts) -> Array:
    """Local steps H of every row, (R,)."""
    examples = tables.examples_m[rows.cluster_r]
    return local_steps(
        examples,
        rows.micro_batch_size_r.astype(np.float64),
        rows.micro_batches_r.astype(np.float64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bulk:
    """Transfers that happen once a round, at full power: weights out and back."""

    server_s: Array  # (R,) download from and upload to the Flower server
    handout_s: Array  # (R, S) control unit to each device
    collect_s: Array  # (R, S) each device to the control unit


def bulk_of(tables: Tables, rows: Layouts) -> Bulk:
    """Once-a-round transfer times of every row."""
    cluster = rows.cluster_r
    member = np.maximum(rows.member_rs, 0)
    share = tables.share_mij[cluster[:, None], 0, member]
    bits = 8.0 * segment_sums(tables.blocks.parameter_bytes_l, rows) / share
    width = tables.d2d_hz_mij[cluster[:, None], 0, member]
    noise = tables.snapshot.radio.noise_w_per_hz
    gain_out = tables.gain_mij[cluster[:, None], 0, member]
    gain_back = tables.gain_mij[cluster[:, None], member, 0]
    power = tables.members.power_max_mi
    power_out = power[cluster, 0][:, None]
    power_back = power[cluster[:, None], member]
    whole = tables.snapshot.model.embedding.parameter_bytes + tables.blocks.parameter_bytes_l[-1]
    return Bulk(
        server_s=2.0 * 8.0 * whole / tables.server_rate_m[cluster],
        handout_s=send_time_s(bits, width, power_out * gain_out / noise),
        collect_s=send_time_s(bits, width, power_back * gain_back / noise),
    )
