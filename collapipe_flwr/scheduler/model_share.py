"""No device holds most of the model: a cap on what a plan may use of any device's memory.

The cap is a share of what training the whole model on one device takes (``costs.work.whole_bytes``:
parameters, gradients, optimizer state and activations). Under GPipe that is with the plan's own
micro-batches. Under 1F1B, where the whole model keeps one micro-batch but early stages several, it
is with one of the reference's size. A cluster in which no plan keeps its share gets about the least
that allows one; plans say which share they kept, and what the whole model takes with their own
micro-batches. Control units and the edge hold their own parts and are not capped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from collapipe_flwr.core.domain import ClusterPlan, Plan
from collapipe_flwr.costs.arrays import Array, Mask
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import SAME, PricingOptions, segment_bytes, whole_bytes
from collapipe_flwr.scheduler.protocol import Reference, SchedulerConfig

WIDENING = 1.25  # of all caps at a time when the search finds no plan within them
SLACK = 1.05  # of the least share under GPipe, which should not leave the smallest batch alone
NO_CAP = 1.0  # a share from which on the devices' own memories are the only limit


def least_shares(tables: Tables, reference: Reference, settings: SchedulerConfig) -> Array:
    """The setting's share for every cluster, or about the least above it with a plan, (M,)."""
    share = settings.max_model_share
    if share >= NO_CAP:
        return np.full(tables.num_clusters, np.inf)
    members = tables.members
    room = (1.0 - settings.memory_margin) * members.memory_mi[:, 1:]
    room = np.where(members.present_mi[:, 1:], room, 0.0)
    slack = SLACK if settings.schedule == "gpipe" else 1.0
    choices = list(_choices(tables, reference, settings))
    keeps = np.zeros(tables.num_clusters, dtype=bool)
    for needs, whole, ends_fit in choices:
        keeps |= ends_fit & _plainly_fits(needs, np.minimum(room, share * whole))
    shares = np.full(tables.num_clusters, share)
    for m in np.flatnonzero(~keeps):
        own = room[m][room[m] > 0.0]
        least = (_least_cap(n, own) / whole for n, whole, ends_fit in choices if ends_fit[m])
        shares[m] = max(share, slack * min(least, default=np.inf))
    return shares


def _choices(
    tables: Tables, reference: Reference, settings: SchedulerConfig
) -> Iterator[tuple[Array, float, Mask]]:
    """Needs of segments, the whole model's, and whose control unit and edge hold their parts.

    Of all micro-batches that differ in them under GPipe; of the smallest under 1F1B.
    """
    if settings.schedule != "gpipe":
        whole = float(whole_bytes(tables, reference.micro_batch_size, 1, settings))
        yield segment_needs(tables, settings), whole, np.ones(tables.num_clusters, dtype=bool)
        return
    usable, model = 1.0 - settings.memory_margin, tables.snapshot.model
    own = usable * tables.members.memory_mi[:, 0]
    edge = usable * tables.snapshot.edge.memory_bytes / tables.num_clusters
    batches = {size * count: (size, count) for size, count in settings.batches}
    for examples, batch in sorted(batches.items()):
        parts = (model.embedding, model.decoder)
        start, end = (part.state_bytes + examples * part.stash_bytes for part in parts)
        whole = float(whole_bytes(tables, *batch, settings))
        yield segment_needs(tables, settings, batch), whole, (start <= own) & (end <= edge)


def capped(
    tables: Tables, share_m: Array, reference: Reference, settings: SchedulerConfig
) -> Tables:
    """``tables`` in which no device may hold more than its cluster's share.

    Under GPipe, how much that is depends on a plan's micro-batches; memory beyond what it can be
    counts for none.
    """
    pairs = settings.batches if settings.schedule == "gpipe" else [(reference.micro_batch_size, 1)]
    size, count = (np.array(each, dtype=np.float64) for each in zip(*pairs, strict=True))
    most_m = share_m * whole_bytes(tables, size, count, settings).max()
    memory = tables.members.memory_mi.copy()
    room_m = most_m * (1.0 + SAME) / (1.0 - settings.memory_margin)
    memory[:, 1:] = np.minimum(memory[:, 1:], room_m[:, None])
    by_batch = share_m if settings.schedule == "gpipe" else np.full(len(share_m), np.inf)
    members = replace(tables.members, memory_mi=memory)
    return replace(tables, members=members, most_share_m=by_batch.copy())


def widened(share_m: Array) -> Array:
    """Caps for another try when the search finds nothing within ``share_m``; infinite at last."""
    wider = share_m * WIDENING
    return np.where(wider < NO_CAP, wider, np.inf)


def with_model_shares(plan: Plan, share_m: Array, tables: Tables, options: PricingOptions) -> Plan:
    """``plan`` that says which share each of its clusters kept; None where there was no cap."""

    def told(cluster: ClusterPlan, share: float) -> ClusterPlan:
        whole = whole_bytes(tables, cluster.micro_batch_size, cluster.micro_batches, options)
        kept = share if np.isfinite(share) else None
        return replace(cluster, model_share=kept, whole_bytes=round(float(whole)))

    return replace(plan, clusters=tuple(map(told, plan.clusters, share_m.tolist())))


def segment_needs(
    tables: Tables, settings: SchedulerConfig, batch: tuple[int, int] | None = None
) -> Array:
    """Bytes of a segment of blocks k..l-1 with micro-batches, or the smallest, (L + 1, L + 1).

    Infinite on and below the diagonal. For 1F1B only the one micro-batch in flight that no
    schedule can do without counts.
    """
    size, count = batch or min(settings.batches)
    flight = count if settings.schedule == "gpipe" else 1
    need = segment_bytes(tables.blocks, settings, size, flight)
    return np.where(np.tri(len(need), k=-1, dtype=bool).T, need, np.inf)


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
