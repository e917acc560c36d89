"""Replicas on daemons that are as slow as boards: what they are for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.data_plane.recovery import cluster_of, run_job, small_job
from collapipe_flwr.core.domain import ClusterPlan
from tests.cluster.daemon_processes import Daemon, running

STEPS, MICRO_BATCHES = 3, 4


def _steps_s(plan: ClusterPlan, cluster) -> float:
    """In which the control unit drives the steps of a round."""
    job = small_job(1, steps=STEPS, blocks=4)
    depths = (MICRO_BATCHES,) * len(plan.warmup_depth)
    plan = replace(plan, micro_batches=MICRO_BATCHES, warmup_depth=depths)
    first = next(iter(job.batches()))[0]
    batches = iter([[first] * MICRO_BATCHES] * STEPS)
    result, _ = run_job(replace(job, plan=plan), cluster, batches)
    assert not result.incidents
    control_unit = result.reports[0]
    return control_unit.forward_s + control_unit.backward_s + control_unit.wait_s


@pytest.mark.slow
def test_two_slow_boards_that_share_all_blocks_take_little_more_than_half_as_long(
    tmp_path: Path,
) -> None:
    """A pipeline of both fills and drains in every step, so with few micro-batches it is slower."""
    slowness = tmp_path / "slow"
    slowness.write_text("4.0")
    boards = [Daemon("device", "--name", f"d{n}", slow=slowness) for n in range(2)]
    with running(*boards, Daemon("edge")) as (*hosts, edge):
        cluster = cluster_of(hosts, edge)
        alone, piped = small_job(1, blocks=4).plan, small_job(2, blocks=4).plan
        (segment,) = alone.segments
        shared = replace(alone, segments=(replace(segment, replicas=("recovery/d1",)),))
        alone_s, piped_s, shared_s = (_steps_s(plan, cluster) for plan in (alone, piped, shared))
    assert shared_s < 0.7 * alone_s
    assert shared_s < 0.95 * piped_s
