"""What a scheduler remembers between rounds; plain values that survive a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from collapipe_flwr.core.domain import Plan
from collapipe_flwr.core.errors import ProtocolError, ScheduleError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.costs.estimators import LearningState
from collapipe_flwr.scheduler.caution import Doubt
from collapipe_flwr.scheduler.link_beliefs import LinkBook
from collapipe_flwr.scheduler.smoothing import Beliefs


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
    """

    rounds: int = 0
    reference: Reference | None = None
    energy_queue_j: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    participation_queue: Mapping[str, float] = field(default_factory=dict)
    budget_j: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    learning: LearningState = field(default_factory=LearningState)
    beliefs: Beliefs = field(default_factory=Beliefs)
    doubt: Doubt = field(default_factory=Doubt)
    links: LinkBook = field(default_factory=dict)
    last_plan: Plan | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> SchedulerState:
        """The state in ``text``; raises ScheduleError where it is none."""
        try:
            return from_json(cls, text, "scheduler state")
        except ProtocolError as error:
            raise ScheduleError(f"no scheduler state in {text[:40]!r}: {error}") from error


def reference_of(state: SchedulerState) -> Reference:
    """The reference plan; raises ScheduleError for a state that no ``init`` made."""
    if state.reference is None:
        raise ScheduleError("the scheduler's state has no reference plan: start it with init()")
    return state.reference
