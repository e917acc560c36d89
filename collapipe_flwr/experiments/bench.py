"""The scheduler bench: decision times by size, the radio solver against cvxpy, optimality gaps.

A decision is one ``step`` of the scheduler: from a snapshot to a plan. The first one of a run
plans from scratch; the median is over the rounds after it, with new fading and filled queues.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.experiments.bench_optimality import Gaps, optimality
from collapipe_flwr.experiments.bench_radio import RadioBench, compare_radio
from collapipe_flwr.experiments.episode import run_episode
from collapipe_flwr.experiments.model import ModelShape
from collapipe_flwr.experiments.setting import Setting
from collapipe_flwr.experiments.simulate import Tick, silent
from collapipe_flwr.scheduler.registry import make_scheduler

DEVICES = 10
MODEL = ModelShape(blocks=24, width=1024)
ROUNDS = {10: 15, 100: 15, 1000: 7, 10_000: 3}  # timed decisions by number of clusters
RADIO_CLUSTERS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """How much to measure."""

    clusters: tuple[int, ...] = tuple(ROUNDS)
    radio_clusters: int = RADIO_CLUSTERS
    instances: int = 500

    def __post_init__(self) -> None:
        if not self.clusters or min(self.clusters) < 1:
            raise ConfigError(f"--clusters must list numbers >= 1, got {self.clusters}")
        if self.instances < 1:
            raise ConfigError(f"--instances must be >= 1, got {self.instances}")

    @property
    def steps(self) -> int:
        """Ticks of a whole bench."""
        return sum(1 + timed_rounds(c) for c in self.clusters) + 1 + self.instances


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionTime:
    """Seconds per decision at one size."""

    clusters: int
    devices: int
    blocks: int
    first_s: float
    median_s: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Everything that ``collapipe bench scheduler`` reports."""

    decisions: tuple[DecisionTime, ...]
    radio: RadioBench
    optimality: Gaps

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


def timed_rounds(clusters: int) -> int:
    """Rounds whose decisions are timed: fewer where each takes long."""
    return next((n for size, n in ROUNDS.items() if clusters <= size), min(ROUNDS.values()))


def bench_setting(clusters: int, rounds: int) -> Setting:
    """Clusters of ten mixed boards and a BERT-large-shaped encoder."""
    return Setting(clusters=clusters, devices=DEVICES, rounds=rounds, model=MODEL)


def decision_time(clusters: int, tick: Tick) -> DecisionTime:
    """Time the first and the following decisions of one size."""
    rounds = timed_rounds(clusters)
    setting = bench_setting(clusters, rounds + 1)
    profile = setting.model.profile()
    world = setting.world(0, profile)
    scheduler = make_scheduler("dssda", setting.settings)
    seconds = []
    for done in run_episode(world, scheduler, profile, setting.rounds):
        seconds.append(done.decision_s)
        tick(f"{clusters} clusters")
    return DecisionTime(
        clusters=clusters,
        devices=setting.devices,
        blocks=setting.model.blocks,
        first_s=seconds[0],
        median_s=float(np.median(seconds[1:])),
        rounds=rounds,
    )


def bench(plan: BenchPlan, tick: Tick = silent) -> BenchResult:
    """Measure everything; takes minutes at the default sizes."""
    decisions = tuple(decision_time(clusters, tick) for clusters in plan.clusters)
    radio = compare_radio(bench_setting(plan.radio_clusters, 1))
    tick("radio")
    return BenchResult(
        decisions=decisions, radio=radio, optimality=optimality(plan.instances, tick)
    )
