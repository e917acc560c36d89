"""The scheduler bench: decision times by size, radio against cvxpy, gaps to optima and rivals.

A decision is one ``step`` of the scheduler: from a snapshot to a plan. The first one of a run
plans from scratch; the median is over the rounds after it, with new fading and filled queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from benchmarks.scheduling.optimality import Gaps, optimality
from benchmarks.scheduling.radio import RadioBench, compare_radio
from benchmarks.scheduling.search_gaps import SearchGaps, SearchSize, search_gaps
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.simulation.episode import run_episode
from collapipe_flwr.simulation.setting import ModelShape, Setting
from collapipe_flwr.simulation.simulate import Tick, ignore_tick

DEVICES = 10
MODEL = ModelShape(blocks=24)
ROUNDS = {10: 15, 100: 15, 1000: 7, 10_000: 3}  # timed decisions by number of clusters
RADIO_CLUSTERS = 100
CODEC_CLUSTERS = 100  # at this size also with a codec chosen for every hop


SECTIONS = ("decisions", "radio", "optimality", "search")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to measure: one decision per setting and round, one radio problem, drawn instances."""

    decisions: tuple[Setting, ...]
    radio: Setting | None
    instances: int  # small ones for brute force
    search: tuple[SearchSize, ...]

    @property
    def steps(self) -> int:
        """Ticks of the whole bench."""
        timed = sum(setting.rounds for setting in self.decisions)
        searched = sum(2 * len(size.seeds) for size in self.search)
        return timed + (self.radio is not None) + self.instances + searched


def bench_plan(
    clusters: Sequence[int],
    instances: int,
    search: Sequence[SearchSize] = (),
    sections: Sequence[str] = SECTIONS,
) -> BenchPlan:
    """The usual settings, for these numbers of clusters; raises ConfigError."""
    for name in sections:
        if name not in SECTIONS:
            raise ConfigError(f"--sections: unknown section {name!r}; choose {', '.join(SECTIONS)}")
    if instances < 1:
        raise ConfigError(f"--instances must be >= 1, got {instances}")
    fixed = [bench_setting(number, 1 + timed_rounds(number)) for number in clusters]
    chosen = [choosing_codecs(s) for s in fixed if s.clusters == CODEC_CLUSTERS]
    return BenchPlan(
        decisions=(*fixed, *chosen) if "decisions" in sections else (),
        radio=bench_setting(RADIO_CLUSTERS, 1) if "radio" in sections else None,
        instances=instances if "optimality" in sections else 0,
        search=tuple(search) if "search" in sections else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionTime:
    """Seconds per decision at one size."""

    clusters: int
    devices: int
    blocks: int
    first_s: float
    median_s: float
    rounds: int
    codecs: tuple[str, ...] = ("fp16",)  # that plans choose from


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Everything that ``collapipe bench scheduler`` reports."""

    decisions: tuple[DecisionTime, ...]
    radio: RadioBench | None
    optimality: Gaps | None
    search: tuple[SearchGaps, ...]

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


def timed_rounds(clusters: int) -> int:
    """Number of timed decisions: fewer at sizes where each takes long."""
    return next((n for size, n in ROUNDS.items() if clusters <= size), min(ROUNDS.values()))


def bench_setting(clusters: int, rounds: int) -> Setting:
    """Clusters of ten mixed boards and an encoder of 24 blocks of BERT-base's width."""
    return Setting(clusters=clusters, devices=DEVICES, rounds=rounds, model=MODEL)


def choosing_codecs(setting: Setting) -> Setting:
    """The same where plans choose the codec of every hop."""
    settings = replace(setting.settings, codecs=("fp32", "bf16", "int8"))
    return replace(setting, settings=settings, model=replace(setting.model, wire_bytes=4))


def decision_time(setting: Setting, tick: Tick = ignore_tick) -> DecisionTime:
    """Time the first and the following decisions of a setting of at least two rounds."""
    profile = setting.model.profile()
    world = setting.world(setting.seeds[0], profile)
    scheduler = make_scheduler("dssda", setting.settings)
    seconds = []
    for done in run_episode(world, scheduler, profile, setting.rounds):
        seconds.append(done.decision_s)
        tick(f"{setting.clusters} clusters")
    return DecisionTime(
        clusters=setting.clusters,
        devices=setting.devices,
        blocks=setting.model.blocks,
        first_s=seconds[0],
        median_s=float(np.median(seconds[1:])),
        rounds=setting.rounds - 1,
        codecs=setting.settings.codecs if setting.model.wire_bytes == 4 else ("fp16",),
    )


def bench(plan: BenchPlan, tick: Tick = ignore_tick) -> BenchResult:
    """Measure everything; takes minutes at the usual sizes."""
    decisions = tuple(decision_time(setting, tick) for setting in plan.decisions)
    radio = None
    if plan.radio is not None:
        radio = compare_radio(plan.radio)
        tick("radio")
    return BenchResult(
        decisions=decisions,
        radio=radio,
        optimality=optimality(plan.instances, tick) if plan.instances else None,
        search=tuple(search_gaps(size, tick) for size in plan.search),
    )
