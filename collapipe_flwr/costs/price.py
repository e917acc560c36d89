"""The price of a given plan under a given snapshot: predicted, and simulated when it changed.

The plan's powers and bandwidth are kept; the snapshot's gains and speeds decide what they achieve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.domain import ClusterPlan, Plan, Snapshot
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import (
    Chain,
    compute_planned_makespan_s,
    find_hop_bandwidth_hz,
    make_chain,
    price_rows,
    tabulate_depths,
)
from collapipe_flwr.costs.layouts import (
    list_stage_names,
    make_plan_rows,
    select_clusters,
    set_planned_codecs,
)
from collapipe_flwr.costs.radio import compute_rate_bit_per_s
from collapipe_flwr.costs.replicas import PricedCluster, ReplicatedPricing
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.warm_up import Depths
from collapipe_flwr.costs.work import PricingOptions, count_peak_bytes

LEAST_BIT_PER_S = 1e-6  # a link that carries nothing has a price, too: prices stay finite


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """The price of a plan; the round lasts as long as its slowest cluster."""

    latency_s: float
    clusters: tuple[PricedCluster, ...]


def price(plan: Plan, snapshot: Snapshot, options: PricingOptions | None = None) -> PricedPlan:
    """Price ``plan`` under ``snapshot``; raises ScheduleError if a planned party is gone."""
    if not plan.clusters:
        raise ScheduleError(f"the plan of round {plan.round_index} has no clusters to price")
    chain = _tabulate_chain(plan, snapshot, options or PricingOptions())
    powers = gather_powers(chain, plan.clusters)
    times = compute_times(chain, plan.clusters, powers)
    depths = [_select_depths(c) for c in plan.clusters]
    step_s = compute_planned_makespan_s(chain, times, depths)
    clusters = price_clusters(
        chain, price_rows(chain, times, powers).energy_j, times, depths, step_s
    )
    clusters = tuple(
        ReplicatedPricing(chain.tables, m, each, chain.options).price()
        if max(each.replicas) > 1
        else priced
        for m, (each, priced) in enumerate(zip(plan.clusters, clusters, strict=True))
    )
    return PricedPlan(latency_s=max(c.latency_s for c in clusters), clusters=clusters)


def price_clusters(
    chain: Chain, energy_rs: Array, times: Array, depths: Sequence[Depths], step_s: Array
) -> tuple[PricedCluster, ...]:
    """Price the cluster of every row, with joules and bytes by the names of its members.

    ``depths`` are those of its stages, ``step_s`` is the length of a step. A device that is the
    edge sends gradients at full power.
    """
    tables, rows = chain.tables, chain.rows
    latency_s = chain.fixed_s + chain.steps_r * step_s
    memory = count_peak_bytes(tables, rows, chain.options, tabulate_depths(chain, depths))
    clusters = []
    for m, cluster in enumerate(tables.snapshot.clusters):
        idle = dict.fromkeys((member.device_id for member in cluster.profile.members), 0.0)
        names = list_stage_names(tables, rows, m)
        joules = idle | {name: float(energy_rs[m, k]) for k, name in enumerate(names)}
        if head := cluster.profile.edge_device:
            last = len(names) - 1, 1
            sent_j = float(chain.power_max_w[m, *last] * times[m, *last])
            passes = float(chain.steps_r[m]) * float(rows.micro_batches_r[m])
            joules[head] = float(chain.edge_j[m]) + passes * sent_j
        clusters.append(
            PricedCluster(
                cluster_id=cluster.profile.cluster_id,
                latency_s=float(latency_s[m]),
                step_s=float(step_s[m]),
                energy_j=joules,
                memory_bytes={name: int(memory[m, k]) for k, name in enumerate(names)},
            )
        )
    return tuple(clusters)


def _select_depths(plan: ClusterPlan) -> Depths:
    """Select depths of every stage's first device; with replicas, depths that never block."""
    shared = max(plan.replicas) > 1
    return (plan.micro_batches,) * len(plan.warmup_depth) if shared else plan.warmup_depth


def set_planned_rates(plan: Plan, snapshot: Snapshot) -> Plan:
    """Set the rate of every hop over the snapshot's gains, times the share that its link reaches.

    Raises ScheduleError if a planned party is gone.
    """
    if not plan.clusters:
        return plan
    chain = _tabulate_chain(plan, snapshot, PricingOptions())
    rates = compute_rates(chain, plan.clusters, gather_powers(chain, plan.clusters))
    rates = rates * chain.hops.share[:, :, None]
    for m, cluster in enumerate(plan.clusters):
        if max(cluster.replicas) > 1:
            priced = ReplicatedPricing(chain.tables, m, cluster, chain.options).price()
            rates[m, : len(priced.rates)] = priced.rates
    clusters = [
        replace(cluster, hops=_set_rates(cluster, rates[m]))
        for m, cluster in enumerate(plan.clusters)
    ]
    return replace(plan, clusters=tuple(clusters))


def _set_rates(plan: ClusterPlan, rate_h2: Array) -> tuple[LinkConfig, ...]:
    hops = plan.hops or (LinkConfig(),) * (len(plan.segments) + 1)
    return tuple(
        replace(hop, forward_bit_per_s=float(ahead), backward_bit_per_s=float(back))
        for hop, (ahead, back) in zip(hops, rate_h2[: len(hops)], strict=True)
    )


def _tabulate_chain(plan: Plan, snapshot: Snapshot, options: PricingOptions) -> Chain:
    """Tabulate the plan's clusters in its order, with its layouts and codecs."""
    tables = tabulate(select_clusters(snapshot, [c.cluster_id for c in plan.clusters]))
    rows = make_plan_rows(tables, plan.clusters)
    return make_chain(set_planned_codecs(tables, rows, plan.clusters), rows, options)


def gather_powers(chain: Chain, plans: Sequence[ClusterPlan]) -> Array:
    """Return the plans' powers on hops, (R, S + 1, 2); the edge sends at its own full power."""
    powers = np.zeros_like(chain.power_max_w)
    for m, plan in enumerate(plans):
        powers[m, : len(plan.member_ids), 0] = [plan.tx_power_w[k] for k in plan.member_ids]
        back = [plan.gradient_power_w[s.device_id] for s in plan.segments]
        powers[m, : len(back), 1] = back
        powers[m, len(back), 1] = chain.power_max_w[m, len(back), 1]
    return powers


def compute_times(chain: Chain, plans: Sequence[ClusterPlan], powers: Array) -> Array:
    """Compute hop times of the planned powers over the snapshot's gains."""
    times = chain.hops.bits[:, :, None] / compute_rates(chain, plans, powers)
    return np.where(chain.hops.used[:, :, None], times, 0.0)


def compute_rates(chain: Chain, plans: Sequence[ClusterPlan], powers: Array) -> Array:
    """Compute promised bits per second of hops, (R, S + 1, 2), both ways; 1 without a hop."""
    width = find_hop_bandwidth_hz(chain, np.array([plan.bandwidth_hz for plan in plans]))
    used = chain.hops.used[:, :, None]
    snr = np.where(used, powers, 1.0) / chain.noise_over_gain[:, :, None]
    rates = np.maximum(compute_rate_bit_per_s(width[:, :, None], snr), LEAST_BIT_PER_S)
    return np.where(used, rates, 1.0)
