"""Reasons why no plan fits a cluster: which memory is too small, and by how much.

Needs are those of the smallest micro-batches that plans may choose, under 1F1B with so many in
flight as one device with all blocks cannot do without; memories are those that plans may use. Only
what falls short is named.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collapipe_flwr.core.domain import BlockCost
from collapipe_flwr.costs.arrays import Mask
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import count_end_bytes, find_least_flight
from collapipe_flwr.scheduler.model_share import compute_segment_needs, holds_all
from collapipe_flwr.scheduler.protocol import SchedulerConfig

_MIB = 2.0**20
_MOST_DIGITS = 6


def explain_refusal(tables: Tables, m: int, settings: SchedulerConfig) -> str:
    """Explain in one sentence why no plan fits cluster ``m``."""
    if why := explain_trust(tables, m, settings):
        return why
    name = tables.snapshot.clusters[m].profile.cluster_id
    size, count = min(settings.batches)
    why = "; ".join(_list_shortages(tables, m, settings))
    return (
        f"cluster {name!r}: no plan fits its memories even with {count} micro-batches of {size} "
        f"({why}): add a device, allow smaller micro-batch-sizes or micro-batches, or choose a "
        "smaller model"
    )


def explain_trust(tables: Tables, m: int, settings: SchedulerConfig) -> str:
    """Explain what would fit where trusted blocks alone rule plans out; else return ""."""
    profile = tables.snapshot.clusters[m].profile
    most = min(profile.trusted_blocks, tables.num_blocks)
    trusted = np.array([device.trusted for device in profile.devices])

    def fit(blocks: int, trust: Mask) -> bool:
        return holds_all(tables, m, settings, np.where(trust, 0, blocks))

    if not most or fit(most, trusted) or not fit(0, trusted):
        return ""
    depth = max(blocks for blocks in range(most) if fit(blocks, trusted))
    room = np.array([float(device.memory_bytes) for device in profile.devices])
    more = trusted.copy()
    for n in np.argsort(-np.where(trusted, -1.0, room), kind="stable"):
        if fit(most, more):
            break
        more[n] = True
    names = [device.device_id for device in profile.devices]
    here = ", ".join(name for name, is_so in zip(names, trusted, strict=True) if is_so)
    wanted = [name for name, is_so in zip(names, more & ~trusted, strict=True) if is_so]
    need = float(compute_segment_needs(tables, settings, m)[0, most])
    have = (1.0 - settings.memory_margin) * float(room[trusted].sum())
    short = f", which need {compare_sizes(need, have, 'they have')}" if here and need > have else ""
    return (
        f"cluster {profile.cluster_id!r}: privacy.trusted-blocks is {most}, but "
        f"{f'its trusted devices ({here}) cannot' if here else 'no trusted device is there to'} "
        f"hold these blocks{short}: trust {' and '.join(wanted)}, too, or set "
        f"privacy.trusted-blocks to {depth} at most"
    )


def _list_shortages(tables: Tables, m: int, settings: SchedulerConfig) -> Iterator[str]:
    snapshot, usable = tables.snapshot, 1.0 - settings.memory_margin
    profile = snapshot.clusters[m].profile
    model = snapshot.find_model(profile)
    room = [usable * device.memory_bytes for device in profile.devices]
    needs = compute_segment_needs(tables, settings, m)
    blocks = range(len(needs) - 1)
    largest = max(float(needs[block, block + 1]) for block in blocks)
    together = float(needs[0, -1])
    edge = usable * float(tables.edges.memory_m[m])
    home = profile.edge_at_home
    head = "the control unit's half for the head" if home else "the edge, for each cluster,"
    parts = (
        (
            "the control unit",
            _count_need(model.embedding, 2, settings),
            usable * profile.control_unit.memory_bytes,
        ),
        (head, _count_need(model.decoder, 0, settings), edge),
        ("a device for one block", largest, max(room, default=0.0)),
        (f"the {len(room)} devices together", together, sum(room)),
    )
    short = [part for part in parts if part[1] > part[2]]
    for name, need, have in short:
        verbs = ("need", "have") if name.endswith("together") else ("needs", "has")
        yield f"{name} {verbs[0]} {compare_sizes(need, have, verbs[1])}"
    if not short:
        yield (
            f"all blocks need {_format_mib(together, 1)} MiB and the {len(room)} devices have "
            f"{_format_mib(sum(room), 1)} MiB in all, but no cut into contiguous segments keeps "
            "every device within its own"
        )


def _count_need(end: BlockCost, behind: int, settings: SchedulerConfig) -> float:
    size, count = min(settings.batches)
    return float(count_end_bytes(end, size, find_least_flight(count, behind, settings)))


def compare_sizes(need: float, have: float, verb: str) -> str:
    """Format both numbers with as many digits as tell them apart."""
    digits = next(
        (d for d in range(_MOST_DIGITS) if _format_mib(need, d) != _format_mib(have, d)),
        _MOST_DIGITS,
    )
    return f"{_format_mib(need, digits)} MiB and {verb} {_format_mib(have, digits)} MiB for plans"


def _format_mib(size: float, digits: int) -> str:
    return f"{size / _MIB:.{digits}f}"
