"""Replicas of a stage: which handles which micro-batch, and whom it meets at its neighbours.

Micro-batch m passes replica m mod R of a stage with R replicas. So a replica takes every R-th
micro-batch, and meets those of a neighbouring stage with Q replicas in a cycle of
Q / gcd(R, Q): where both have as many, each meets only its counterpart.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from collapipe_flwr.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The place of one replica among the ``replicas`` of its stage."""

    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.replicas:
            raise ConfigError(f"a stage of {self.replicas} replicas has none with {self.replica}")

    def own(self, micro_batches: int) -> range:
        """The micro-batches of a step that pass here."""
        return range(self.replica, micro_batches, self.replicas)

    def meets(self, others: int) -> tuple[int, ...]:
        """The replicas of a neighbouring stage, as its own micro-batches meet them."""
        period = others // gcd(self.replicas, others)
        return tuple((self.replica + self.replicas * i) % others for i in range(period))

    def lane(self, micro_batch: int, lanes: int) -> int:
        """Which of as many links (in the order of `meets`) one of its own micro-batches takes."""
        return micro_batch // self.replicas % lanes


ALONE = Turn()
PIECE_BYTES = 4 * 2**20  # of the gradients that replicas exchange


def pieces_ahead(replica: int) -> int:
    """How many more a replica passes up its line before it waits for the first total.

    As many as are on their way to the first replica and back; that one never waits.
    """
    return max(2 * replica - 1, 0)


def turns(replicas: int) -> tuple[Turn, ...]:
    """The places of all replicas of a stage."""
    return tuple(Turn(replica=index, replicas=replicas) for index in range(replicas))
