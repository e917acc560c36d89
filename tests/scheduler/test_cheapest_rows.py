"""Rows by dynamic programming against all rows there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scheduling.search_gaps import SearchSize, search_planner
from collapipe_flwr.costs.arrays import Array, Mask
from collapipe_flwr.costs.layouts import UNUSED, Layouts, stack_layouts
from collapipe_flwr.costs.work import fits
from collapipe_flwr.scheduler.cheapest_rows import HURRY, cheapest_rows
from collapipe_flwr.scheduler.initial_layouts import all_layouts, rows_for
from collapipe_flwr.scheduler.planner import PlanSolver
from collapipe_flwr.scheduler.scorer import Scorer

SMALL = SearchSize(clusters=3, devices=4, blocks=8, seeds=range(4))
COUNTS = (1, 8)
NO_HURRY = 1e9  # seconds


def small_planner(seed: int, schedule: str) -> PlanSolver:
    planner = search_planner(replace(SMALL, schedule=schedule), seed, queues=True)
    return replace(planner, settings=replace(planner.settings, micro_batches=COUNTS))


def every_row(planner: PlanSolver, pair: tuple[int, int]) -> Layouts:
    """All rows with these micro-batches that fit."""
    members, stops = all_layouts(SMALL.devices, SMALL.blocks)
    clusters = range(SMALL.clusters)
    rows = stack_layouts([rows_for(m, members, stops, np.array([pair])) for m in clusters])
    return planner.keep_fitting(rows)


def in_order(planner: PlanSolver, rows: Layouts) -> Mask:
    """Rows in which slower devices stand ahead of faster ones."""
    speed_mi = planner.tables.members.speed_mi
    speed = speed_mi[rows.cluster_r[:, None], np.maximum(rows.member_rs, 0)]
    speed *= 1.0 + 1e-6 * rows.member_rs
    return np.asarray(((np.diff(speed, axis=1) > 0) | ~rows.used_rs[:, 1:]).all(1))


def least(values: Array, rows: Layouts) -> Array:
    """The least value of every cluster."""
    found = np.full(SMALL.clusters, np.inf)
    np.minimum.at(found, rows.cluster_r, values)
    return found


def cheapest(scorer: Scorer, rows: Layouts, lengths: Array) -> Layouts:
    """What is found from the first of every cluster's rows on."""
    _, first = np.unique(rows.cluster_r, return_index=True)
    return cheapest_rows(scorer, rows.take(first), lengths)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", SMALL.seeds)
def test_without_hurry_no_row_in_that_order_is_cheaper(seed: int, schedule: str) -> None:
    """With one micro-batch a step takes the sum of its stages and hops, as the search has it."""
    planner = small_planner(seed, schedule)
    scorer = Scorer(planner, planner.make_opening_prices())
    rows = every_row(planner, (1, 1))
    rows = rows.take(in_order(planner, rows))
    found = cheapest(scorer, rows, np.array([NO_HURRY]))
    values = []
    for each in (found, rows):
        costs = scorer.estimate(each)
        slope = HURRY * scorer.slope_m[each.cluster_r]
        values.append(least(slope * costs.latency + costs.worth, each))
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_rows_that_end_in_time_need_little_more_energy_than_the_best(schedule: str) -> None:
    dearer = []
    for seed in SMALL.seeds:
        planner = small_planner(seed, schedule)
        scorer = Scorer(planner, planner.make_opening_prices())
        rows = every_row(planner, (1, 8))
        costs = scorer.estimate(rows)
        late_s = 1.2 * least(costs.latency, rows).max()
        found = cheapest(scorer, rows, late_s * np.array([0.9, 0.95, 1.0, 1.05, 1.1]))
        assert fits(planner.tables, found, planner.settings).all()
        for members, depth in zip(found.member_rs.tolist(), found.depth_r, strict=True):
            assert len({*members} - {UNUSED}) == depth
        assert (np.diff(found.stop_rs, axis=1, prepend=0) >= found.used_rs).all()
        assert (found.stop_rs[:, -1] == SMALL.blocks).all()
        ours = scorer.estimate(found)
        in_time = ours.latency <= late_s
        best = least(np.where(costs.latency <= late_s, costs.worth, np.inf), rows)
        dearer += (least(ours.worth[in_time], found.take(in_time)) / best).tolist()
    assert np.median(dearer) < 1.02
    assert np.max(dearer) < 2.0


def test_devices_that_can_pay_for_nothing_are_left_out() -> None:
    planner = small_planner(0, "1f1b")
    members = planner.tables.members
    room = np.where(np.arange(members.speed_mi.shape[1]) == 2, 0.0, np.inf)
    poor = replace(planner, room_mi=np.broadcast_to(room, members.speed_mi.shape))
    rows = every_row(planner, (1, 8))
    found = cheapest(Scorer(poor, poor.make_opening_prices()), rows, np.array([NO_HURRY]))
    assert len(found) == SMALL.clusters
    assert not (found.member_rs == 2).any()
    nobody = replace(planner, room_mi=np.zeros_like(members.speed_mi))
    assert not len(
        cheapest(Scorer(nobody, nobody.make_opening_prices()), rows, np.array([NO_HURRY]))
    )
