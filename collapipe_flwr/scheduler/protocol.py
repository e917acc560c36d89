"""The interface of every scheduler: settings, and explicit state in, plan and state out.

The state is plain values that survive a checkpoint. Virtual queues turn long-term constraints into
prices per round: ``Q(t+1) = max(Q(t) + e(t) - budget, -placeholder)``. Summing gives
``Q(T) - Q(0) >= sum (e - budget)``, so on every path the average excess is at most ``Q(T) / T``
(Neely 2010, Stochastic Network Optimization, section 4). Queues advance by what rounds *really*
cost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Protocol, runtime_checkable

from collapipe_flwr.core.domain import Plan, Snapshot
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.keys import (
    Rule,
    above,
    at_least,
    between,
    counts,
    key,
    off_or_at_least,
    one_of,
)
from collapipe_flwr.core.links import CODECS
from collapipe_flwr.core.outcome import RoundOutcome
from collapipe_flwr.core.schedule import SCHEDULES
from collapipe_flwr.costs.convergence import LearningState
from collapipe_flwr.costs.radio import rank_codecs
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.scheduler.estimates import ProfileEstimates
from collapipe_flwr.scheduler.gain_estimates import RobustGains
from collapipe_flwr.scheduler.link_estimates import LinkEstimates

Nested = Mapping[str, Mapping[str, float]]
NOISE_SCALE, BOUND = "noise-scale", "bound"  # what progress per round is measured by


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The plan that rho and the latency scale refer to: the first round's plain one."""

    latency_s: float
    micro_batch_size: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """Queues, estimates and the last plan.

    ``energy_queue_j[cluster][device]`` is the energy-deficit queue, ``participation_queue``
    the deficit of rounds per cluster, ``budget_j`` the budgets that the queues refer to.
    ``placeholder_j`` is backlog that an energy queue starts with: prices follow the sum of both,
    and the queue falls to its negative at most. ``account_j`` is what a device may spend in a round
    besides its budget. ``weight`` is V, 0 before the first plan; ``spare_plan`` the best plan so
    far that keeps all budgets in every round. Fields are named as in checkpoints.
    """

    rounds: int = 0
    reference: Reference | None = None
    energy_queue_j: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    placeholder_j: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    account_j: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    weight: float = 0.0
    participation_queue: Mapping[str, float] = field(default_factory=dict)
    budget_j: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    learning: LearningState = field(default_factory=LearningState)
    beliefs: ProfileEstimates = field(default_factory=ProfileEstimates)
    doubt: RobustGains = field(default_factory=RobustGains)
    links: LinkEstimates = field(default_factory=dict)
    last_plan: Plan | None = None
    spare_plan: Plan | None = None


def require_reference(state: SchedulerState) -> Reference:
    """Return the reference plan; raises ScheduleError for a state that no ``init`` made."""
    if state.reference is None:
        raise ScheduleError("the scheduler's state has no reference plan: start it with init()")
    return state.reference


REPAID = 10  # rounds in which devices pay their advance back


def advance(queue: float, spent: float, budget: float, placeholder: float = 0.0) -> float:
    """Advance a virtual queue, which together with its place-holder is never negative."""
    return 0.0 if math.isinf(budget) else max(queue + spent - budget, -placeholder)


def advance_energy(
    queues_j: Nested,
    budgets_j: Nested,
    spent_j: Nested,
    *,
    share: float,
    placeholders_j: Nested | None = None,
) -> dict[str, dict[str, float]]:
    """Advance all energy queues by a round in which devices got ``share`` of their budgets.

    Members that spent nothing recover it.
    """
    result: dict[str, dict[str, float]] = {}
    for cluster, budgets in budgets_j.items():
        before, spent = queues_j.get(cluster, {}), spent_j.get(cluster, {})
        started = (placeholders_j or {}).get(cluster, {})
        result[cluster] = {
            device: advance(
                before.get(device, 0.0),
                spent.get(device, 0.0),
                share * budget,
                started.get(device, 0.0),
            )
            for device, budget in budgets.items()
        }
    return result


def advance_participation(
    queues: Mapping[str, float], connected: Collection[str], done: Collection[str], *, floor: float
) -> dict[str, float]:
    """Advance participation deficits by a round that some of the connected clusters finished."""
    return {
        cluster: max(queues.get(cluster, 0.0) + floor - float(cluster in done), 0.0)
        for cluster in sorted(connected)
    }


_PART = Rule(lambda v: 0 <= v < 1, "must be in [0, 1)")
_RULES = {
    "penalty_weight": at_least(0),
    "learning_rate": above(0),
    "participation_floor": between(0, 1),
    "memory_margin": _PART,
    "max_model_share": Rule(lambda v: 0 < v <= 1, "must be in (0, 1]"),
    "budget_margin": _PART,
    "energy_advance": Rule(lambda v: 0 <= v < REPAID, f"must be in [0, {REPAID})"),
    "hysteresis": at_least(0),
    "late_slack": off_or_at_least(1),
    "schedule": one_of(*SCHEDULES),
    "progress": one_of(NOISE_SCALE, BOUND),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(PricingOptions):
    """What a user may choose about planning, and how plans are executed."""

    penalty_weight: float = key(0.0, at_least(0))  # V: latency against queues; 0: by budgets
    micro_batch_sizes: tuple[int, ...] = key((1, 2, 4, 8, 16), counts())
    micro_batches: tuple[int, ...] = key((1, 2, 4, 8), counts())
    batch_size: int = 0  # examples of a step, however it is cut; 0: any pair of the two grids
    participation_floor: float = key(1.0, between(0, 1))  # long-term share of rounds; 1: keep all
    learning_rate: float = 0.01
    progress: str = key(BOUND, one_of(NOISE_SCALE, BOUND))  # how batches are worth their time
    bound: bool = True  # heed progress; False: only the latency of a round
    best_batches: bool = False  # rules, too, choose the best of the grid, once
    codecs: tuple[str, ...] = ("fp32",)  # that links may use; of several the plan chooses
    max_model_share: float = key(1.0, above(0))  # a device's share of the whole model's memory
    budget_margin: float = 0.005  # plans aim this share below every energy budget
    energy_advance: float = 1.0  # budgets to spend ahead, paid back in 10 rounds
    hysteresis: float = 0.005  # least relative gain for which devices change segments
    late_slack: float = 0.0  # rounds close at so many times the median's latency; 0: with the last
    replicas: bool = key(False)  # DSSDA lets devices share a stage where that wins

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if not rule.holds(value):
                key_ = name.replace("_", "-")
                raise ScheduleError(f"scheduler.{key_} {rule.says}, got {value!r}")
        if not self.codecs or not set(self.codecs) <= set(CODECS):
            raise ScheduleError(f"links.codecs must list some of {CODECS}, got {self.codecs!r}")
        for name in ("micro_batch_sizes", "micro_batches"):
            if min(grid := getattr(self, name), default=0) < 1:
                raise ScheduleError(
                    f"scheduler.{name.replace('_', '-')} needs at least one value, all >= 1, "
                    f"got {grid!r}"
                )
        if not self.batches:
            raise ScheduleError(
                f"no pair of scheduler.micro-batch-sizes {self.micro_batch_sizes} and "
                f"scheduler.micro-batches {self.micro_batches} makes up a batch of "
                f"{self.batch_size}: add its divisors"
            )

    @property
    def batches(self) -> tuple[tuple[int, int], ...]:
        """The pairs (size, count) of micro-batches that a plan may choose."""
        pairs = product(self.micro_batch_sizes, self.micro_batches)
        return tuple(p for p in pairs if not self.batch_size or p[0] * p[1] == self.batch_size)

    @property
    def uncut(self) -> SchedulerConfig:
        """The same with batches as large, each of which is one micro-batch."""
        sizes = tuple(sorted({size * count for size, count in self.batches}))
        return replace(self, micro_batch_sizes=sizes, micro_batches=(1,))

    @property
    def by_example(self) -> SchedulerConfig:
        """The same with batches as large, whose micro-batches hold one example each."""
        counts = tuple(sorted({size * count for size, count in self.batches}))
        return replace(self, micro_batch_sizes=(1,), micro_batches=counts)

    def aim_share(self, rounds: int) -> float:
        """Return the share of its budget that a device gets for the ``rounds``-th round, from 1."""
        repaid = self.energy_advance / REPAID if rounds <= REPAID else 0.0
        return (1.0 - self.budget_margin) * (1.0 - repaid)

    @property
    def coarsest(self) -> str:
        """The codec that leaves the least of an activation's bytes."""
        return CODECS[rank_codecs(self.codecs)[-1]]


@runtime_checkable
class Scheduler(Protocol):
    """Plans one round at a time."""

    @property
    def name(self) -> str: ...

    def init(self, snapshot: Snapshot) -> SchedulerState:
        """Make the state before the first round; raises ScheduleError for unusable snapshots."""
        ...

    def step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Plan one round; raises InfeasibleError when nothing satisfies the constraints."""
        ...

    def observe(self, state: SchedulerState, plan: Plan, outcome: RoundOutcome) -> SchedulerState:
        """Learn from what the round really cost."""
        ...
