"""A control unit that is the edge is priced as the one machine that it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from collapipe_flwr.core.domain import ModelProfile, Snapshot
from collapipe_flwr.core.replay import ResourceUse, StepTimes, _Replay, build_unchecked
from collapipe_flwr.costs.chain import (
    compute_full_power_times,
    make_chain,
    make_step_times,
    schedule_rows,
)
from collapipe_flwr.costs.layouts import Layouts
from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.work import OPTIMISER_FLOP_PER_BYTE
from collapipe_flwr.scheduler.base import make_solver
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.scorer import Scorer
from collapipe_flwr.simulation.setting import ModelShape
from collapipe_flwr.simulation.world import make_world, with_edge_at_home
from tests.worlds import planned

MOST = {"1f1b": 1.12, "gpipe": 1.18}  # of what a step really takes, as docs/theory.md says
OPTIONS = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(8,), schedule="1f1b")


class OneProcessor(_Replay):
    """A replay in which the first and the last stage share a processor by time slices."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.left, self.since, self.turn = {}, 0.0, 0

    def _use(self, resource, length_s, done, action) -> None:
        if resource not in (self.workers[0], self.workers[-1]):
            super()._use(resource, length_s, done, action)
            return
        self._advance()
        self.left[resource.place] = [length_s, resource, done, action]
        self._expect()

    def _advance(self) -> None:
        for each in self.left.values():
            each[0] -= (self.now - self.since) / len(self.left)
        self.since = self.now

    def _expect(self) -> None:
        """The pass that ends first if no other begins."""
        self.turn += 1
        if self.left:
            left_s, resource, *_ = min(self.left.values(), key=lambda each: each[0])
            end = self.now + max(left_s, 0.0) * len(self.left)
            self.events.append((end, len(self.spans), self._over, resource, self.turn))
            self.events.sort()
            self.spans.append(ResourceUse(resource.name, 0, self.now, end))

    def _over(self, resource, turn) -> None:
        if turn == self.turn:
            self._advance()
            _, _, done, action = self.left.pop(resource.place)
            self._expect()
            done(resource, action)


def at_home(first: float, last: float, seed: int = 0) -> Snapshot:
    """A control unit with embedding and head of so many blocks' work each."""
    model = ModelShape(blocks=4, width=128, tokens=32, vocabulary=500).profile()
    block = model.blocks[0]

    def part(blocks: float) -> object:
        return replace(
            block,
            forward_flop=blocks * block.forward_flop,
            backward_flop=blocks * block.backward_flop,
        )

    model = replace(model, embedding=part(first), decoder=part(last))
    world = make_world(
        cluster_devices=[["raspberry-pi-4", "raspberry-pi-5", "jetson-nano", "raspberry-pi-4"]],
        examples=[100],
        seed=seed,
    )
    world = replace(world, clusters=tuple(map(with_edge_at_home, world.clusters)))
    return world.snapshot(1, model)


def rows_of(snapshot: Snapshot) -> Layouts:
    """Three devices, of which one has two blocks."""
    del snapshot
    return Layouts(
        cluster_r=np.array([0]),
        member_rs=np.array([[1, 2, 3]]),
        stop_rs=np.array([[1, 3, 4]]),
        micro_batch_size_r=np.array([4]),
        micro_batches_r=np.array([8]),
    )


@pytest.mark.parametrize("ends", [(0.0, 1.0), (0.3, 1.0), (1.0, 0.3), (0.0, 3.0), (1.5, 1.5)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_step_takes_about_as_long_as_on_one_processor(
    ends: tuple[float, float], schedule: str
) -> None:
    """Never less than with time slices, and exactly so where one part has nothing to compute."""
    snapshot, options = at_home(*ends), replace(OPTIONS, schedule=schedule)
    tables = tabulate(snapshot)
    chain = make_chain(tables, rows_of(snapshot), options)
    times = compute_full_power_times(chain, np.array([snapshot.radio.bandwidth_hz]))
    (depths,), (priced_s,) = schedule_rows(chain, times)
    two = replace(tables, edges=replace(tables.edges, home_m=np.array([False])))
    step: StepTimes = make_step_times(make_chain(two, rows_of(snapshot), options), times, 0)
    played = OneProcessor(build_unchecked(schedule, depths, 8), step).run().makespan_s
    _, (apart_s,) = schedule_rows(make_chain(two, rows_of(snapshot), options), times)
    assert played * (1.0 - 1e-9) <= priced_s <= MOST[schedule] * played
    assert apart_s <= played * (1.0 + 1e-9)
    if not min(ends):
        assert priced_s == pytest.approx(played)


def test_both_parts_cost_the_control_unit_energy() -> None:
    snapshot = at_home(0.5, 2.0)
    tables, rows = tabulate(snapshot), rows_of(snapshot)
    joule = make_chain(tables, rows, OPTIONS).computing_j[0, 0]
    model: ModelProfile = snapshot.model
    parts = (model.embedding, model.decoder)
    flop = 32 * sum(part.forward_flop + part.backward_flop for part in parts)
    flop += OPTIMISER_FLOP_PER_BYTE * sum(part.parameter_bytes for part in parts)
    unit = snapshot.clusters[0].profile.control_unit
    assert joule == pytest.approx(4 * flop * unit.energy_per_flop_j)


def test_searches_price_it_as_plans_do() -> None:
    """The fast estimates of rows against their price."""
    for ends in ((0.5, 2.0), (2.0, 0.5)):
        snapshot = at_home(*ends)
        options = replace(OPTIONS, schedule="gpipe")
        scheduler = make_scheduler("latency-only", options)
        planner = make_solver(tabulate(snapshot), scheduler.init(snapshot), options)
        rows = rows_of(snapshot)
        found = Scorer(planner, planner.make_opening_prices()).estimate(rows)
        chain = make_chain(planner.tables, rows, options)
        priced = planner.optimize_radio(rows).priced
        assert found.latency[0] == pytest.approx(priced.latency_s[0], rel=0.02)
        assert chain.hops.shared.sum() == 0


def test_its_link_is_its_own_and_shares_no_band() -> None:
    """The last hop takes as long, whatever the bandwidth towards other edges."""
    snapshot = at_home(0.0, 1.0)
    plan = planned(snapshot, OPTIONS, "uniform")
    wide = replace(snapshot, radio=replace(snapshot.radio, bandwidth_hz=1e3))
    assert price(plan, wide).latency_s == price(plan, snapshot).latency_s
