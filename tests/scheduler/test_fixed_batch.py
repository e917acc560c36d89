"""Where the batch is the user's, plans choose only how it is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.scheduler.policies import POLICIES
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from tests.worlds import draw_snapshot, planned

BATCH = 24


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_the_batch(policy: str, seed: int) -> None:
    settings = Planning().for_batches(BATCH).settings
    snapshot = draw_snapshot(seed, clusters=2, devices=3)
    plan = planned(snapshot, settings, policy)
    assert {c.micro_batch_size * c.micro_batches for c in plan.clusters} == {BATCH}


def test_no_fixed_cut_is_better_than_the_chosen_one() -> None:
    settings = Planning().for_batches(BATCH).settings
    for seed in range(2):
        snapshot = draw_snapshot(seed, clusters=1, devices=3)
        chosen = latency_of(settings, snapshot)
        fixed = [
            latency_of(
                replace(settings, micro_batch_sizes=(size,), micro_batches=(count,)), snapshot
            )
            for size, count in settings.batches
        ]
        assert chosen <= min(fixed) * (1 + 1e-9)


def latency_of(settings: SchedulerConfig, snapshot) -> float:
    plan = planned(snapshot, settings, "latency-only")
    return plan.latency_s


def test_a_batch_that_may_not_be_cut_is_one_micro_batch() -> None:
    assert Planning().for_batches(BATCH, cut=False).settings.batches == ((BATCH, 1),)


def test_a_batch_that_no_pair_of_the_grids_makes_up_is_refused() -> None:
    with pytest.raises(ScheduleError, match="makes up a batch of 100: add its divisors"):
        SchedulerConfig(batch_size=100)
