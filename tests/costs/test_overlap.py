"""What handing out and collecting weights while others compute could gain at most."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collapipe_flwr.costs.chain import chain_of
from collapipe_flwr.costs.layouts import planned_codecs, rows_of_plans
from collapipe_flwr.costs.price import achieved_times, planned_powers
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.simulation.episode import run_episode
from collapipe_flwr.simulation.setting import Setting, preset

SETTINGS = {
    "defaults": Setting(clusters=5, devices=4),
    **{name: preset(name) for name in ("paper", "one-strong", "cellular")},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_overlapping_weights_with_computing_gains_less_than_a_hundredth(name: str) -> None:
    setting = SETTINGS[name]
    settings = replace(setting.settings, schedule="1f1b")
    profile = setting.model.profile()
    world = setting.world(7, profile)
    scheduler = make_scheduler("dssda", settings)
    (done,) = run_episode(world, scheduler, profile, 1, options=settings)
    tables, plans = tabulate(world.snapshot(1, profile)), done.plan.clusters
    rows = rows_of_plans(tables, plans)
    chain = chain_of(planned_codecs(tables, rows, plans), rows, settings)
    hops = achieved_times(chain, plans, planned_powers(chain, plans))
    for r, cluster in enumerate(done.priced.clusters):
        # A step is no shorter for it; only the first forward passes of a round, until the last
        # device has begun, and the last backward passes could run beside transfers of weights.
        ends = chain.forward_stage_s[r, :-1].sum() + chain.backward_stage_s[r, :-1].sum()
        assert ends + hops[r].sum() < 0.01 * cluster.latency_s
