"""No device holds most of the model: a cap on what a plan may use of any device's memory.

The cap is a share of what training the whole model on one device takes with the reference
micro-batches (``costs.work``): all of a step's under GPipe, one after the other under 1F1B. A
cluster in which no plan keeps it gets the least cap that allows one; plans say which share they
kept. Control units and the edge hold their own parts and are not capped.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from collapipe_flwr.core.domain import Plan
from collapipe_flwr.costs.arrays import Array, Mask
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import PricingOptions, segment_bytes, whole_bytes
from collapipe_flwr.scheduler.protocol import Reference, SchedulerConfig

WIDENING = 1.25  # of all caps at a time when the search finds no plan within them
NO_CAP = 1.0  # a share from which on the devices' own memories are the only limit


def least_shares(tables: Tables, reference: Reference, settings: SchedulerConfig) -> Array:
    """The setting's share for every cluster, or the least above it that a plan can keep, (M,)."""
    share = settings.max_model_share
    if share >= NO_CAP:
        return np.full(tables.num_clusters, np.inf)
    whole = _whole(tables, reference, settings)
    needs = segment_needs(tables, settings)
    members = tables.members
    room = (1.0 - settings.memory_margin) * members.memory_mi[:, 1:]
    room = np.where(members.present_mi[:, 1:], room, 0.0)
    shares = np.full(tables.num_clusters, share)
    for m in np.flatnonzero(~_plainly_fits(needs, np.minimum(room, share * whole))):
        shares[m] = max(share, _least_cap(needs, room[m][room[m] > 0.0]) / whole)
    return shares


def capped(tables: Tables, share_m: Array, reference: Reference, options: PricingOptions) -> Tables:
    """``tables`` in which no device offers more memory than its cluster's share."""
    members = tables.members
    cap_m = share_m * _whole(tables, reference, options) / (1.0 - options.memory_margin)
    memory = members.memory_mi.copy()
    memory[:, 1:] = np.minimum(memory[:, 1:], cap_m[:, None] * (1.0 + 1e-12))
    return replace(tables, members=replace(members, memory_mi=memory))


def widened(share_m: Array) -> Array:
    """Caps for another try when the search finds nothing within ``share_m``; infinite at last."""
    wider = share_m * WIDENING
    return np.where(wider < NO_CAP, wider, np.inf)


def with_model_shares(plan: Plan, share_m: Array) -> Plan:
    """``plan`` that says which share each of its clusters kept; None where there was no cap."""
    kept = [float(s) if np.isfinite(s) else None for s in share_m]
    clusters = (replace(c, model_share=s) for c, s in zip(plan.clusters, kept, strict=True))
    return replace(plan, clusters=tuple(clusters))


def segment_needs(tables: Tables, settings: SchedulerConfig) -> Array:
    """Bytes of a segment of blocks k..l-1 at the smallest micro-batches, (L + 1, L + 1).

    Infinite on and below the diagonal. For 1F1B only the one micro-batch in flight that no
    schedule can do without counts.
    """
    size, count = min(settings.batches)
    flight = count if settings.schedule == "gpipe" else 1
    need = segment_bytes(tables.blocks, settings, size, flight)
    return np.where(np.tri(len(need), k=-1, dtype=bool).T, need, np.inf)


def _whole(tables: Tables, reference: Reference, options: PricingOptions) -> float:
    flight = reference.micro_batches if options.schedule == "gpipe" else 1
    return whole_bytes(tables.snapshot.model, reference.micro_batch_size * flight)


def _plainly_fits(needs: Array, room_mn: Array) -> Mask:
    """Clusters whose devices hold all blocks even if every block were the largest, (M,)."""
    blocks = len(needs) - 1
    largest = max(float(needs[k, k + 1]) for k in range(blocks))
    held = np.floor(room_mn / largest) if largest > 0 else np.full(room_mn.shape, np.inf)
    return np.asarray(np.minimum(held, blocks).sum(1) >= blocks)


def _least_cap(needs: Array, room_n: Array) -> float:
    """The smallest cap under which ``room_n`` holds all blocks; infinite where none does."""
    if not packs(needs, room_n):
        return np.inf
    caps = np.unique(needs[np.isfinite(needs)])
    low, high = -1, int(np.searchsorted(caps, room_n.max(), side="right"))
    while high - low > 1:
        middle = (low + high) // 2
        if middle < len(caps) and not packs(needs, np.minimum(room_n, caps[middle])):
            low = middle
        else:
            high = middle
    return float(caps[high]) if high < len(caps) else np.inf


def packs(needs: Array, room_n: Array) -> bool:
    """Whether contiguous segments on these devices, in some order, hold all blocks.

    Exact where ``room_n`` are equal or blocks are; otherwise larger devices come first.
    """
    at, blocks = 0, len(needs) - 1
    for room in -np.sort(-room_n):
        while_fits = np.flatnonzero(needs[at] <= room)
        at = int(while_fits[-1]) if len(while_fits) else at
        if at == blocks:
            return True
    return False
