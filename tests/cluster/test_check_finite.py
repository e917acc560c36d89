"""`train.check-finite` names the device where numbers stop being finite, thread or daemon.

What a gradient does is in tests/pipeline/test_options.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.fleet import Fleet, ThreadFleet
from collapipe_flwr.cluster.hosted import HostedEdge, ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import Execution
from tests.cluster.hosted import daemons
from tests.rounds import (
    SGD,
    Cut,
    make_splitter,
    micro_batches,
    steps_of,
)

CUT = Cut(stops=(1, 4, 5), micro_batches=(2, 2))  # the second device holds blocks 1 to 3
CHECKED = Execution(check_finite=True)


@pytest.fixture(scope="module")
def splitter() -> Splitter:
    return make_splitter("bert", dropout=0.0)


@pytest.fixture(scope="module")
def damaged(splitter: Splitter) -> dict[str, Tensor]:
    """The first weights, with one number of block 2 that is none."""
    weights = dict(splitter.initial_weights(seed=1))
    key = next(k for k in splitter.segment_keys(2, 3) if weights[k].dim() == 2)
    weights[key] = weights[key].clone()
    weights[key][0, 0] = torch.nan
    return weights


@contextmanager
def _fleet(remote: bool) -> Iterator[Fleet]:
    """Three devices, as daemons or threads."""
    if not remote:
        yield ThreadFleet(ThreadEdge())
        return
    with daemons(3) as (cluster, address):
        yield RemoteFleet(cluster=cluster, edges={"": HostedEdge(address=address)})


def _train(
    splitter: Splitter, weights: dict[str, Tensor], fleet: Fleet, execution: Execution
) -> ClusterResult:
    plan = CUT.plan()
    if isinstance(fleet, RemoteFleet):
        names = map(fleet.cluster.device_id, fleet.cluster.devices)
        segments = zip(plan.segments, names, strict=True)
        plan = replace(plan, segments=tuple(replace(s, device_id=name) for s, name in segments))
    order = TrainingOrder(
        plan=plan,
        weights=weights,
        learning=LearningSettings(optimizer=SGD, deadline_s=20.0, execution=execution),
    )
    return train_round(
        splitter, order, micro_batches(splitter, steps_of(splitter, CUT, count=1)), fleet
    )


@pytest.mark.parametrize(("remote", "device"), [(True, "shed/board-1"), (False, "A/d1")])
def test_the_device_of_the_damaged_block_is_named(
    splitter: Splitter, damaged: dict[str, Tensor], remote: bool, device: str
) -> None:
    told = rf"forward pass of {device} \(blocks 1-3\) in step 0, .*no step was taken yet"
    with _fleet(remote) as fleet, pytest.raises(LinkError, match=told):
        _train(splitter, damaged, fleet, CHECKED)


def test_a_check_changes_nothing_where_all_is_finite(splitter: Splitter) -> None:
    weights = splitter.initial_weights(seed=1)
    fleet = ThreadFleet(ThreadEdge())
    (checked,) = _train(splitter, weights, fleet, CHECKED).losses
    (plain,) = _train(splitter, weights, fleet, Execution()).losses
    assert checked == plain
