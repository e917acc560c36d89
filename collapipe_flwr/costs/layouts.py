"""Layouts: which blocks run where, with which micro-batches, as rows of arrays.

One row is one candidate for one cluster; a batch of rows may mix clusters. Suffix legend:
``_r`` row, ``_s`` segment slot (0..S-1, used ones first), stages are CU, slots, edge (S + 2),
hops are between consecutive stages (S + 1), the last *used* hop ends at the edge.

Plans name devices, with one object per cluster; `make_plan_rows` and `make_segments` translate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.domain import ClusterPlan, Segment, Snapshot
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.links import CODECS, LinkConfig
from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.radio import SHARES, find_codec
from collapipe_flwr.costs.tables import Tables

UNUSED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Rows of segment layouts with their micro-batching."""

    cluster_r: Ints
    member_rs: Ints  # member index (1..) on each slot, UNUSED behind the last segment
    stop_rs: Ints  # first block behind each slot's segment; L on unused slots
    micro_batch_size_r: Ints
    micro_batches_r: Ints

    def __len__(self) -> int:
        return int(self.cluster_r.shape[0])

    @property
    def used_rs(self) -> Mask:
        """Which slots hold a segment."""
        return np.asarray(self.member_rs != UNUSED)

    @property
    def depth_r(self) -> Ints:
        return np.asarray(self.used_rs.sum(1), dtype=np.int64)

    def count_segments(self, row: int) -> int:
        """Count the segments of one row."""
        return int(np.count_nonzero(self.member_rs[row] != UNUSED))

    @property
    def first_rs(self) -> Ints:
        """First block of each slot's segment."""
        return np.concatenate([np.zeros((len(self), 1), np.int64), self.stop_rs[:, :-1]], axis=1)

    def take(self, rows: Ints | Mask) -> Layouts:
        """Return the chosen rows, in that order."""
        return Layouts(
            cluster_r=self.cluster_r[rows],
            member_rs=self.member_rs[rows],
            stop_rs=self.stop_rs[rows],
            micro_batch_size_r=self.micro_batch_size_r[rows],
            micro_batches_r=self.micro_batches_r[rows],
        )

    @property
    def batch_r(self) -> Array:
        """Examples of one optimiser step."""
        return np.asarray(self.micro_batch_size_r * self.micro_batches_r, dtype=np.float64)

    def with_batches(self, size_r: Ints | int, count_r: Ints | int) -> Layouts:
        """Return the same segments with other micro-batches, one value per row or one for all."""
        size, count = (np.full(len(self), value) for value in (size_r, count_r))
        return replace(self, micro_batch_size_r=size, micro_batches_r=count)


def stack_layouts(parts: list[Layouts]) -> Layouts:
    """Stack the rows of ``parts``, slots padded to the widest."""
    width = max(part.member_rs.shape[1] for part in parts)
    return Layouts(
        cluster_r=np.concatenate([p.cluster_r for p in parts]),
        member_rs=np.concatenate([_widen(p.member_rs, width, UNUSED) for p in parts]),
        stop_rs=np.concatenate([_widen(p.stop_rs, width, _find_last_stop(p)) for p in parts]),
        micro_batch_size_r=np.concatenate([p.micro_batch_size_r for p in parts]),
        micro_batches_r=np.concatenate([p.micro_batches_r for p in parts]),
    )


def _widen(table: Ints, width: int, padding: int) -> Ints:
    if table.shape[1] == width:
        return table
    extra = np.full((len(table), width - table.shape[1]), padding, dtype=np.int64)
    return np.concatenate([table, extra], axis=1)


def _find_last_stop(rows: Layouts) -> int:
    """Return the stop of unused slots: that of the last segment."""
    return int(rows.stop_rs.max(initial=0))


def replace_rows(rows: Layouts, where: Ints, new: Layouts) -> Layouts:
    """Put ``new`` at positions ``where`` of ``rows``, no wider than needed."""
    source = np.arange(len(rows))
    source[where] = len(rows) + np.arange(len(new))
    merged = stack_layouts([rows, new]).take(source)
    width = max(int(merged.depth_r.max()), 1)
    return replace(merged, member_rs=merged.member_rs[:, :width], stop_rs=merged.stop_rs[:, :width])


def make_key(rows: Layouts) -> bytes:
    """Return a key that is equal for equal rows, whatever their padding."""
    return b"|".join(make_keys(rows))


def make_keys(rows: Layouts) -> list[bytes]:
    """Return a key of each row, equal for equal rows, whatever their padding."""
    width = 2 * rows.member_rs.shape[1]
    pairs = np.stack([rows.member_rs, rows.stop_rs], axis=2).reshape(len(rows), width)
    heads = [rows.cluster_r, rows.micro_batch_size_r, rows.micro_batches_r]
    table = np.ascontiguousarray(np.column_stack([*heads, pairs]), dtype=np.int64)
    widths = (len(heads) + 2 * rows.depth_r).tolist()
    return [row[:width].tobytes() for row, width in zip(table, widths, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """Payload, parties and radio of every hop of every row; unused hops carry 0 bits."""

    used: Mask  # (R, S + 1)
    returns: Mask  # (R, S + 1) whether a gradient comes back
    to_edge: Mask  # (R, S + 1)
    shared: Mask  # of these, those over the shared bandwidth: not to a control unit
    sender: Ints  # member index of the upstream party
    receiver: Ints  # member index of the downstream party; the edge's own index at the end
    bits: Array  # per micro-batch, in either direction, coded, over ``share``
    gain: Array
    share: Array  # of the promised rate, what the link reaches
    codec: Ints  # place in ``core.links.CODECS``


def gather_hops(tables: Tables, rows: Layouts) -> Hops:
    """Return the hops of the chain CU -> segments -> edge of every row."""
    depth = rows.depth_r[:, None]
    index = np.arange(rows.member_rs.shape[1] + 1)[None, :]
    used, to_edge = index <= depth, index == depth
    zero = np.zeros((len(rows), 1), np.int64)
    sender = np.where(used, np.concatenate([zero, rows.member_rs], axis=1), 0)
    cut = np.where(used, np.concatenate([zero, rows.stop_rs], axis=1), 0)
    receiver = np.concatenate([rows.member_rs, zero], axis=1)
    receiver = np.where(to_edge, tables.edge, np.where(used, receiver, 0))
    link = (rows.cluster_r[:, None], sender, receiver)
    codec = tables.codec_mij[link]
    share = tables.share_mij[link]
    at = tables.model_m[rows.cluster_r][:, None], cut
    bits = 8.0 * rows.micro_batch_size_r[:, None] * tables.blocks.cut_bytes_l[at] * SHARES[codec]
    bits = bits / share
    return Hops(
        used=used,
        returns=tables.blocks.returns_l[at],
        to_edge=to_edge,
        shared=to_edge & ~tables.edges.home_m[rows.cluster_r][:, None],
        sender=sender,
        receiver=receiver,
        bits=np.where(used, np.maximum(bits, 1.0), 0.0),
        gain=tables.gain_mij[link],
        share=share,
        codec=codec,
    )


def gather_members(table_mi: Array, rows: Layouts, padding: float = 0.0) -> Array:
    """Gather values of control unit and slots, (R, S + 1); ``padding`` on unused slots."""
    cluster = rows.cluster_r[:, None]
    slots = np.where(rows.used_rs, table_mi[cluster, np.maximum(rows.member_rs, 0)], padding)
    return np.concatenate([table_mi[rows.cluster_r, 0][:, None], slots], axis=1)


def scatter_members(values_rs: Array, rows: Layouts, shape: tuple[int, ...]) -> Array:
    """Scatter values of control unit and slots to their members, (M, I); 0 elsewhere."""
    table = np.zeros(shape)
    table[rows.cluster_r, 0] = values_rs[:, 0]
    row, slot = np.nonzero(rows.used_rs)
    table[rows.cluster_r[row], rows.member_rs[row, slot]] = values_rs[row, slot + 1]
    return table


def sum_spans(prefix_l: Array) -> Array:
    """Sum a per-block quantity over blocks l..k-1 for all l and k, (..., L + 1, L + 1)."""
    return np.asarray(prefix_l[..., None, :] - prefix_l[..., :, None])


def sum_segments(tables: Tables, prefix_l: Array, rows: Layouts) -> Array:
    """Sum a quantity of all models' blocks over each slot's segment, (R, S); 0 on unused slots."""
    model = tables.model_m[rows.cluster_r][:, None]
    return np.asarray(prefix_l[model, rows.stop_rs] - prefix_l[model, rows.first_rs])


def select_clusters(snapshot: Snapshot, cluster_ids: Sequence[str]) -> Snapshot:
    """Keep only those clusters, in that order; raise ScheduleError if one is gone."""
    by_id = {cluster.profile.cluster_id: cluster for cluster in snapshot.clusters}
    missing = [name for name in cluster_ids if name not in by_id]
    if missing:
        raise ScheduleError(f"planned clusters {missing} are not connected: plan the round again")
    return replace(snapshot, clusters=tuple(by_id[name] for name in cluster_ids))


def make_plan_rows(tables: Tables, plans: Sequence[ClusterPlan]) -> Layouts:
    """Make a row of each plan, the plan of cluster m of ``tables``; raises ScheduleError."""
    width = max(len(plan.segments) for plan in plans)
    members = np.full((len(plans), width), UNUSED, dtype=np.int64)
    stops = np.full((len(plans), width), tables.num_blocks, dtype=np.int64)
    for m, plan in enumerate(plans):
        members[m, : len(plan.segments)] = _find_segment_members(tables, m, plan)
        stops[m, : len(plan.segments)] = [segment.stop_block for segment in plan.segments]
        if plan.segments[-1].stop_block != tables.num_blocks:
            raise ScheduleError(
                f"plan of cluster {plan.cluster_id!r} covers {plan.segments[-1].stop_block} "
                f"blocks, the model has {tables.num_blocks}: plan the round again"
            )
    return Layouts(
        cluster_r=np.arange(len(plans)),
        member_rs=members,
        stop_rs=stops,
        micro_batch_size_r=np.array([plan.micro_batch_size for plan in plans]),
        micro_batches_r=np.array([plan.micro_batches for plan in plans]),
    )


def _find_segment_members(tables: Tables, m: int, plan: ClusterPlan) -> Ints:
    """Return the index of every segment's first device; its replicas must be connected, too."""
    index = index_members(tables, m)
    missing = [name for name in plan.device_ids if name not in index]
    if missing:
        raise ScheduleError(
            f"plan of cluster {plan.cluster_id!r} uses devices {missing} that are not "
            "connected: plan the round again"
        )
    return np.array([index[s.device_id] for s in plan.segments], dtype=np.int64)


def index_members(tables: Tables, m: int) -> dict[str, int]:
    """Return the place on the member axis of every device of a cluster."""
    devices = tables.snapshot.clusters[m].profile.devices
    return {device.device_id: n + 1 for n, device in enumerate(devices)}


def set_codecs(tables: Tables, rows: Layouts, codec_rh: Ints) -> Tables:
    """Return ``tables`` in which the hops of ``rows``, one per cluster, have these codecs."""
    hops, codec = gather_hops(tables, rows), tables.codec_mij.copy()
    cluster = np.broadcast_to(rows.cluster_r[:, None], hops.sender.shape)[hops.used]
    codec[cluster, hops.sender[hops.used], hops.receiver[hops.used]] = codec_rh[hops.used]
    return replace(tables, codec_mij=codec)


def set_planned_codecs(tables: Tables, rows: Layouts, plans: Sequence[ClusterPlan]) -> Tables:
    """Return ``tables`` with the codecs of ``plans``, whose rows these are."""
    codec = gather_hops(tables, rows).codec.copy()
    for m, plan in enumerate(plans):
        codec[m, : len(plan.hops)] = [find_codec(hop.codec) for hop in plan.hops]
    return set_codecs(tables, rows, codec)


def make_hop_configs(hops: Hops, row: int) -> tuple[LinkConfig, ...]:
    """Return the hops of one row; their rates are not known yet."""
    used = hops.codec[row, hops.used[row]].tolist()
    return tuple(LinkConfig(codec=CODECS[index]) for index in used)


def list_stage_names(tables: Tables, rows: Layouts, row: int) -> list[str]:
    """Return the names of the control unit and the devices of one row, in pipeline order."""
    members = tables.snapshot.clusters[int(rows.cluster_r[row])].profile.members
    used = rows.member_rs[row, : rows.count_segments(row)].tolist()
    return [members[i].device_id for i in (0, *used)]


def make_segments(tables: Tables, rows: Layouts, row: int) -> tuple[Segment, ...]:
    """Return the segments of one row, with device names."""
    devices, stops = list_stage_names(tables, rows, row)[1:], rows.stop_rs[row].tolist()
    return tuple(
        Segment(device_id=device, first_block=stops[s - 1] if s else 0, stop_block=stops[s])
        for s, device in enumerate(devices)
    )
