"""The first law where stages have replicas, over real processes and mutual TLS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.core.measurements import ClusterMeasurement
from collapipe_flwr.scheduler.outcomes import sample_links
from tests.closeness import assert_near, near
from tests.laws.test_daemons_equal_whole import Cluster, cluster_of_daemons
from tests.rounds import (
    ADAMW,
    Replicated,
    largest_difference,
    make_splitter,
    order_of,
    steps_of,
    train_whole,
    without_labels,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of_daemons(tmp_path_factory.mktemp("replicas"), tls=True) as found:
        yield found


class OnDaemons(Replicated):
    """Replicas are the daemons that are left, in order."""

    def plan(self):
        plan, names = super().plan(), iter(("A/d0", "A/d1", "A/d2"))
        segments = []
        for segment, count in zip(plan.segments, self.replicas, strict=True):
            first, *others = (next(names) for _ in range(count))
            segments.append(replace(segment, device_id=first, replicas=tuple(others)))
        return replace(plan, segments=tuple(segments))


CUTS = [
    OnDaemons(stops=(5,), replicas=(3,), micro_batches=(2, 1, 2, 1)),
    OnDaemons(stops=(2, 5), replicas=(1, 2), micro_batches=(2, 2, 1)),
    OnDaemons(
        stops=(2, 5), replicas=(2, 1), micro_batches=(2, 2, 1), schedule="1f1b", depths=(3, 2, 2, 1)
    ),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_round_on_daemons_equals_the_unsplit_model(cluster: Cluster, cut: OnDaemons) -> None:
    splitter = make_splitter("marian", dropout=0.0)
    weights = splitter.initial_weights(seed=1)
    first, second = steps_of(splitter, cut, count=2)
    steps = [first, [without_labels(batch) for batch in first], second]
    result = cluster.train(splitter, order_of(cut, weights, ADAMW), steps)
    losses, whole = train_whole(splitter, weights, steps, ADAMW)
    assert result.losses == near(losses)
    assert_near(dict(result.weights), whole)
    assert largest_difference(whole, weights) > 1e-3
    names = [report.name for report in result.reports]
    assert names == ["control-unit", "A/d0", "A/d1", "A/d2", "edge"]
    assert all(report.steps == 2 for report in result.reports)
    assert cluster.sessions() == 0


def test_every_two_replicas_that_meet_have_a_link_in_reports(cluster: Cluster) -> None:
    """And of what one of them sent, each link has its part."""
    splitter, cut = make_splitter("marian", dropout=0.0), CUTS[1]
    steps = steps_of(splitter, cut, count=2)
    order = order_of(cut, splitter.initial_weights(seed=1), ADAMW)
    result = cluster.train(splitter, order, steps)
    plan = replace(cut.plan(), hops=(LinkConfig(),) * 3)
    *reports, edge = result.reports
    first, *others = reports
    told = ClusterMeasurement(
        cluster_id="A",
        examples=1,
        wall_s=1.0,
        losses=result.losses,
        reports=tuple(reports),
        edge=edge,
    )
    links = told.report_links(plan, paced=False)
    assert [(link.sender, link.receiver) for link in links] == [
        ("control-unit", "A/d0"),
        ("A/d0", "A/d1"),
        ("A/d0", "A/d2"),
        ("A/d1", "edge"),
        ("A/d2", "edge"),
    ]
    assert links[0].forward.bytes == first.sent_down.bytes > 0
    shared = links[1].forward.bytes, links[2].forward.bytes
    assert sum(shared) == pytest.approx(others[0].sent_down.bytes, abs=1)
    assert shared[0] == pytest.approx(2 * shared[1], abs=1)  # two of three micro-batches
    assert not list(sample_links(plan, told, paced=False))
    beside = sum(report.sent_beside_bytes for report in others)
    assert beside > 0
    assert told.link_bytes["d2d"] == beside + sum(
        r.sent_down.bytes + r.received_down.bytes for r in (first, others[0])
    )
