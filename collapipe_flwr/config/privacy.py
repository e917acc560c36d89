"""Privacy demands of a run or a site: what must not leave the machines that own it."""

from __future__ import annotations

from dataclasses import dataclass

from collapipe_flwr.core.keys import at_least, key, one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyConfig:
    """Demands of a run or of a cluster file; of both, the stricter one counts."""

    labels: str = key("travel", one_of("travel", "home"))  # home: the control unit is the edge
    trusted_blocks: int = key(0, at_least(0))  # the first so many are on trusted devices alone

    @property
    def labels_at_home(self) -> bool:
        """Whether no link may carry labels."""
        return self.labels == "home"

    def __or__(self, other: PrivacyConfig) -> PrivacyConfig:
        """Combine two demands into one that meets both."""
        return PrivacyConfig(
            labels=max((self, other), key=lambda each: each.labels_at_home).labels,
            trusted_blocks=max(self.trusted_blocks, other.trusted_blocks),
        )


NO_DEMANDS = PrivacyConfig()
