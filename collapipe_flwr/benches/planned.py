"""The same cluster as the scheduler sees it: split and depths come from a plan, not from a bench.

The machine's speed is measured, a link's rate is given; the scheduler is the one of every run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from collapipe_flwr.benches.job import Job
from collapipe_flwr.benches.model import CLASSES, VOCABULARY, BenchPart, Shape
from collapipe_flwr.core.domain import (
    BlockCost,
    ChannelState,
    ClusterPlan,
    ClusterProfile,
    ClusterSnapshot,
    DeviceProfile,
    EdgeProfile,
    ModelProfile,
    RadioProfile,
    Snapshot,
)
from collapipe_flwr.core.schedule import StepTimes
from collapipe_flwr.costs.makespan import choose_warm_up
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig

CLUSTER, CONTROL = "bench", "control unit"
_PLENTY = 1e15  # memory, energy, examples: the bench asks for speed alone
_POWER_W = 1.0
_STATE_BYTES_PER_WEIGHT_BYTE = 4  # weights, gradients, two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where to train: the machine's speed, how much slower each device is, the rate of links."""

    flop_per_s: float
    slow: tuple[float, ...] = (1.0, 1.0)  # of each device
    rate_bytes_per_s: float = 1e9
    wire_bytes: float = 4.0  # of one activation, by the codec
    shape: Shape = field(default_factory=Shape)

    @property
    def hop_s(self) -> float:
        """How long a link carries one micro-batch."""
        return self.wire_bytes / 4.0 * self.shape.hidden_bytes / self.rate_bytes_per_s

    def snapshot(self, blocks: int) -> Snapshot:
        """What the scheduler plans from. Links carry their rate at full power (0 dB)."""
        hertz = 8 * self.rate_bytes_per_s
        members = 1 + len(self.slow)
        profile = ClusterProfile(
            cluster_id=CLUSTER,
            examples=int(_PLENTY),
            control_unit=self._device(CONTROL, 1.0),
            devices=tuple(self._device(f"device {i}", s) for i, s in enumerate(self.slow)),
            d2d_bandwidth_hz=hertz,
            server_rate_bit_per_s=_PLENTY,
        )
        gains = ((1.0,) * members,) * members
        return Snapshot(
            round_index=1,
            model=self._model(blocks),
            edge=EdgeProfile(
                speed_flop_per_s=self.flop_per_s, memory_bytes=int(_PLENTY), tx_power_w=_POWER_W
            ),
            radio=RadioProfile(bandwidth_hz=hertz, noise_w_per_hz=_POWER_W / hertz),
            clusters=(
                ClusterSnapshot(
                    profile=profile,
                    channel=ChannelState(d2d_gain=gains, edge_gain=(1.0,) * members),
                ),
            ),
        )

    def _device(self, name: str, slow: float) -> DeviceProfile:
        return DeviceProfile(
            device_id=name,
            kind="bench",
            speed_flop_per_s=self.flop_per_s / slow,
            memory_bytes=int(_PLENTY),
            energy_per_flop_j=1e-30,
            tx_power_max_w=_POWER_W,
            energy_budget_j=_PLENTY,
        )

    def _model(self, blocks: int) -> ModelProfile:
        shape = self.shape
        cut = self.wire_bytes * shape.tokens * shape.width
        table, head = VOCABULARY * shape.width, CLASSES * shape.width
        block = _cost(shape.block_flop, shape.block_bytes // 4, cut)
        return ModelProfile(
            embedding=_cost(2.0 * shape.tokens * shape.width, table, cut),
            blocks=(block,) * blocks,
            decoder=_cost(2.0 * shape.tokens * head, head, 0.0),
        )


def planned_job(site: Site, peer: Job) -> Job:
    """The job that the scheduler's plan makes of the peer's blocks, schedule and micro-batches."""
    plan = _plan(site, sum(peer.split), peer.schedule)
    slow = {f"device {i}": factor for i, factor in enumerate(site.slow)}
    return replace(
        peer,
        split=(0, *(s.stop_block - s.first_block for s in plan.segments), 0),
        slow=(1.0, *(slow[s.device_id] for s in plan.segments), 1.0),
        depths=plan.warmup_depth,
    )


def with_planned_depths(site: Site, peer: Job) -> Job:
    """The peer's job with the warm-up that the scheduler chooses for its stages under 1F1B."""
    if peer.schedule == "gpipe":
        return peer
    shape, hops = site.shape, (site.hop_s,) * (peer.stages - 1)
    block_s = shape.micro_batch * shape.block_flop / site.flop_per_s
    times = StepTimes(
        stage_s=(
            tuple(block_s * blocks for blocks in peer.split),
            tuple(2.0 * block_s * blocks for blocks in peer.split),
        ),
        hop_s=(hops, hops),
    )
    limit = (shape.micro_batches,) * peer.stages
    return replace(peer, depths=choose_warm_up(times, limit, shape.micro_batches).depths)


def machine_flop_per_s(shape: Shape, blocks: Sequence[int] = (0, 2, 0), passes: int = 6) -> float:
    """Speed of one thread on blocks of this shape, forward and backward; the fastest pass counts.

    CPU time is counted, so that other processes do not make the machine look slow.
    """
    part = BenchPart(shape, blocks, 1)
    hidden_BTD = torch.randn(shape.micro_batch, shape.tokens, shape.width, requires_grad=True)
    seconds = []
    for _ in range(passes):
        start_s = time.thread_time()
        part(hidden_BTD, {}).sum().backward()
        seconds.append(time.thread_time() - start_s)
    return 3.0 * shape.block_flop * shape.micro_batch * blocks[1] / min(seconds)


def _plan(site: Site, blocks: int, schedule: str) -> ClusterPlan:
    settings = SchedulerConfig(
        micro_batch_sizes=(site.shape.micro_batch,),
        micro_batches=(site.shape.micro_batches,),
        schedule=schedule,
    )
    scheduler, snapshot = make_scheduler("dssda", settings), site.snapshot(blocks)
    plan, _ = scheduler.step(scheduler.init(snapshot), snapshot)
    return plan.clusters[0]


def _cost(forward_flop: float, weights: int, output_bytes: float) -> BlockCost:
    return BlockCost(
        forward_flop=forward_flop,
        backward_flop=2.0 * forward_flop,
        parameter_bytes=4 * weights,
        state_bytes=4 * weights * _STATE_BYTES_PER_WEIGHT_BYTE,
        stash_bytes=0.0,
        output_bytes=output_bytes,
    )
