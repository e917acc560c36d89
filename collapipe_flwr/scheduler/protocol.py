"""What every scheduler is: explicit state in, plan and state out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from collapipe_flwr.core.domain import Plan, RoundOutcome, Snapshot
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.keys import above, between, counts, key
from collapipe_flwr.core.links import CODECS
from collapipe_flwr.core.schedule import SCHEDULES
from collapipe_flwr.costs.codecs import ladder
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(PricingOptions):
    """What a user may choose about planning, and how plans are executed."""

    penalty_weight: float = key(5.0, above(0))  # V: latency against queues, up to V budgets
    micro_batch_sizes: tuple[int, ...] = key((1, 2, 4, 8, 16), counts())
    micro_batches: tuple[int, ...] = key((1, 2, 4, 8), counts())
    participation_floor: float = key(1.0, between(0, 1))  # long-term share of rounds; 1: keep all
    learning_rate: float = 0.01
    bound: bool = True  # plan for rounds-to-target, not only for the latency of a round
    best_batches: bool = False  # rules, too, choose the best of the grid, once
    codecs: tuple[str, ...] = ("fp32",)  # that links may use; of several the plan chooses
    max_model_share: float = key(1.0, above(0))  # a device's share of the whole model's memory
    budget_margin: float = 0.05  # queues aim this share below every energy budget
    hysteresis: float = 0.02  # least relative gain for which devices change segments
    profile_memory: float = 0.8  # weight of the past in averages of measured speeds; 0: none
    exact_devices: int = 5  # clusters of few devices get exact orders; 8 is possible but slow
    rounds_of_search: int = 6  # alternations at most

    def __post_init__(self) -> None:
        _check(self)

    @property
    def coarsest(self) -> str:
        """The codec that leaves the least of an activation's bytes."""
        return CODECS[ladder(self.codecs)[-1]]


class Scheduler(Protocol):
    """Plans one round at a time."""

    @property
    def name(self) -> str:
        """The policy's name."""
        ...

    def init(self, snapshot: Snapshot) -> SchedulerState:
        """The state before the first round; raises ScheduleError for unusable snapshots."""
        ...

    def step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Plan one round; raises InfeasibleError when nothing satisfies the constraints."""
        ...

    def observe(self, state: SchedulerState, plan: Plan, outcome: RoundOutcome) -> SchedulerState:
        """Learn from what the round really cost."""
        ...


def _check(settings: SchedulerConfig) -> None:
    checks = (
        ("penalty-weight", settings.penalty_weight, settings.penalty_weight > 0, "> 0"),
        ("learning-rate", settings.learning_rate, settings.learning_rate > 0, "> 0"),
        (
            "participation-floor",
            settings.participation_floor,
            0 <= settings.participation_floor <= 1,
            "between 0 and 1",
        ),
        ("memory-margin", settings.memory_margin, 0 <= settings.memory_margin < 1, "in [0, 1)"),
        (
            "max-model-share",
            settings.max_model_share,
            0 < settings.max_model_share <= 1,
            "in (0, 1]",
        ),
        ("budget-margin", settings.budget_margin, 0 <= settings.budget_margin < 1, "in [0, 1)"),
        (
            "profile-memory",
            settings.profile_memory,
            0 <= settings.profile_memory < 1,
            "in [0, 1)",
        ),
        ("hysteresis", settings.hysteresis, settings.hysteresis >= 0, ">= 0"),
        ("schedule", settings.schedule, settings.schedule in SCHEDULES, f"one of {SCHEDULES}"),
    )
    for name, value, good, wanted in checks:
        if not good:
            raise ScheduleError(f"scheduler.{name} must be {wanted}, got {value!r}")
    if not settings.codecs or not set(settings.codecs) <= set(CODECS):
        raise ScheduleError(f"links.codecs must list some of {CODECS}, got {settings.codecs!r}")
    for name, grid in (
        ("micro-batch-sizes", settings.micro_batch_sizes),
        ("micro-batches", settings.micro_batches),
    ):
        if not grid or min(grid) < 1:
            raise ScheduleError(
                f"scheduler.{name} needs at least one value, all >= 1, got {grid!r}"
            )
