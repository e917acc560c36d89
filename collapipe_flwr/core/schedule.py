"""The actions of one stage in an optimizer step: forward and backward passes, in their order.

Stage 0 is the control unit, the last one the edge. `core/replay.py` plays the actions of all.

A stage with R replicas has R *workers*, all others have one. Micro-batch m passes replica m mod R,
so a replica takes every R-th micro-batch and meets those of a neighbouring stage with Q replicas in
a cycle of Q / gcd(R, Q): where both have as many, each meets only its counterpart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from math import gcd
from typing import NamedTuple

from collapipe_flwr.core.errors import ConfigError, ScheduleError

SCHEDULES = ("gpipe", "1f1b")
PIECE_BYTES = 4 * 2**20  # of the gradients that replicas exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIndex:
    """The place of one replica among the ``replicas`` of its stage."""

    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.replicas:
            raise ConfigError(f"a stage of {self.replicas} replicas has none with {self.replica}")

    def list_own(self, micro_batches: int) -> range:
        """Return the micro-batches of a step that pass this replica."""
        return range(self.replica, micro_batches, self.replicas)

    def list_met(self, others: int) -> tuple[int, ...]:
        """List a neighbouring stage's replicas, in the order in which micro-batches meet them."""
        period = others // gcd(self.replicas, others)
        return tuple((self.replica + self.replicas * i) % others for i in range(period))

    def find_lane(self, micro_batch: int, lanes: int) -> int:
        """Find the link that a micro-batch takes, among ``lanes`` in the order of `list_met`."""
        return micro_batch // self.replicas % lanes


ALONE = ReplicaIndex()


def list_turns(replicas: int) -> tuple[ReplicaIndex, ...]:
    """Return the places of all replicas of a stage."""
    return tuple(ReplicaIndex(replica=index, replicas=replicas) for index in range(replicas))


def count_pieces_ahead(replica: int) -> int:
    """Count the pieces that a replica sends before it waits for the first total.

    So many fill the links to the first replica and back. The first itself never waits.
    """
    return max(2 * replica - 1, 0)


class Op(IntEnum):
    """A pass of a micro-batch through a stage; the number is also the index of a direction."""

    FORWARD = 0
    BACKWARD = 1


class Action(NamedTuple):
    """One pass of one micro-batch through one stage; prints as `F0`, `B3`."""

    op: Op
    micro_batch: int

    def __str__(self) -> str:
        return f"{'FB'[self.op]}{self.micro_batch}"


Actions = tuple[Action, ...]


@lru_cache(maxsize=1024)
def list_stage_actions(
    name: str, depth: int, micro_batches: int, turn: ReplicaIndex = ALONE
) -> Actions:
    """List the actions of one stage, or of one of its replicas, with its own micro-batches.

    `gpipe`: all forwards, then all backwards (`depth` is ignored). `1f1b`: `depth` forwards to
    warm up, then one backward and one forward in turn, so at most `depth` are in flight; from
    `depth` = `micro_batches` on this is GPipe.
    """
    if micro_batches < 1:
        raise ScheduleError(f"micro-batches must be >= 1, got {micro_batches}")
    own = turn.list_own(micro_batches)
    if name == "gpipe":
        depth = micro_batches
    elif name != "1f1b":
        raise ScheduleError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
    if depth < 1:
        raise ScheduleError(f"warm-up depth must be >= 1, got {depth}")
    warm = min(depth, len(own))
    actions = [Action(Op.FORWARD, m) for m in own[:warm]]
    for done, m in enumerate(own):
        actions.append(Action(Op.BACKWARD, m))
        if done + warm < len(own):
            actions.append(Action(Op.FORWARD, own[done + warm]))
    return tuple(actions)


def list_forward_actions(micro_batches: int, turn: ReplicaIndex) -> Actions:
    """List the actions of one worker in evaluation."""
    return tuple(Action(Op.FORWARD, m) for m in turn.list_own(micro_batches))


def compute_textbook_depths(replicas: Sequence[int], slack: int = 0) -> tuple[int, ...]:
    """Return 1F1B's warm-up depths: a micro-batch per worker from here to the edge.

    With ``slack`` every stage has so many more in flight than the one behind it.
    """
    behind = list(accumulate(reversed(replicas)))
    flights = reversed([most + slack * place for place, most in enumerate(behind)])
    return tuple(-(-most // own) for most, own in zip(flights, replicas, strict=True))
