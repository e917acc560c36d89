"""Measurements of a cluster in a round: of each stage, and of the cluster as a whole.

Links are measured beyond their senders' rate limits (`core.wire`). A rate limit in the cluster file
counts as the link's own; a limit at the planned rate says nothing about the link, so a paced sample
means "at least as planned" (``LinkSample.paced``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice, pairwise
from typing import Annotated

from collapipe_flwr.core import bounds
from collapipe_flwr.core.domain import MOST_DEVICES, ClusterPlan, ClusterProfile
from collapipe_flwr.core.keys import one_of
from collapipe_flwr.core.links import LinkReport, LinkTraffic
from collapipe_flwr.core.outcome import GradientNoise
from collapipe_flwr.core.wire import measure_bit_per_s

MOST_STEPS = 2**20  # of one round
_FEW = bounds.most_entries(MOST_DEVICES)
D2D, D2E = "d2d", "d2e"
MOST_NOTES = 20_000  # of one stage, for an audit
MOST_SPANS = 10_000  # of one stage: a report must fit into a message
WORK_NAMES = {  # of spans in a timeline, by kind of work
    "forward": "F",
    "test": "F",
    "backward": "B",
    "weights": "W",
    "optimizer": "step",
    "send": "send",
    "receive": "wait",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One timed piece of work of one stage."""

    work: Annotated[str, one_of(*WORK_NAMES)]
    step: bounds.Count
    micro_batch: bounds.Count
    start_s: bounds.Moment
    stop_s: bounds.Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """Visits of examples whose hidden states were kept (``hits``), and of others.

    Of the latter ``stored`` are kept now. Computing those of the hits had taken ``spared_s``.
    """

    hits: bounds.Count = 0
    misses: bounds.Count = 0
    stored: bounds.Count = 0
    spared_s: bounds.Seconds = 0.0

    @property
    def visits(self) -> int:
        """All visits of examples."""
        return self.hits + self.misses

    def __add__(self, other: CacheUse) -> CacheUse:
        return CacheUse(
            hits=self.hits + other.hits,
            misses=self.misses + other.misses,
            stored=self.stored + other.stored,
            spared_s=self.spared_s + other.spared_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasurement:
    """One stage over all steps since it was opened, or over several intervals of a round.

    The passes of `micro_batches` in training took `forward_s` and `backward_s`, without those of
    evaluations. `wait_s` is time spent waiting for a neighbour, to receive or for room to send.
    `energy_j` is by a sensor of its machine, None without one. `*_up` is the link towards the
    control unit, `*_down` towards the edge; `sent_beside_bytes` were sent to other replicas of the
    stage. `small_square_norm` and `big_square_norm` are means over the steps of the squared norm of
    this stage's gradients for the first micro-batch alone and for the whole batch, weighted by the
    squares of their weights (labels), whose sums are `small_squares` and `big_squares`;
    `small_weight` and `big_weight` are the sums of the weights themselves. Only the first replica
    of a stage has small ones and norms. `peak_tensor_bytes` is by `MemoryMeter`. `spans` are
    recorded on request; the sum of two reports keeps the first `MOST_SPANS`. `cache` is that of the
    control unit's frozen blocks. `notes` and `rounding` are for audits (`pipeline.notes`) and stay
    within the cluster.
    """

    name: bounds.Name
    steps: bounds.Count = 0
    micro_batches: bounds.Count = 0
    forward_s: bounds.Seconds = 0.0
    backward_s: bounds.Seconds = 0.0
    optimizer_s: bounds.Seconds = 0.0
    wait_s: bounds.Seconds = 0.0
    sent_up: LinkTraffic = field(default_factory=LinkTraffic)
    received_up: LinkTraffic = field(default_factory=LinkTraffic)
    sent_down: LinkTraffic = field(default_factory=LinkTraffic)
    received_down: LinkTraffic = field(default_factory=LinkTraffic)
    sent_beside_bytes: bounds.Bytes = 0
    peak_tensor_bytes: bounds.Bytes = 0
    energy_j: bounds.Joules | None = None
    small_square_norm: bounds.MaybeHuge = 0.0
    big_square_norm: bounds.MaybeHuge = 0.0
    small_weight: bounds.Labels = 0.0
    small_squares: bounds.Labels = 0.0
    big_weight: bounds.Labels = 0.0
    big_squares: bounds.Labels = 0.0
    spans: Annotated[tuple[Span, ...], bounds.most_entries(MOST_SPANS)] = ()
    notes: Annotated[Mapping[str, bounds.Text], bounds.most_entries(MOST_NOTES)] = field(
        default_factory=dict
    )
    rounding: bounds.Sentence = ""
    cache: CacheUse = field(default_factory=CacheUse)

    def __add__(self, later: StageMeasurement) -> StageMeasurement:
        """Join two intervals of the same stage."""
        joint: dict[str, object] = {}
        for name in (f.name for f in fields(self) if f.name != "name"):
            mine, theirs = getattr(self, name), getattr(later, name)
            if name == "peak_tensor_bytes":
                joint[name] = max(mine, theirs)
            elif name == "small_square_norm":
                joint[name] = _average((mine, theirs), (self.small_squares, later.small_squares))
            elif name == "big_square_norm":
                joint[name] = _average((mine, theirs), (self.big_squares, later.big_squares))
            elif name == "energy_j":
                known = mine is not None and theirs is not None
                joint[name] = mine + theirs if known else None
            elif name in ("notes", "rounding"):  # of an interval, whose audit is over
                joint[name] = theirs
            elif name == "spans":
                joint[name] = (mine + theirs)[:MOST_SPANS]
            else:
                joint[name] = mine + theirs
        return replace(self, **joint)  # type: ignore[arg-type]


def _average(values: tuple[float, float], weights: tuple[float, float]) -> float:
    """Average two means by their weights; a mean of weight 0 is ignored."""
    (first, second), (mine, theirs) = values, weights
    if not (mine and theirs):
        return second if theirs else first
    return first + theirs / (mine + theirs) * (second - first)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """Bytes of tensors that travelled, and of those that the receiver had already."""

    sent_bytes: bounds.Bytes = 0
    received_bytes: bounds.Bytes = 0
    spared_bytes: bounds.Bytes = 0

    def __add__(self, other: TransferStats) -> TransferStats:
        return TransferStats(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            received_bytes=self.received_bytes + other.received_bytes,
            spared_bytes=self.spared_bytes + other.spared_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMeasurement:
    """One cluster's round; ``reports`` of control unit and devices are in pipeline order."""

    cluster_id: bounds.Name
    examples: bounds.Claim
    wall_s: bounds.Seconds
    losses: Annotated[tuple[bounds.MaybeHuge, ...], bounds.most_entries(MOST_STEPS)]  # per step
    reports: Annotated[tuple[StageMeasurement, ...], bounds.most_entries(MOST_DEVICES)] = ()
    edge: StageMeasurement | None = None
    moved: TransferStats = field(default_factory=TransferStats)  # between control unit and devices
    fresh_examples: bounds.Count = 0  # that arrived since the last round
    prequential_loss: bounds.MaybeHuge | None = None  # of fresh examples, before training
    replanned: ClusterPlan | None = None  # the last plan, if devices were lost
    incidents: Annotated[tuple[bounds.Sentence, ...], _FEW] = ()  # and how the round continued
    absent: Annotated[tuple[bounds.Name, ...], _FEW] = ()  # devices, at the end
    quarantined: Annotated[Mapping[bounds.Name, bounds.Sentence], _FEW] = field(
        default_factory=dict
    )  # what each did wrong
    untrue: Annotated[tuple[bounds.Name, ...], _FEW] = ()  # of those, found by audits
    lost: Annotated[tuple[bounds.Name, ...], _FEW] = ()  # devices that died, back or not
    profile: ClusterProfile | None = None  # of machines, at the end: devices join and are removed
    epsilon: bounds.MaybeHuge | None = None  # that the cluster's examples have spent in the run
    next_epsilon: bounds.MaybeHuge | None = None  # after another round, of the largest batches
    kept_share: bounds.Share = 0.0  # of the visits of the next round: see `CacheUse`

    @property
    def cluster_ids(self) -> set[str]:
        """The clusters that its parts name: one, unless a part is wrong."""
        parts = (self, self.replanned, self.profile)
        return {part.cluster_id for part in parts if part is not None}

    @property
    def loss(self) -> float | None:
        """The mean loss over the steps, None without steps."""
        return math.fsum(self.losses) / len(self.losses) if self.losses else None

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes both ways: between members, and between the last of them and the edge.

        If a device was lost, another was the last; the edge knows what all of them sent.
        """
        hops = [report.sent_down.bytes + report.received_down.bytes for report in self.reports]
        edge, beside = self.edge, sum(report.sent_beside_bytes for report in self.reports)
        last = edge.sent_up.bytes + edge.received_up.bytes if edge else sum(hops[-1:])
        return {D2D: sum(hops) - last + beside, D2E: last}

    def report_links(self, plan: ClusterPlan, *, paced: bool) -> tuple[LinkReport, ...]:
        """Report the hops of ``plan``, with its rates if senders kept to them (``paced``).

        Empty if the round ran over several chains. Where stages have replicas, each connected pair
        has an entry; bytes of one end count by the micro-batches that the pair shares.
        """
        names = tuple(report.name for report in self.reports[1:])
        if self.edge is None or names != plan.device_ids:
            return ()
        left = iter(self.stages)
        stages = [tuple(islice(left, count)) for count in plan.replicas]
        return tuple(
            LinkReport(
                cluster_id=self.cluster_id,
                sender=ahead[i].name,
                receiver=behind[j].name,
                link=hop if paced else hop.unpaced,
                forward=_join_ends(ahead[i].sent_down, behind[j].received_up, of_sender),
                backward=_join_ends(behind[j].sent_up, ahead[i].received_down, of_receiver),
            )
            for (ahead, behind), hop in zip(pairwise(stages), plan.hops, strict=False)
            for i, j, of_sender, of_receiver in _list_meetings(plan, len(ahead), len(behind))
        )

    @property
    def stages(self) -> tuple[StageMeasurement, ...]:
        """The reports of all stages in pipeline order."""
        return (*self.reports, self.edge) if self.edge else self.reports

    @property
    def cache(self) -> CacheUse:
        """How far the control unit needed to compute its frozen blocks."""
        return self.reports[0].cache if self.reports else CacheUse()

    @property
    def timeline(self) -> dict[str, tuple[Span, ...]]:
        """The spans of every stage in pipeline order; empty unless the run asked for them."""
        return {report.name: report.spans for report in self.stages if report.spans}

    @property
    def peak_memory_bytes(self) -> dict[str, int]:
        """Peak tensor memory by role."""
        return {report.name: report.peak_tensor_bytes for report in self.stages}

    @property
    def gradient_noise(self) -> GradientNoise | None:
        """Squared gradient norms of the whole model for micro-batches and batches, by their sizes.

        Sizes are those of the batches that were trained on: sum n^2 / sum n over the steps, for n
        labels each, in examples with the average number of labels (docs/theory-appendix.md, 4.4).
        The edge takes part in all steps; other stages count for their share.
        """
        edge = self.edge
        if edge is None or not self.reports or not self.examples:
            return None
        told = (edge.small_weight, edge.small_squares, edge.big_weight, edge.big_squares)
        if not min(told) > 0:
            return None
        per_example = edge.big_weight / self.examples
        small, big = 0.0, 0.0
        for r in self.stages:
            small += r.small_square_norm * (r.small_squares / edge.small_squares)
            big += r.big_square_norm * (r.big_squares / edge.big_squares)
        return GradientNoise(
            small_examples=edge.small_squares / edge.small_weight / per_example,
            small_square_norm=small,
            big_examples=edge.big_squares / edge.big_weight / per_example,
            big_square_norm=big,
        )


def _list_meetings(
    plan: ClusterPlan, ahead: int, behind: int
) -> Iterator[tuple[int, int, float, float]]:
    """List pairs of replicas of adjacent stages that exchange data, with the share of each."""
    counts = Counter((m % ahead, m % behind) for m in range(plan.micro_batches))
    for (i, j), count in sorted(counts.items()):
        own = (len(range(i, plan.micro_batches, ahead)), len(range(j, plan.micro_batches, behind)))
        yield i, j, count / own[0], count / own[1]


def _join_ends(sent: LinkTraffic, received: LinkTraffic, share: float) -> LinkTraffic:
    """Join the measurements of both ends of a hop's direction; their notes give its rate."""
    return LinkTraffic(
        bytes=round(share * sent.bytes),
        sending_s=share * sent.sending_s,
        wire_bit_per_s=measure_bit_per_s(sent.notes, received.notes),
    )
