"""Larger batches that pay only when all clusters take them are found from scratch."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.scheduling.optimality import gap, instance
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.base import make_initial_state, make_solver
from collapipe_flwr.scheduler.planner import PlanSolver
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.setting import ModelShape, Setting

GRID = SchedulerConfig(micro_batch_sizes=(1, 8), micro_batches=(1, 16))


def planner(settings: SchedulerConfig, clusters: int = 4) -> PlanSolver:
    setting = Setting(clusters=clusters, devices=4, examples=1000, model=ModelShape(blocks=8))
    profile = setting.model.profile()
    snapshot = setting.world(1, profile).snapshot(1, profile)
    return make_solver(tabulate(snapshot), make_initial_state(snapshot, settings), settings)


def test_no_common_batch_is_much_better_than_what_was_found() -> None:
    found = planner(GRID).solve().objective
    for size in GRID.micro_batch_sizes:
        for count in GRID.micro_batches:
            one = planner(GRID)
            settings = replace(GRID, micro_batch_sizes=(size,), micro_batches=(count,))
            reference = replace(one.learning.reference, micro_batch_size=size, micro_batches=count)
            learning = replace(one.learning, reference=reference)
            rival = replace(one, settings=settings, learning=learning).solve()
            assert found <= rival.objective * 1.01


def test_clusters_that_must_slow_down_together_do() -> None:
    """Instances in which every single cluster's move away from haste is a loss."""
    for seed in (371, 388):
        assert gap(instance(seed)) < 1e-4
