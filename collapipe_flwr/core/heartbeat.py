"""How often a peer must show that it lives, as a value that settings and messages carry."""

from __future__ import annotations

import math
from dataclasses import dataclass

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import above, at_least, key

LEAST_PERIOD_S = 0.2  # hosts take pings as often as this, and drop who sends more
LEAST_MISSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One beat every `period_s`; a peer that misses `misses` of them in a row is lost."""

    period_s: float = key(2.0, above(LEAST_PERIOD_S), name="heartbeat-s")
    misses: int = key(LEAST_MISSES, at_least(LEAST_MISSES), name="heartbeat-misses")

    def __post_init__(self) -> None:
        if not LEAST_PERIOD_S < self.period_s < math.inf or self.misses < LEAST_MISSES:
            raise ConfigError(
                f"a heartbeat needs a period above {LEAST_PERIOD_S:g} s and {LEAST_MISSES} misses "
                f"or more, got {self.period_s:g} s and {self.misses}"
            )

    @property
    def lost_after_s(self) -> float:
        """The silence after which a peer is lost."""
        return self.period_s * self.misses
