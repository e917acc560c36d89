"""A planned step replayed in time: what every stage and link does when."""

from __future__ import annotations

from collapipe_flwr.core.domain import ClusterPlan, Snapshot
from collapipe_flwr.core.replay import Trace, replay
from collapipe_flwr.costs.chain import chain_of, step_times
from collapipe_flwr.costs.layouts import planned_codecs, restricted, rows_of_plans
from collapipe_flwr.costs.price import achieved_times, planned_powers
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.work import PricingOptions


def replay_plan(
    plan: ClusterPlan, snapshot: Snapshot, options: PricingOptions | None = None
) -> Trace:
    """One optimiser step of ``plan`` under ``snapshot``; raises ScheduleError."""
    tables = tabulate(restricted(snapshot, [plan.cluster_id]))
    rows = rows_of_plans(tables, [plan])
    chain = chain_of(planned_codecs(tables, rows, [plan]), rows, options or PricingOptions())
    times = achieved_times(chain, [plan], planned_powers(chain, [plan]))
    step = step_times(chain, times, 0)
    return replay(step, plan.warmup_depth, plan.micro_batches)
