"""A round whose devices begin and end it one by one equals one that they share, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.closeness import assert_near, near
from tests.cluster.test_recovery import assert_same
from tests.laws.test_cluster_equals_whole import (
    ADAMW,
    CUTS,
    Cut,
    _largest_difference,
    _steps,
    _train_split,
    _train_unsplit,
    make_splitter,
    without_labels,
)
from tests.laws.test_daemons_equal_whole import Cluster, _order, cluster_of_daemons
from tests.laws.test_replicas_on_daemons import CUTS as REPLICATED


@dataclass(frozen=True)
class OneByOne:
    """A cut with overlap."""

    cut: Cut

    def plan(self):
        return replace(self.cut.plan(), overlap=True)

    @property
    def schedule(self) -> str:
        return self.cut.schedule


@pytest.mark.parametrize("model_type", ["marian", "bert"])  # one ties embeddings to the head
@pytest.mark.parametrize("cut", CUTS[2:], ids=str)
def test_threads_that_end_one_by_one_compute_the_same(model_type: str, cut: Cut) -> None:
    splitter = make_splitter(model_type, dropout=0.0)
    weights = splitter.initial_weights(seed=1)
    steps = _steps(splitter, cut, count=3)
    losses, together = _train_split(splitter, weights, cut, steps, ADAMW)
    found = _train_split(splitter, weights, OneByOne(cut), steps, ADAMW)
    assert found[0] == losses
    assert_same(found[1], together)
    whole_losses, whole = _train_unsplit(splitter, weights, steps, ADAMW)
    assert losses == near(whole_losses)
    assert_near(together, whole)
    assert _largest_difference(whole, weights) > 1e-3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of_daemons(tmp_path_factory.mktemp("overlap"), tls=True) as found:
        yield found


ONE_STEP, UNLABELLED_IN_BETWEEN, UNLABELLED_AT_LAST = (0,), (0, None, 1), (0, 1, None)


@pytest.mark.parametrize(
    ("order", "every"),
    [
        (ONE_STEP, 0),
        (UNLABELLED_IN_BETWEEN, 0),
        (UNLABELLED_IN_BETWEEN, 1),
        (UNLABELLED_AT_LAST, 0),
        (UNLABELLED_AT_LAST, 2),
    ],
)
@pytest.mark.parametrize("model_type", ["marian", "bert"])
def test_daemons_that_begin_and_end_one_by_one_compute_the_same(
    cluster: Cluster, model_type: str, order: tuple[int | None, ...], every: int
) -> None:
    splitter = make_splitter(model_type, dropout=0.0)
    weights = splitter.initial_weights(seed=1)
    cut = Cut(stops=(1, 2, 5), micro_batches=(2, 2, 1), schedule="1f1b")
    labelled = _steps(splitter, cut, count=2)
    unlabelled = [without_labels(batch) for batch in labelled[0]]
    steps = [unlabelled if which is None else labelled[which] for which in order]
    ends = []
    for each in (cut, OneByOne(cut)):
        result = cluster.train(splitter, _order(weights, each, ADAMW), steps, every=every)
        ends.append(result)
        assert cluster.sessions() == 0
    together, apart = ends
    assert apart.losses == together.losses
    assert len(apart.losses) == len(steps) - order.count(None)
    assert_same(apart.weights, together.weights)
    assert _largest_difference(dict(apart.weights), weights) > 1e-3
    assert [report.steps for report in apart.reports] == [
        report.steps for report in together.reports
    ]
    assert apart.moved == together.moved


@pytest.mark.parametrize("cut", REPLICATED, ids=str)
def test_replicas_that_begin_and_end_one_by_one_compute_the_same(cluster: Cluster, cut) -> None:
    splitter = make_splitter("marian", dropout=0.0)
    weights = splitter.initial_weights(seed=1)
    steps = _steps(splitter, cut, count=2)
    together, apart = (
        cluster.train(splitter, _order(weights, each, ADAMW), steps)
        for each in (cut, OneByOne(cut))
    )
    assert apart.losses == together.losses
    assert_same(apart.weights, together.weights)
