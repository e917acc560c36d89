"""Plans of one cluster for measurements and tests: they place blocks and cut batches, unpriced."""

from __future__ import annotations

from collections.abc import Sequence

from collapipe_flwr.core.domain import ClusterPlan, Segment


def spread_evenly(blocks: int, devices: int) -> list[int]:
    """Return where the blocks of each device stop, with numbers that differ by at most one."""
    return [blocks * (n + 1) // devices for n in range(devices)]


def make_plan(
    cluster_id: str, stops: Sequence[int], *, size: int = 1, count: int = 1, steps: int = 1
) -> ClusterPlan:
    """Place the blocks up to each of ``stops`` on the devices ``d0``, ``d1`` and so on.

    A step has ``count`` micro-batches of ``size`` examples, all of them in flight.
    """
    spans = zip((0, *stops[:-1]), stops, strict=True)
    return ClusterPlan(
        cluster_id=cluster_id,
        segments=tuple(
            Segment(device_id=f"{cluster_id}/d{n}", first_block=first, stop_block=stop)
            for n, (first, stop) in enumerate(spans)
        ),
        micro_batch_size=size,
        micro_batches=count,
        warmup_depth=(count,) * (len(stops) + 2),
        local_steps=steps,
        bandwidth_hz=1.0,
        tx_power_w={},
        gradient_power_w={},
        latency_s=1.0,
        step_s=1.0,
        energy_j={},
        memory_bytes={},
    )
