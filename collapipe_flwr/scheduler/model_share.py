"""No device holds most of the model: a cap on what a plan may use of any device's memory.

The cap is a share of what training the whole model on one device takes with the plan's own
micro-batches (``work.count_whole_bytes``: parameters, gradients, optimizer state and activations).
Under GPipe those are the activations of all micro-batches of a step. Under 1F1B the whole model
keeps one micro-batch at a time, and a stage as many as its planned depth, all of which count. A
cluster in which no plan keeps its share gets about the least that allows one; plans say which share
they kept. Control units and the edge hold their own parts and are not capped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import numpy as np

from collapipe_flwr.core.domain import ClusterPlan, Plan
from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import (
    SAME,
    PricingOptions,
    count_end_bytes,
    count_segment_bytes,
    count_whole_bytes,
    find_least_flight,
)
from collapipe_flwr.scheduler.protocol import SchedulerConfig

WIDENING = 1.25  # of all caps at a time when the search finds no plan within them
SLACK = 1.05  # of the least share, which should not leave the smallest batch alone
NO_CAP = 1.0  # a share from which on the devices' own memories are the only limit


def find_least_shares(tables: Tables, settings: SchedulerConfig) -> Array:
    """Return each cluster's share: the setting's, or about the least above it with a plan, (M,)."""
    share = settings.max_model_share
    if share >= NO_CAP:
        return np.full(tables.num_clusters, np.inf)
    members = tables.members
    room = (1.0 - settings.memory_margin) * members.memory_mi[:, 1:]
    room = np.where(members.present_mi[:, 1:], room, 0.0)
    models, batches = range(len(tables.models)), sorted(settings.batches)
    choices = [_Choice(tables, settings, batch, model) for batch in batches for model in models]
    keeps = np.zeros(tables.num_clusters, dtype=bool)
    first = members.first_mi[:, 1:]
    for each in choices:
        keeps |= each.ends_fit_m & _plainly_fits(each.needs[-1], each.cap(share, room), first)
    shares = np.full(tables.num_clusters, share)
    for m in np.flatnonzero(~keeps):
        here, there = [each for each in choices if each.ends_fit_m[m]], room[m] > 0.0
        shares[m] = _find_least_share(here, room[m][there], first[m][there], share)
    return shares


def _find_least_share(
    choices: Sequence[_Choice], room_n: Array, first_n: Ints, share: float
) -> float:
    """Return ``share`` where some micro-batches keep it, else a little more than the least kept."""
    if any(packs(each.needs, each.cap(share, room_n), first_n) for each in choices):
        return share
    least = np.inf
    for each in choices:
        if packs(each.needs, each.cap(least, room_n), first_n):
            least = _find_least_cap(each.needs, room_n, first_n) / each.whole
    return max(share, SLACK * least)


def holds_all(tables: Tables, m: int, settings: SchedulerConfig, first_n: Ints) -> bool:
    """Return whether a plan fits cluster ``m``, whose devices begin at these blocks, in memory."""
    room_n = (1.0 - settings.memory_margin) * tables.members.memory_mi[m, 1 : 1 + len(first_n)]
    model = int(tables.model_m[m])
    choices = (_Choice(tables, settings, batch, model) for batch in settings.batches)
    return any(each.ends_fit_m[m] and packs(each.needs, room_n, first_n) for each in choices)


@dataclass(frozen=True)
class _Choice:
    """What segments need, and the whole model, with one choice of micro-batches.

    ``model`` is the place of that model, which clusters train, in the tables.
    """

    tables: Tables
    settings: SchedulerConfig
    batch: tuple[int, int]
    model: int

    @cached_property
    def one(self) -> int:
        """A cluster that trains the model."""
        return int(np.flatnonzero(self.tables.model_m == self.model)[0])

    @cached_property
    def whole(self) -> float:
        """Bytes of training the whole model."""
        return float(count_whole_bytes(self.tables, self.one, *self.batch, self.settings))

    @cached_property
    def needs(self) -> list[Array]:
        """`compute_segment_needs` of the last device, the one before and so on; then the same."""
        deepest = 0
        if self.settings.schedule == "1f1b":
            devices = min(self.tables.members.memory_mi.shape[1] - 1, self.tables.num_blocks)
            deepest = max(min(self.batch[1] - 2, devices - 1), 0)
        return [
            compute_segment_needs(self.tables, self.settings, self.one, self.batch, behind)
            for behind in range(1, deepest + 2)
        ]

    @cached_property
    def ends_fit_m(self) -> Mask:
        """Clusters of the model whose control unit and edge hold its ends.

        One device has all blocks there.
        """
        tables, (size, count) = self.tables, self.batch
        usable = 1.0 - self.settings.memory_margin
        start, end = (
            count_end_bytes(part, size, find_least_flight(count, behind, self.settings))
            for part, behind in ((tables.embeddings, 2), (tables.decoders, 0))
        )
        edge = usable * tables.edges.memory_m
        fits = (start <= usable * tables.members.memory_mi[:, 0]) & (end <= edge)
        return np.asarray(fits & (tables.model_m == self.model))

    def cap(self, share: float, room: Array) -> Array:
        """Cap the memory that devices may use at a share of the whole model."""
        return np.minimum(room, share * self.whole)


def cap_shares(tables: Tables, share_m: Array, settings: SchedulerConfig) -> Tables:
    """Cap memories in ``tables`` so that no device may hold more than its cluster's share.

    How much that is depends on a plan's micro-batches; memory beyond what it can be counts for
    none.
    """
    size, count = np.array(settings.batches, dtype=np.float64).T
    every = np.arange(tables.num_clusters)[:, None]
    most_m = share_m * count_whole_bytes(tables, every, size, count, settings).max(1)
    memory = tables.members.memory_mi.copy()
    room_m = most_m * (1.0 + SAME) / (1.0 - settings.memory_margin)
    memory[:, 1:] = np.minimum(memory[:, 1:], room_m[:, None])
    members = replace(tables.members, memory_mi=memory)
    return replace(tables, members=members, most_share_m=share_m.copy())


def widen_caps(share_m: Array) -> Array:
    """Widen caps after a search that found nothing within ``share_m``; at last to infinity."""
    wider = share_m * WIDENING
    return np.where(wider < NO_CAP, wider, np.inf)


def set_model_shares(plan: Plan, share_m: Array, tables: Tables, options: PricingOptions) -> Plan:
    """Note in ``plan`` which share each of its clusters kept, and what memory it left free.

    The share is None where there was no cap.
    """

    def told(m: int, cluster: ClusterPlan, share: float) -> ClusterPlan:
        whole = count_whole_bytes(
            tables, m, cluster.micro_batch_size, cluster.micro_batches, options
        )
        kept = share if np.isfinite(share) else None
        return replace(
            cluster,
            model_share=kept,
            whole_bytes=round(float(whole)),
            memory_margin=options.memory_margin,
        )

    return replace(plan, clusters=tuple(map(told, count(), plan.clusters, share_m.tolist())))


def compute_segment_needs(
    tables: Tables,
    settings: SchedulerConfig,
    m: int,
    batch: tuple[int, int] | None = None,
    behind: int = 1,
) -> Array:
    """Compute bytes of segments of blocks k..l-1 with a micro-batch size, (L + 1, L + 1).

    Infinite on and below the diagonal. ``batch`` is (size, count), by default the smallest. 1F1B
    counts the fewest micro-batches that can be in flight with ``behind`` stages behind the device.
    The edge is the last of these.
    """
    size, count = batch or min(settings.batches)
    flight = float(find_least_flight(count, behind, settings))
    blocks = tables.blocks.of(int(tables.model_m[m]))
    need = count_segment_bytes(blocks, settings, size, flight)
    return np.where(np.tri(len(need), k=-1, dtype=bool).T, need, np.inf)


def _plainly_fits(needs: Array, room_mn: Array, first_mn: Ints) -> Mask:
    """Find clusters whose devices hold all blocks even if every block were the largest, (M,)."""
    blocks = len(needs) - 1
    largest = max(float(needs[k, k + 1]) for k in range(blocks))
    held = np.floor(room_mn / largest) if largest > 0 else np.full(room_mn.shape, np.inf)
    held = np.minimum(held, blocks)
    behind = np.minimum(np.where(first_mn > 0, held, 0.0).sum(1), blocks - first_mn.max(1))
    return np.asarray(np.where(first_mn > 0, 0.0, held).sum(1) + behind >= blocks)


def _find_least_cap(needs: Sequence[Array], room_n: Array, first_n: Ints) -> float:
    """Find the smallest cap under which memories ``room_n`` that hold all blocks still do."""
    caps = np.unique(np.stack(needs))
    caps = caps[caps < np.inf]
    low, high = -1, len(caps) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if packs(needs, np.minimum(room_n, caps[middle]), first_n):
            high = middle
        else:
            low = middle
    return float(caps[high])


def packs(needs: Sequence[Array], room_n: Array, first_n: Ints) -> bool:
    """Whether contiguous segments on these devices, in some order, hold all blocks.

    None begins before the device's own first block. ``needs[t]`` are those of a device with t
    others behind it, the last of them for all further ones. Exact where ``room_n`` are equal or
    blocks are, and with one of ``needs``; otherwise larger devices stand further behind, those that
    may hold every block in front.
    """
    stop, place = len(needs[0]) - 1, 0
    for n in np.lexsort((-room_n, -first_n)):
        need = needs[min(place, len(needs) - 1)][:, stop]
        starts = np.flatnonzero(need[first_n[n] :] <= room_n[n])
        if len(starts):
            stop, place = int(starts[0] + first_n[n]), place + 1
        if stop == 0:
            return True
    return False
