"""Incidents of a round, from the code that notices them to the report."""

from __future__ import annotations

from dataclasses import dataclass

RETRY = "retry"  # an attempt at the round failed
LOST = "lost"  # a cluster's reply
RECOVERED = "recovered"  # a device was lost and its steps were replayed
QUARANTINED = "quarantined"  # a device
LATE = "late"  # a reply to an earlier round was used
REMARK = "remark"  # on a reply that was used, or on the aggregate


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One incident; ``cluster`` is empty where the text names it."""

    kind: str
    cluster: str = ""
    text: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.cluster, self.text)))
