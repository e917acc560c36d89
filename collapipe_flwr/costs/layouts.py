"""Layouts: which blocks run where, with which micro-batches, as rows of arrays.

One row is one candidate for one cluster; a batch of rows may mix clusters. Suffix legend:
``_r`` row, ``_s`` segment slot (0..S-1, used ones first), stages are CU, slots, edge (S + 2),
hops are between consecutive stages (S + 1), the last *used* hop ends at the edge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.costs.codecs import SHARES
from collapipe_flwr.costs.tables import Tables

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

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
    def used_rs(self) -> NDArray[np.bool_]:
        """Which slots hold a segment."""
        return np.asarray(self.member_rs != UNUSED)

    @property
    def depth_r(self) -> Ints:
        """Number of segments."""
        return np.asarray(self.used_rs.sum(1), dtype=np.int64)

    def depth_of(self, row: int) -> int:
        """Number of segments of one row."""
        return int(np.count_nonzero(self.member_rs[row] != UNUSED))

    @property
    def first_rs(self) -> Ints:
        """First block of each slot's segment."""
        return np.concatenate([np.zeros((len(self), 1), np.int64), self.stop_rs[:, :-1]], axis=1)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Layouts:
        """The chosen rows, in that order."""
        return Layouts(
            cluster_r=self.cluster_r[rows],
            member_rs=self.member_rs[rows],
            stop_rs=self.stop_rs[rows],
            micro_batch_size_r=self.micro_batch_size_r[rows],
            micro_batches_r=self.micro_batches_r[rows],
        )

    def with_batches(self, size_r: Ints, count_r: Ints) -> Layouts:
        """The same segments with other micro-batches."""
        return replace(self, micro_batch_size_r=size_r, micro_batches_r=count_r)


def stack(parts: list[Layouts]) -> Layouts:
    """All rows of ``parts``, slots padded to the widest."""
    width = max(part.member_rs.shape[1] for part in parts)
    return Layouts(
        cluster_r=np.concatenate([p.cluster_r for p in parts]),
        member_rs=np.concatenate([_widen(p.member_rs, width, UNUSED) for p in parts]),
        stop_rs=np.concatenate([_widen_stops(p.stop_rs, width) for p in parts]),
        micro_batch_size_r=np.concatenate([p.micro_batch_size_r for p in parts]),
        micro_batches_r=np.concatenate([p.micro_batches_r for p in parts]),
    )


def _widen(table: Ints, width: int, padding: int) -> Ints:
    if table.shape[1] == width:
        return table
    extra = np.full((len(table), width - table.shape[1]), padding, dtype=np.int64)
    return np.concatenate([table, extra], axis=1)


def _widen_stops(table: Ints, width: int) -> Ints:
    return _widen(table, width, int(table.max(initial=0)))


def replaced(rows: Layouts, where: Ints, new: Layouts) -> Layouts:
    """``rows`` with ``new`` at positions ``where``, no wider than needed."""
    width = max(rows.member_rs.shape[1], new.member_rs.shape[1])
    merged = Layouts(
        cluster_r=_with(rows.cluster_r, where, new.cluster_r),
        member_rs=_with(
            _widen(rows.member_rs, width, UNUSED), where, _widen(new.member_rs, width, UNUSED)
        ),
        stop_rs=_with(_widen_stops(rows.stop_rs, width), where, _widen_stops(new.stop_rs, width)),
        micro_batch_size_r=_with(rows.micro_batch_size_r, where, new.micro_batch_size_r),
        micro_batches_r=_with(rows.micro_batches_r, where, new.micro_batches_r),
    )
    width = max(int(merged.depth_r.max()), 1)
    return replace(merged, member_rs=merged.member_rs[:, :width], stop_rs=merged.stop_rs[:, :width])


def _with(table: Ints, where: Ints, new: Ints) -> Ints:
    result = table.copy()
    result[where] = new
    return result


def key_of(rows: Layouts) -> bytes:
    """The same for rows that are the same, whatever their padding."""
    width = max(int(rows.depth_r.max()), 1)
    parts = (
        rows.cluster_r,
        rows.member_rs[:, :width],
        rows.stop_rs[:, :width],
        rows.micro_batch_size_r,
        rows.micro_batches_r,
    )
    return b"|".join(np.ascontiguousarray(part, dtype=np.int64).tobytes() for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """Payload, parties and radio of every hop of every row; unused hops carry 0 bits."""

    used: NDArray[np.bool_]  # (R, S + 1)
    to_edge: NDArray[np.bool_]  # (R, S + 1): the hop over the shared bandwidth
    sender: Ints  # member index of the upstream party
    receiver: Ints  # member index of the downstream party; the edge's own index at the end
    bits: Array  # per micro-batch, in either direction, coded, over ``share``
    gain: Array
    share: Array  # of the promised rate, what the link reaches
    codec: Ints  # place in ``codecs.CODECS``


def hops_of(tables: Tables, rows: Layouts) -> Hops:
    """The chain CU -> segments -> edge of every row."""
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
    bits = 8.0 * rows.micro_batch_size_r[:, None] * tables.blocks.cut_bytes_l[cut] * SHARES[codec]
    bits = bits / share
    return Hops(
        used=used,
        to_edge=to_edge,
        sender=sender,
        receiver=receiver,
        bits=np.where(used, np.maximum(bits, 1.0), 0.0),
        gain=tables.gain_mij[link],
        share=share,
        codec=codec,
    )


def segment_sums(prefix_l: Array, rows: Layouts) -> Array:
    """Sums of a per-block quantity over each slot's segment, (R, S); 0 on unused slots."""
    return np.asarray(prefix_l[rows.stop_rs] - prefix_l[rows.first_rs])
