"""A planned step, replayed, takes as long as its plan says."""

from __future__ import annotations

import pytest

from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.setting import ModelShape
from tests.planned_step import replay_plan
from tests.worlds import first_round, planned


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_replay_takes_the_planned_time(schedule: str) -> None:
    model = ModelShape(blocks=6, decoder_blocks=6, width=128, tokens=32).profile()
    kinds = ["raspberry-pi-5", "raspberry-pi-4", "phone", "raspberry-pi-5"]
    settings = SchedulerConfig(
        schedule=schedule, micro_batch_sizes=(4,), micro_batches=(4,), bound=False
    )
    snapshot = first_round([kinds, kinds], model, [100, 200])
    plan = planned(snapshot, settings, "uniform")
    for cluster in plan.clusters:
        trace = replay_plan(cluster, snapshot, settings)
        assert trace.makespan_s == pytest.approx(cluster.step_s, rel=1e-6)
        assert {s.resource for s in trace.spans} >= {f"stage {k}" for k in range(5)}
