"""The cases of the benchmark: equal terms on loopback, then slow links and slow devices.

On loopback both sides have the same split, schedule and micro-batches. The peer warms 1F1B up as
the textbook does; ours uses the depths planned for these stages and, for comparison, the peer's.
Where a link or device is slow the peer keeps the even split and ours comes from a plan: `Site`
describes the cluster to the scheduler, with the machine's measured speed and a given link rate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from benchmarks.data_plane.job import Job
from benchmarks.data_plane.model import CLASSES, VOCABULARY, BenchPart, Shape
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
from collapipe_flwr.core.replay import StepTimes
from collapipe_flwr.costs.warm_up import choose_warm_up
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.transport.codec import WIRE_CODECS

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


LOOPBACK, EQUAL = "loopback", "equal"
SLOW_RATE_BYTES_PER_S = 12.5e6  # 100 Mbit/s
SLOW_DEVICE = 3.0
_EVEN_4 = (0, 3, 3, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two jobs of one comparison; ``hop_s`` is how long a link carries one micro-batch."""

    link: str
    device: str = EQUAL
    ours: Job
    theirs: Job
    hop_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all cases share."""

    shape: Shape = field(default_factory=Shape)
    schedules: tuple[str, ...] = ("gpipe", "1f1b")
    splits: tuple[tuple[int, ...], ...] = ((3, 3), (4, 2), (2, 2, 2), (1, 3, 2))
    codecs: tuple[str, ...] = ("fp32", "bf16")  # of our side over the slow link


def loopback_cases(terms: Terms, flop_per_s: float) -> list[Case]:
    """The same for both sides, but for the depths of ours."""
    site = Site(flop_per_s=flop_per_s, shape=terms.shape)
    jobs = _jobs(terms, terms.schedules)
    return [Case(link=LOOPBACK, ours=with_planned_depths(site, job), theirs=job) for job in jobs]


def textbook_cases(terms: Terms) -> list[Case]:
    """1F1B over loopback, with the textbook's depths on both sides."""
    return [Case(link=LOOPBACK, ours=job, theirs=job) for job in _jobs(terms, ("1f1b",))]


def slow_device_cases(terms: Terms, flop_per_s: float) -> list[Case]:
    """The second of two devices computes three times as long."""
    slow = (1.0, SLOW_DEVICE)
    site = Site(flop_per_s=flop_per_s, slow=slow, shape=terms.shape)
    peers = _even_peers(terms, (1.0, *slow, 1.0))
    name = f"second device {SLOW_DEVICE:g}x slower"
    return [
        Case(link=LOOPBACK, device=name, ours=planned_job(site, peer), theirs=peer)
        for peer in peers
    ]


def slow_link_cases(terms: Terms, flop_per_s: float) -> list[Case]:
    """Every link carries 100 Mbit/s; the peer's activations are in single precision."""
    cases = []
    for codec in terms.codecs:
        site = Site(
            flop_per_s=flop_per_s,
            rate_bytes_per_s=SLOW_RATE_BYTES_PER_S,
            wire_bytes=4.0 * wire_share(codec),
            shape=terms.shape,
        )
        for peer in _even_peers(terms):
            ours = replace(planned_job(site, peer), codec=codec)
            cases.append(Case(link="100 Mbit/s", ours=ours, theirs=peer, hop_s=site.hop_s))
    return cases


def wire_share(codec: str) -> float:
    """Bytes of a codec over those of single precision, for large tensors."""
    import torch

    elements = 2**20
    return WIRE_CODECS[codec].wire_bytes(elements, torch.float32) / (4 * elements)


def _jobs(terms: Terms, schedules: Sequence[str]) -> list[Job]:
    return [
        Job(schedule=schedule, split=split, shape=terms.shape)
        for split in terms.splits
        for schedule in schedules
    ]


def _even_peers(terms: Terms, slow: Sequence[float] = ()) -> list[Job]:
    return [
        Job(schedule=schedule, split=_EVEN_4, slow=tuple(slow), shape=terms.shape)
        for schedule in terms.schedules
    ]
