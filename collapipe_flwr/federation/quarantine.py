"""Devices that answer but were at fault in a round: planned without for a while.

What a control unit found out in one round (`cluster.suspects`) would be found out again in the
next, at the price of a replay. So a device that was at fault is left out of the next plans, of
twice as many after every further offence, and is tried again then: somebody may have mended it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from collapipe_flwr.federation.telemetry import ClusterTelemetry

log = logging.getLogger("flwr.collapipe")
FIRST_ROUNDS, MOST_ROUNDS = 2, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """A device that is left out up to round ``until``, after this number of ``offences``."""

    until: int
    offences: int = 1


Sentences = Mapping[str, Mapping[str, Sentence]]  # by cluster and device


class Quarantine:
    """Which devices are left out of which rounds."""

    def __init__(self, sentences: Sentences | None = None) -> None:
        self._sentences = {name: dict(found) for name, found in (sentences or {}).items()}

    @property
    def sentences(self) -> Sentences:
        """By cluster and device, for a checkpoint."""
        return self._sentences

    def devices(self, server_round: int) -> dict[str, tuple[str, ...]]:
        """The devices that are left out of a round, by cluster."""
        return {
            cluster_id: tuple(d for d, s in found.items() if s.until >= server_round)
            for cluster_id, found in self._sentences.items()
        }

    def learn(self, server_round: int, cluster_id: str, told: ClusterTelemetry) -> None:
        """Record the offences that a cluster reports, and devices that worked."""
        found = self._sentences.setdefault(cluster_id, {})
        for report in told.reports:
            if report.name not in told.quarantined:
                found.pop(report.name, None)
        for device_id, why in told.quarantined.items():
            offences = found[device_id].offences + 1 if device_id in found else 1
            rounds = min(FIRST_ROUNDS * 2 ** min(offences - 1, 30), MOST_ROUNDS)
            found[device_id] = Sentence(until=server_round + rounds, offences=offences)
            log.warning(
                "%s is quarantined, and planned with again in round %d: %s",
                device_id,
                server_round + rounds + 1,
                why,
            )

    def lift(self, cluster_id: str) -> None:
        """Use a cluster's devices again at once: without them it cannot take part."""
        for device_id, sentence in self._sentences.get(cluster_id, {}).items():
            lifted = Sentence(until=0, offences=sentence.offences)
            self._sentences[cluster_id][device_id] = lifted
