"""Energy of every member in a round: computing plus radiating. Our reconstruction.

The edge is mains-powered and the link to the Flower server is not a radio of ours: neither counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.costs.compute import Bulk, Work, steps_of
from collapipe_flwr.costs.layouts import Layouts
from collapipe_flwr.costs.tables import Tables

Array = NDArray[np.float64]


def compute_energy_j(tables: Tables, rows: Layouts, work: Work) -> Array:
    """Joules of computing in a round, (R, S + 1): control unit, then slots."""
    steps = steps_of(tables, rows)[:, None]
    batch = (rows.micro_batch_size_r * rows.micro_batches_r)[:, None].astype(np.float64)
    flop = batch * (work.forward_flop + work.backward_flop) + work.optimiser_flop
    return np.asarray(steps * _energy_per_flop(tables, rows) * flop[:, :-1])


def bulk_energy_j(tables: Tables, rows: Layouts, bulk: Bulk) -> Array:
    """Joules of handing segments out and collecting them, (R, S + 1)."""
    power = tables.members.power_max_mi
    member = np.maximum(rows.member_rs, 0)
    control = power[rows.cluster_r, 0] * bulk.handout_s.sum(1)
    devices = power[rows.cluster_r[:, None], member] * bulk.collect_s
    return np.concatenate([control[:, None], devices], axis=1)


def radio_energy_j(count_r: Array, forward_hop_j: Array, backward_hop_j: Array) -> Array:
    """Joules of the pipeline's transmissions, (R, S + 1), from energies per transmission.

    Hop k is sent forward by stage k and backward by stage k + 1; the edge's share is dropped.
    """
    sent = forward_hop_j.copy()
    sent[:, 1:] += backward_hop_j[:, :-1]
    return np.asarray(count_r[:, None] * sent)


def _energy_per_flop(tables: Tables, rows: Layouts) -> Array:
    member = np.maximum(rows.member_rs, 0)
    per_flop = tables.members.energy_per_flop_mi
    control = per_flop[rows.cluster_r, 0][:, None]
    devices = np.where(rows.used_rs, per_flop[rows.cluster_r[:, None], member], 0.0)
    return np.concatenate([control, devices], axis=1)
