"""Why no plan fits a cluster: what falls short of what it needs, in numbers that say so.

Needs are those of the smallest micro-batches that plans may choose, under 1F1B with so many in
flight as one device with all blocks cannot do without; memories are those that plans may use. Only
what falls short is named.
"""

from __future__ import annotations

from collections.abc import Iterator

from collapipe_flwr.core.domain import BlockCost
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import least_flight
from collapipe_flwr.scheduler.model_share import segment_needs
from collapipe_flwr.scheduler.protocol import SchedulerConfig

_MIB = 2.0**20
_MOST_DIGITS = 6


def refusal(tables: Tables, m: int, settings: SchedulerConfig) -> str:
    """One sentence on cluster ``m``, which no plan fits."""
    name = tables.snapshot.clusters[m].profile.cluster_id
    size, count = min(settings.batches)
    why = "; ".join(_shortages(tables, m, settings))
    return (
        f"cluster {name!r}: no plan fits its memories even with {count} micro-batches of {size} "
        f"({why}): add a device, allow smaller micro-batch-sizes or micro-batches, or choose a "
        "smaller model"
    )


def _shortages(tables: Tables, m: int, settings: SchedulerConfig) -> Iterator[str]:
    snapshot, usable = tables.snapshot, 1.0 - settings.memory_margin
    profile, model = snapshot.clusters[m].profile, snapshot.model
    room = [usable * device.memory_bytes for device in profile.devices]
    needs = segment_needs(tables, settings)
    blocks = range(len(needs) - 1)
    largest = max(float(needs[block, block + 1]) for block in blocks)
    together = float(needs[0, -1])
    edge = usable * float(tables.edges.memory_m[m])
    parts = (
        (
            "the control unit",
            _need(model.embedding, 2, settings),
            usable * profile.control_unit.memory_bytes,
        ),
        ("the edge, for each cluster,", _need(model.decoder, 0, settings), edge),
        ("a device for one block", largest, max(room, default=0.0)),
        (f"the {len(room)} devices together", together, sum(room)),
    )
    short = [part for part in parts if part[1] > part[2]]
    for name, need, have in short:
        verbs = ("need", "have") if name.endswith("together") else ("needs", "has")
        yield f"{name} {verbs[0]} {compared(need, have, verbs[1])}"
    if not short:
        yield (
            f"all blocks need {_mib(together, 1)} MiB and the {len(room)} devices have "
            f"{_mib(sum(room), 1)} MiB in all, but no cut into contiguous segments keeps every "
            "device within its own"
        )


def _need(end: BlockCost, behind: int, settings: SchedulerConfig) -> float:
    size, count = min(settings.batches)
    return end.state_bytes + size * float(least_flight(count, behind, settings)) * end.stash_bytes


def compared(need: float, have: float, verb: str) -> str:
    """Both numbers, with as many digits as tell them apart."""
    digits = next((d for d in range(_MOST_DIGITS) if _mib(need, d) != _mib(have, d)), _MOST_DIGITS)
    return f"{_mib(need, digits)} MiB and {verb} {_mib(have, digits)} MiB for plans"


def _mib(size: float, digits: int) -> str:
    return f"{size / _MIB:.{digits}f}"
