"""A planned step replayed in time: what every stage and link does when."""

from __future__ import annotations

from collapipe_flwr.core.domain import ClusterPlan, Snapshot
from collapipe_flwr.core.replay import Trace, replay
from collapipe_flwr.costs.chain import make_chain, make_step_times
from collapipe_flwr.costs.layouts import make_plan_rows, select_clusters, set_planned_codecs
from collapipe_flwr.costs.price import compute_times, gather_powers
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.work import PricingOptions


def replay_plan(
    plan: ClusterPlan, snapshot: Snapshot, options: PricingOptions | None = None
) -> Trace:
    """One optimiser step of ``plan`` under ``snapshot``; raises ScheduleError."""
    tables = tabulate(select_clusters(snapshot, [plan.cluster_id]))
    rows = make_plan_rows(tables, [plan])
    chain = make_chain(set_planned_codecs(tables, rows, [plan]), rows, options or PricingOptions())
    times = compute_times(chain, [plan], gather_powers(chain, [plan]))
    step = make_step_times(chain, times, 0)
    return replay(step, plan.warmup_depth, plan.micro_batches)
