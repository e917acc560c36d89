"""What real links reach of their planned rates, learnt from what they carried.

A channel model promises a rate; a wire, a wall or a neighbour's traffic keeps another. For every
link that a round used, the share of the promise is noted (its logarithm), and the estimate of the
link is the median of its last three notes. Missing ones count as the estimate, so one bad round
changes nothing and two that agree count. Notes within ``AGREES`` of the estimate leave it as
it is: plans are bit-equal while measurements agree with the model. A link that its cluster did not
use for ``PATIENCE`` rounds counts as promised again, so that one that was slow is tried some
day; its notes stay, so that one look suffices.

Senders that kept to a plan's pace show no more than that the link is as fast as promised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import is_
from statistics import median

from collapipe_flwr.core.domain import (
    ClusterOutcome,
    ClusterSnapshot,
    LinkShares,
    RoundOutcome,
    Snapshot,
)

AGREES = math.log(1.25)  # in ln(share): what is closer to the estimate confirms it
NOTES = 3
PATIENCE = 20  # rounds without a look: a look costs at most one slow round in so many


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """ln(share of the promised rate): the estimate (`believed`), and the last rounds' notes."""

    believed: float = 0.0
    notes: tuple[float, ...] = ()
    rounds_unseen: int = 0

    def noting(self, note: float) -> LinkEstimate:
        """After one more round that used the link."""
        notes = (*self.notes, note)[-NOTES:]
        middle = median((*notes, *[self.believed] * (NOTES - len(notes))))
        changed = abs(middle - self.believed) > AGREES
        return LinkEstimate(believed=middle if changed else self.believed, notes=notes)

    def unseen(self) -> LinkEstimate:
        """After one more round that did not."""
        rounds = self.rounds_unseen + 1
        if rounds < PATIENCE:
            return replace(self, rounds_unseen=rounds)
        return replace(self, believed=0.0, rounds_unseen=0)


LinkEstimates = Mapping[str, Mapping[str, LinkEstimate]]
"""cluster -> link -> estimate."""


def link_key(one: str, other: str) -> str:
    """A link by its ends, whichever way the chain runs; the edge is ""."""
    return " - ".join(sorted((one, other)))


def links_learned(book: LinkEstimates, outcome: RoundOutcome) -> LinkEstimates:
    """Fold a round's samples in; clusters without samples change nothing."""
    after = dict(book)
    for cluster in outcome.clusters:
        if cluster.links:
            after[cluster.cluster_id] = _noted(book.get(cluster.cluster_id, {}), cluster)
    return after


def _noted(known: Mapping[str, LinkEstimate], cluster: ClusterOutcome) -> dict[str, LinkEstimate]:
    after = {key: estimate.unseen() for key, estimate in known.items()}
    for sample in cluster.links:
        if not (0 < sample.measured_bit_per_s < math.inf and sample.planned_bit_per_s > 0):
            continue
        key = link_key(*sample.ends)
        before = known.get(key, LinkEstimate())
        note = before.believed + math.log(sample.measured_bit_per_s / sample.planned_bit_per_s)
        after[key] = before.noting(min(note, 0.0) if sample.paced else note)
    return after


def with_links(snapshot: Snapshot, book: LinkEstimates) -> Snapshot:
    """The snapshot with estimated shares; itself where all rates are as promised."""
    clusters = tuple(_estimated(c, book.get(c.profile.cluster_id, {})) for c in snapshot.clusters)
    if all(map(is_, clusters, snapshot.clusters)):
        return snapshot
    return replace(snapshot, clusters=clusters)


def _estimated(cluster: ClusterSnapshot, known: Mapping[str, LinkEstimate]) -> ClusterSnapshot:
    if not any(estimate.believed for estimate in known.values()):
        return cluster
    names = [member.device_id for member in cluster.profile.members]

    def shares(name: str, others: list[str]) -> tuple[float, ...]:
        estimates = (known.get(link_key(name, other), LinkEstimate()) for other in others)
        return tuple(math.exp(estimate.believed) for estimate in estimates)

    links = LinkShares(d2d=tuple(shares(name, names) for name in names), edge=shares("", names))
    return replace(cluster, links=links)
