"""Between plans (names, one object per cluster) and layout rows (indices, arrays)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from collapipe_flwr.core.domain import ClusterPlan, Segment, Snapshot
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.costs.codecs import CODECS, codec_index
from collapipe_flwr.costs.layouts import UNUSED, Hops, Ints, Layouts, hops_of
from collapipe_flwr.costs.tables import Tables


def restricted(snapshot: Snapshot, cluster_ids: Sequence[str]) -> Snapshot:
    """The snapshot with only those clusters, in that order; raises ScheduleError if one is gone."""
    by_id = {cluster.profile.cluster_id: cluster for cluster in snapshot.clusters}
    missing = [name for name in cluster_ids if name not in by_id]
    if missing:
        raise ScheduleError(f"planned clusters {missing} are not connected: plan the round again")
    return replace(snapshot, clusters=tuple(by_id[name] for name in cluster_ids))


def rows_of_plans(tables: Tables, plans: Sequence[ClusterPlan]) -> Layouts:
    """One row per plan, cluster m of ``tables`` being plan m's; raises ScheduleError."""
    width = max(len(plan.segments) for plan in plans)
    members = np.full((len(plans), width), UNUSED, dtype=np.int64)
    stops = np.full((len(plans), width), tables.num_blocks, dtype=np.int64)
    for m, plan in enumerate(plans):
        members[m, : len(plan.segments)] = _member_indices(tables, m, plan)
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


def _member_indices(tables: Tables, m: int, plan: ClusterPlan) -> Ints:
    devices = tables.snapshot.clusters[m].profile.devices
    index = {device.device_id: n + 1 for n, device in enumerate(devices)}
    missing = [s.device_id for s in plan.segments if s.device_id not in index]
    if missing:
        raise ScheduleError(
            f"plan of cluster {plan.cluster_id!r} uses devices {missing} that are not "
            "connected: plan the round again"
        )
    return np.array([index[s.device_id] for s in plan.segments], dtype=np.int64)


def with_codecs(tables: Tables, rows: Layouts, codec_rh: Ints) -> Tables:
    """``tables`` in which the hops of ``rows``, one per cluster, have these codecs."""
    hops, codec = hops_of(tables, rows), tables.codec_mij.copy()
    cluster = np.broadcast_to(rows.cluster_r[:, None], hops.sender.shape)[hops.used]
    codec[cluster, hops.sender[hops.used], hops.receiver[hops.used]] = codec_rh[hops.used]
    return replace(tables, codec_mij=codec)


def planned_codecs(tables: Tables, rows: Layouts, plans: Sequence[ClusterPlan]) -> Tables:
    """``tables`` with the codecs of ``plans``, whose rows these are."""
    codec = hops_of(tables, rows).codec.copy()
    for m, plan in enumerate(plans):
        codec[m, : len(plan.hops)] = [codec_index(hop.codec) for hop in plan.hops]
    return with_codecs(tables, rows, codec)


def hop_plans(hops: Hops, row: int) -> tuple[LinkConfig, ...]:
    """The hops of one row; their rates are not known yet."""
    used = hops.codec[row, hops.used[row]].tolist()
    return tuple(LinkConfig(codec=CODECS[index]) for index in used)


def segments_of(tables: Tables, rows: Layouts, row: int) -> tuple[Segment, ...]:
    """The segments of one row, with device names."""
    devices = tables.snapshot.clusters[int(rows.cluster_r[row])].profile.devices
    members, stops = rows.member_rs[row].tolist(), rows.stop_rs[row].tolist()
    return tuple(
        Segment(
            device_id=devices[members[s] - 1].device_id,
            first_block=stops[s - 1] if s else 0,
            stop_block=stops[s],
        )
        for s in range(rows.depth_of(row))
    )
