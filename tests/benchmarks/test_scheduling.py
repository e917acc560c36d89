"""The bench on tiny sizes: what it measures and that its gaps are gaps."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scheduling.decisions import BenchPlan, bench, bench_plan
from benchmarks.scheduling.optimality import gap, gaps_of, instance
from benchmarks.scheduling.report import bench_table
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.simulation.setting import Setting


def test_a_tiny_bench_has_the_promised_form(small: Setting) -> None:
    ticks: list[str] = []
    exact = replace(small, settings=replace(small.settings, schedule="gpipe"))
    plan = BenchPlan(decisions=(small,), radio=exact, instances=1, search=())
    result = bench(plan, ticks.append)
    values = json.loads(json.dumps(result.as_json()))
    assert {"clusters", "devices", "blocks", "median_s"} <= set(values["decisions"][0])
    assert {"clusters", "fast_s", "cvxpy_s", "speedup", "relative_gap"} <= set(values["radio"])
    assert {"instances", "mean_gap", "max_gap"} <= set(values["optimality"])
    assert abs(values["radio"]["relative_gap"]) < 1e-3
    assert len(ticks) == plan.steps
    assert bench_table(result).row_count == 4 + len(result.optimality.histogram)


def test_nothing_beats_brute_force() -> None:
    gaps = [gap(instance(seed)) for seed in (3, 6, 13)]
    assert min(gaps) > -1e-9
    assert max(gaps) < 0.05


def test_instances_are_the_same_every_time() -> None:
    assert instance(3) == instance(3)
    assert instance(3).snapshot != instance(4).snapshot


def test_the_usual_sizes_and_bad_ones() -> None:
    plan = bench_plan((10, 10_000), 500)
    assert [(s.clusters, s.devices, s.model.blocks) for s in plan.decisions] == [
        (10, 10, 24),
        (10_000, 10, 24),
    ]
    assert plan.decisions[0].rounds > plan.decisions[1].rounds >= 2
    with pytest.raises(ConfigError, match=r"--clusters must .* got 0"):
        bench_plan((0,), 1)
    with pytest.raises(ConfigError, match="--instances must be >= 1"):
        bench_plan((1,), 0)


def test_at_a_hundred_clusters_codecs_are_also_chosen() -> None:
    codecs = [(s.clusters, len(s.settings.codecs)) for s in bench_plan((10, 100), 1).decisions]
    assert codecs == [(10, 1), (100, 1), (100, 3)]


def test_the_histogram_counts_every_gap_once() -> None:
    gaps = gaps_of(np.array([-1e-9, 0.0, 5e-7, 5e-5, 2e-2, 0.3]))
    counts = {part.below: part.instances for part in gaps.histogram}
    assert counts == {1e-6: 3, 1e-4: 1, 1e-3: 0, 1e-2: 0, 5e-2: 1, None: 1}
    assert gaps.max_gap == 0.3 and gaps.quantiles["0.5"] <= gaps.quantiles["0.99"] <= 0.3
