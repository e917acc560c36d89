"""The first law where stages have replicas, over real processes and mutual TLS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.closeness import assert_near, near
from tests.laws.test_cluster_equals_whole import (
    ADAMW,
    _largest_difference,
    _steps,
    _train_unsplit,
    make_splitter,
    without_labels,
)
from tests.laws.test_daemons_equal_whole import Cluster, _order, cluster_of_daemons
from tests.laws.test_replicas_equal_whole import Replicated


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
    first, second = _steps(splitter, cut, count=2)
    steps = [first, [without_labels(batch) for batch in first], second]
    result, edge = cluster.train(splitter, _order(weights, cut, ADAMW), steps)
    losses, whole = _train_unsplit(splitter, weights, steps, ADAMW)
    assert result.losses == near(losses)
    assert_near({**result.weights, **edge}, whole)
    assert _largest_difference(whole, weights) > 1e-3
    names = [report.name for report in result.reports]
    assert names == ["control-unit", "A/d0", "A/d1", "A/d2"]
    assert all(report.steps == 2 for report in result.reports)
    assert cluster.sessions() == 0
