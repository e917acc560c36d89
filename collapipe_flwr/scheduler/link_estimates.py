"""Estimates of what share of their planned rates real links reach, learnt from what they carried.

**Learnt.** A channel model promises a rate; a wire, a wall or a neighbour's traffic keeps another.
For every link that a round used, the share of the promise is noted (its logarithm). The first note
is believed at once, as a first sample of a device's speed is: it is the only one that was measured.
From the second on the estimate is the median of the last three; a missing one counts as the
promise. So of a link that is known one bad round changes nothing and two that agree count. Notes
within ``AGREES`` of the estimate leave it as it is: plans are bit-equal while measurements agree
with the model. A link that its cluster did not use for ``PATIENCE`` rounds counts as promised
again, so that one that was slow is tried some day; its notes stay, so that one look suffices.

Senders that kept to a plan's pace show no more than that the link is as fast as promised.

**Known before.** Where a cluster measured a link before the run, the estimate begins at that rate
over the one promised at full power, to the edge with an equal part of the bandwidth. It counts as
the first note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import is_
from statistics import harmonic_mean, median

import numpy as np

from collapipe_flwr.core.domain import (
    ClusterSnapshot,
    LinkRate,
    LinkShares,
    Snapshot,
)
from collapipe_flwr.core.outcome import ClusterOutcome, RoundOutcome
from collapipe_flwr.costs.radio import compute_rate_bit_per_s
from collapipe_flwr.costs.tables import TINY_GAIN

AGREES = math.log(1.25)  # in ln(share): what is closer to the estimate confirms it
NOTES = 3
PATIENCE = 20  # rounds without a look: a look costs at most one slow round in so many


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """ln(share of the promised rate): the estimate (`believed`), and the last rounds' notes."""

    believed: float = 0.0
    notes: tuple[float, ...] = ()
    rounds_unseen: int = 0

    def add_note(self, note: float) -> LinkEstimate:
        """Return the estimate after one more round that used the link."""
        notes = (*self.notes, note)[-NOTES:]
        missing = NOTES - len(notes) if self.notes else 0
        middle = median((*notes, *[0.0] * missing))
        changed = abs(middle - self.believed) > AGREES
        return LinkEstimate(believed=middle if changed else self.believed, notes=notes)

    def skip_round(self) -> LinkEstimate:
        """Return the estimate after one more round that did not use the link."""
        rounds = self.rounds_unseen + 1
        if rounds < PATIENCE:
            return replace(self, rounds_unseen=rounds)
        return replace(self, believed=0.0, rounds_unseen=0)


LinkEstimates = Mapping[str, Mapping[str, LinkEstimate]]
"""cluster -> link -> estimate."""


def make_link_key(one: str, other: str) -> str:
    """Name a link by its ends, whichever way the chain runs; an edge is its id."""
    return " - ".join(sorted((one, other)))


def learn_links(book: LinkEstimates, outcome: RoundOutcome) -> LinkEstimates:
    """Fold a round's samples in; clusters without samples change nothing."""
    after = dict(book)
    for cluster in outcome.clusters:
        if cluster.links:
            after[cluster.cluster_id] = _note(book.get(cluster.cluster_id, {}), cluster)
    return after


def begin_links(book: LinkEstimates, snapshot: Snapshot) -> LinkEstimates:
    """Add links that clusters measured before the run; return the book itself if none is new."""
    after = dict(book)
    for cluster in snapshot.clusters:
        known = book.get(cluster.profile.cluster_id, {})
        rates = {make_link_key(*link.ends): link for link in cluster.profile.link_rates}
        new = {key: link for key, link in rates.items() if key not in known}
        begun = {key: _begin(link, cluster, snapshot) for key, link in new.items()}
        if begun:
            after[cluster.profile.cluster_id] = begun | dict(known)
    return after if after != book else book


def _begin(link: LinkRate, cluster: ClusterSnapshot, snapshot: Snapshot) -> LinkEstimate:
    """Estimate a link before its first round; as promised where its ends are unknown."""
    profile, channel = cluster.profile, cluster.channel
    place = {member.device_id: i for i, member in enumerate(profile.members)}
    edges = {edge.id: edge for edge in profile.edges} or {"": snapshot.edge}
    edge = next((edges[end] for end in link.ends if end in edges), None)
    one, other = sorted(sorted(link.ends, reverse=True), key=lambda end: end not in place)
    if not (0 < link.bit_per_s < math.inf and one in place and (edge or other in place)):
        return LinkEstimate()
    first = profile.members[place[one]]
    if edge is not None:
        width = snapshot.radio.bandwidth_hz / len(snapshot.clusters)
        powers = (first.tx_power_max_w, edge.tx_power_w)
        gain = cluster.find_channel(edge).edge_gain[place[one]]
    else:
        second = profile.members[place[other]]
        radios = (first.d2d_bandwidth_hz, second.d2d_bandwidth_hz, profile.d2d_bandwidth_hz)
        width = min(own for own in radios if own is not None)
        powers = (first.tx_power_max_w, second.tx_power_max_w)
        gain = channel.d2d_gain[place[one]][place[other]]
    snr = np.array(powers) * max(gain, TINY_GAIN) / snapshot.radio.noise_w_per_hz
    promised = harmonic_mean(compute_rate_bit_per_s(width, snr).tolist())
    share = math.log(link.bit_per_s / promised)
    return LinkEstimate(believed=share if abs(share) > AGREES else 0.0, notes=(share,))


def _note(known: Mapping[str, LinkEstimate], cluster: ClusterOutcome) -> dict[str, LinkEstimate]:
    after = {key: estimate.skip_round() for key, estimate in known.items()}
    for sample in cluster.links:
        if not (0 < sample.measured_bit_per_s < math.inf and sample.planned_bit_per_s > 0):
            continue
        key = make_link_key(*sample.ends)
        before = known.get(key, LinkEstimate())
        note = before.believed + math.log(sample.measured_bit_per_s / sample.planned_bit_per_s)
        after[key] = before.add_note(min(note, 0.0) if sample.paced else note)
    return after


def apply_links(snapshot: Snapshot, book: LinkEstimates) -> Snapshot:
    """Return the snapshot with estimated shares; itself where all rates are as promised."""
    clusters = tuple(_apply(c, book.get(c.profile.cluster_id, {})) for c in snapshot.clusters)
    if all(map(is_, clusters, snapshot.clusters)):
        return snapshot
    return replace(snapshot, clusters=clusters)


def _apply(cluster: ClusterSnapshot, known: Mapping[str, LinkEstimate]) -> ClusterSnapshot:
    if not any(estimate.believed for estimate in known.values()):
        return cluster
    names = [member.device_id for member in cluster.profile.members]
    edge = cluster.profile.edge_id

    def shares(name: str, others: list[str]) -> tuple[float, ...]:
        estimates = (known.get(make_link_key(name, other), LinkEstimate()) for other in others)
        return tuple(math.exp(estimate.believed) for estimate in estimates)

    links = LinkShares(d2d=tuple(shares(name, names) for name in names), edge=shares(edge, names))
    return replace(cluster, links=links)
