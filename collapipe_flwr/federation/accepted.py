"""Which training rounds of each cluster the global model contains.

A cluster cannot know whether the server used its reply: it may come too late, be refused or get
lost. So the server counts the replies that it aggregated, and every order to train names the last
of them. The cluster continues from the state in which it ended that round, and with the examples
that follow it; what it kept of other rounds since is void. The counts are part of a checkpoint, so
a resumed run continues from what the checkpoint's model contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.federation.checkpoint import KEPT_CHECKPOINTS, Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The accepted rounds of one cluster.

    ``rounds`` is their number and ``last_round`` the server round of the newest, 0 before the
    first. ``saved`` is what ``last_round`` was in the checkpoints from which the run may resume.
    """

    rounds: int = 0
    last_round: int = 0
    saved: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ProtocolError for numbers that no count of rounds gives."""
        if not 0 <= self.rounds <= self.last_round or (self.last_round and not self.rounds):
            raise ProtocolError(
                f"{self.rounds} accepted rounds cannot end with round {self.last_round}"
            )

    @property
    def needed(self) -> tuple[int, ...]:
        """The rounds whose end the cluster may be asked to continue from."""
        return (self.last_round, *self.saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A checkpoint's memory; ``saved`` holds the last rounds by cluster of each checkpoint."""

    clusters: Mapping[str, Progress] = field(default_factory=dict)
    saved: tuple[Mapping[str, int], ...] = ()


class AcceptedRounds:
    """Counts the accepted rounds of every cluster."""

    def __init__(self) -> None:
        self._clusters: dict[str, Progress] = {}
        self._saved: tuple[Mapping[str, int], ...] = ()  # oldest first

    def progress(self, cluster_id: str) -> Progress:
        """What the cluster is told when it is asked to train."""
        now = self._clusters.get(cluster_id, Progress())
        saved = {rounds[cluster_id] for rounds in self._saved if cluster_id in rounds}
        return Progress(rounds=now.rounds, last_round=now.last_round, saved=tuple(sorted(saved)))

    def accept(self, cluster_id: str, server_round: int) -> None:
        """Count a round whose reply went into the global model."""
        rounds = self._clusters.get(cluster_id, Progress()).rounds
        self._clusters[cluster_id] = Progress(rounds=rounds + 1, last_round=server_round)

    def dump(self) -> Memory:
        """The counts; from now on clusters are told what this checkpoint needs of them."""
        now = {name: progress.last_round for name, progress in self._clusters.items()}
        self._saved = (*self._saved, now)[-KEPT_CHECKPOINTS:]
        return Memory(text=to_json(_Kept(clusters=self._clusters, saved=self._saved)))

    def load(self, memory: Memory) -> None:
        """Continue from a checkpoint; raises ProtocolError if it holds no such counts."""
        kept = from_json(_Kept, memory.text, "the accepted rounds of the checkpoint")
        self._clusters, self._saved = dict(kept.clusters), kept.saved
