"""The accepted rounds of every cluster.

A cluster cannot know whether the server used its reply, which may be late, refused or lost. So the
server counts the replies that it aggregated (:class:`AcceptedReplies`), and every order to train
names the last of them. The cluster continues from its state at the end of that round, and discards
the results of other rounds since. A round that is repeated has several orders, of which a cluster
may still carry out an old one, so each order is named as well. The counts are part of a checkpoint,
so a resumed run continues from the rounds that the checkpoint's model contains.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.federation.checkpoint import KEPT_CHECKPOINTS, ComponentState


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The accepted rounds of one cluster.

    ``rounds`` is their number, ``last_round`` the server round of the newest, 0 before the first,
    and ``attempt`` which of the orders for it. ``saved`` are the values of ``last_round`` in the
    checkpoints from which the run may resume.
    """

    rounds: int = 0
    last_round: int = 0
    attempt: int = 0
    saved: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ProtocolError for numbers that no count of rounds gives."""
        if not 0 <= self.rounds <= self.last_round or (self.last_round and not self.rounds):
            raise ProtocolError(
                f"{self.rounds} accepted rounds cannot end with round {self.last_round}"
            )

    @property
    def needed(self) -> tuple[int, ...]:
        """The rounds from whose end the cluster may be asked to continue."""
        return (self.last_round, *self.saved)


def new_attempt() -> int:
    """Draw a name for an order that no other order has; of a fixed length."""
    return 2**31 + secrets.randbits(31)


@dataclass(slots=True)
class AcceptedReplies:
    """Counts the accepted rounds of every cluster."""

    clusters: Mapping[str, Progress] = field(default_factory=dict)
    saved: tuple[Mapping[str, int], ...] = ()  # the last rounds in each checkpoint, oldest first

    def progress(self, cluster_id: str) -> Progress:
        """Return the progress that an order to train contains."""
        saved = {rounds[cluster_id] for rounds in self.saved if cluster_id in rounds}
        return replace(self.clusters.get(cluster_id, Progress()), saved=tuple(sorted(saved)))

    def holds(self, server_round: int) -> bool:
        """Return whether this round or a later one was accepted: then it is of another run."""
        return any(known.last_round >= server_round for known in self.clusters.values())

    def forget(self) -> None:
        """Count from the start again."""
        self.clusters, self.saved = {}, ()

    def accept(self, cluster_id: str, server_round: int, attempt: int = 0) -> None:
        """Count a round whose reply, to this order, is part of the global model."""
        rounds = self.progress(cluster_id).rounds + 1
        now = Progress(rounds=rounds, last_round=server_round, attempt=attempt)
        self.clusters = {**self.clusters, cluster_id: now}

    def dump(self) -> ComponentState:
        """Return the counts; later progress includes the rounds that this checkpoint needs."""
        now = {name: progress.last_round for name, progress in self.clusters.items()}
        self.saved = (*self.saved, now)[-KEPT_CHECKPOINTS:]
        return ComponentState(text=to_json(self))

    def load(self, memory: ComponentState) -> None:
        """Restore from a checkpoint; raises ProtocolError for other data."""
        kept = from_json(AcceptedReplies, memory.text, "the accepted rounds of the checkpoint")
        self.clusters, self.saved = kept.clusters, kept.saved
