"""The base of all schedulers: queues, estimates, the reference plan, and plans from decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.domain import ClusterPlan, Plan, Snapshot
from collapipe_flwr.core.outcome import RoundOutcome
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import compute_latency_s, make_chain, schedule_rows
from collapipe_flwr.costs.convergence import estimate_constants, estimate_noise_scale, update
from collapipe_flwr.costs.layouts import (
    Layouts,
    list_stage_names,
    make_hop_configs,
    make_segments,
    replace_rows,
)
from collapipe_flwr.costs.price import price_clusters
from collapipe_flwr.costs.radio import compute_rate_bit_per_s
from collapipe_flwr.costs.replicas import PricedCluster
from collapipe_flwr.costs.tables import Tables, tabulate
from collapipe_flwr.costs.warm_up import Depths
from collapipe_flwr.costs.work import fits
from collapipe_flwr.scheduler.accounts import open_accounts, settle_accounts
from collapipe_flwr.scheduler.edges import choose_edges
from collapipe_flwr.scheduler.estimates import bound_plausible_j, learn_profiles
from collapipe_flwr.scheduler.gain_estimates import measure_error
from collapipe_flwr.scheduler.initial_layouts import rows_by_weight
from collapipe_flwr.scheduler.link_estimates import learn_links
from collapipe_flwr.scheduler.planner import PlanSolver, Solution
from collapipe_flwr.scheduler.problem import Learning, make_learning
from collapipe_flwr.scheduler.protocol import (
    NOISE_SCALE,
    Nested,
    Reference,
    SchedulerConfig,
    SchedulerState,
    advance_energy,
    advance_participation,
    require_reference,
)
from collapipe_flwr.scheduler.radio.interior_point import share_equally

USUAL_WEIGHT = 100.0  # V unless given or learnt
DEAD = 1e-4  # of the fastest link's rate: with less a link carries nothing
THRIFT = 1e-3  # of the latency weight: the price of energy while all queues are empty


@dataclass(frozen=True, slots=True)
class Policy:
    """Base of all policies: states start from a reference plan and learn from rounds."""

    settings: SchedulerConfig
    name: str

    def init(self, snapshot: Snapshot) -> SchedulerState:
        """Make empty queues and the reference plan of ``snapshot``."""
        return make_initial_state(choose_edges(snapshot, {}, {}), self.settings)

    def observe(self, state: SchedulerState, plan: Plan, outcome: RoundOutcome) -> SchedulerState:
        """Advance queues by the energy spent and estimates by telemetry; rules only report them."""
        settings, steps = self.settings, [c.local_steps for c in plan.clusters]
        planned_j = {cluster.cluster_id: cluster.energy_j for cluster in plan.clusters}
        spent_j = {
            c.cluster_id: bound_plausible_j(c.energy_j, planned_j.get(c.cluster_id, {}))
            for c in outcome.clusters
        }
        connected = {*state.budget_j, *spent_j, *(c.cluster_id for c in plan.clusters)}
        accounts_j = settle_accounts(
            state.account_j, state.budget_j, spent_j, state.rounds, settings
        )
        placeholders_j = self._settle_placeholders(state, accounts_j)
        return replace(
            state,
            energy_queue_j=advance_energy(
                state.energy_queue_j,
                state.budget_j,
                spent_j,
                share=settings.aim_share(state.rounds),
                placeholders_j=placeholders_j,
            ),
            account_j=accounts_j,
            placeholder_j=placeholders_j,
            participation_queue=advance_participation(
                state.participation_queue,
                connected,
                spent_j,
                floor=settings.participation_floor,
            ),
            beliefs=learn_profiles(state.beliefs, outcome),
            doubt=measure_error(state.doubt, outcome),
            links=learn_links(state.links, outcome),
            learning=update(
                state.learning,
                outcome,
                learning_rate=settings.learning_rate,
                mean_steps=sum(steps) / len(steps) if steps else 1.0,
            ),
        )

    def _settle_placeholders(self, state: SchedulerState, accounts_j: Nested) -> Nested:
        """Return the place-holders after a round: unchanged for policies that ignore prices."""
        del accounts_j
        return state.placeholder_j


def make_initial_state(snapshot: Snapshot, settings: SchedulerConfig) -> SchedulerState:
    """Make empty queues, with a plain plan as the reference of latency and rounds."""
    tables = tabulate(snapshot, settings.coarsest)
    reference = _make_reference(_replace_dead_links(tables), settings)
    return SchedulerState(reference=reference, budget_j=collect_budgets({}, snapshot))


def _replace_dead_links(tables: Tables) -> Tables:
    """Replace dead links by the median of the others of their kind.

    The reference is a scale for all rounds: it must not hang on a link that was away in the first.
    """
    snapshot, members = tables.snapshot, tables.members
    ends = members.present_mi
    between = ends[:, :, None] & ends[:, None, :] & ~np.eye(ends.shape[1], dtype=np.bool_)
    width_hz = tables.d2d_hz_mij.copy()
    width_hz[:, :, tables.edge] = snapshot.radio.bandwidth_hz / tables.num_clusters
    watt, noise = members.power_max_mi[:, :, None], snapshot.radio.noise_w_per_hz
    rates = tables.share_mij * compute_rate_bit_per_s(width_hz, watt * tables.gain_mij / noise)
    gains, shares = tables.gain_mij.copy(), tables.share_mij.copy()
    for kind, real in ((np.s_[:, :, : tables.edge], between), (np.s_[:, :, tables.edge], ends)):
        dead = real & (rates[kind] < DEAD * rates[kind][real].max(initial=0.0))
        if dead.any():
            gains[kind][dead] = np.median(gains[kind][real & ~dead])
            shares[kind][dead] = np.median(shares[kind][real & ~dead])
    return replace(tables, gain_mij=gains, share_mij=shares)


def _make_reference(tables: Tables, settings: SchedulerConfig) -> Reference:
    """Return the latency and the micro-batches of a plain plan at equal bandwidth."""
    rows = _make_plain_rows(tables, settings)
    chain = make_chain(tables, rows, settings)
    times = share_equally(chain, tables.snapshot.radio.bandwidth_hz).times
    return Reference(
        latency_s=float(compute_latency_s(chain, times).max()),
        micro_batch_size=int(rows.micro_batch_size_r[0]),
        micro_batches=int(rows.micro_batches_r[0]),
    )


def _make_plain_rows(tables: Tables, settings: SchedulerConfig) -> Layouts:
    """Divide blocks by speed over up to three devices; where nothing fits, by memory over all.

    All clusters have the same batch, the one nearest to the middle of the grid that fits. Where
    none fits, the last one tried is returned: planning then refuses the snapshot with a reason.
    """
    members, clusters = tables.members, np.arange(tables.num_clusters)
    few = min(3, tables.num_blocks)
    speed = np.where(members.present_mi, members.speed_mi, 0.0)[:, 1:]
    memory = np.where(members.present_mi, members.memory_mi, 0.0)[:, 1:]
    most = min(tables.num_blocks, speed.shape[1])
    for weights, depths in ((speed, range(few, few + 1)), (memory, range(few, most + 1))):
        for batch in sort_by_middle(settings):
            rows = rows_by_weight(tables, clusters, weights, few, batch)
            for depth in depths:
                wider = rows_by_weight(tables, clusters, weights, depth, batch)
                short = np.flatnonzero(~fits(tables, rows, settings))
                rows = replace_rows(rows, short, wider.take(short))
            if fits(tables, rows, settings).all():
                return rows
    return rows


def sort_by_middle(settings: SchedulerConfig) -> list[tuple[int, int]]:
    """Sort the grid by distance from its middle, smaller batches first among equals."""
    sizes, counts = sorted(settings.micro_batch_sizes), sorted(settings.micro_batches)

    def distance(pair: tuple[int, int]) -> tuple[int, int, int]:
        from_size = abs(sizes.index(pair[0]) - len(sizes) // 2)
        from_count = abs(counts.index(pair[1]) - len(counts) // 2)
        return from_size + from_count, pair[0] * pair[1], pair[0]

    return sorted(settings.batches, key=distance)


def collect_budgets(before: Nested, snapshot: Snapshot) -> dict[str, dict[str, float]]:
    """Collect energy budgets by cluster and device: the snapshot's, else those known ``before``.

    A device that is away for some rounds keeps its queue and its account that way.
    """
    fresh = {c.profile.cluster_id: c.profile.budgets_j for c in snapshot.clusters}
    return {c: {**before.get(c, {}), **fresh.get(c, {})} for c in {**before, **fresh}}


def price_learning(tables: Tables, state: SchedulerState, settings: SchedulerConfig) -> Learning:
    """Price progress by today's estimates; not at all where only the length of rounds counts."""
    if not settings.bound:
        return make_learning(tables, None, require_reference(state))
    if settings.progress == NOISE_SCALE:
        return make_learning(tables, estimate_noise_scale(state.learning), require_reference(state))
    constants = estimate_constants(state.learning, settings.learning_rate)
    return make_learning(tables, constants, require_reference(state))


def make_solver(
    tables: Tables, state: SchedulerState, settings: SchedulerConfig, share: float = 1.0
) -> PlanSolver:
    """Build the round's problem: V over the reference latency, and queues over squared budgets."""
    chosen = replace(settings, penalty_weight=choose_weight(state, settings))
    return PlanSolver(
        tables=tables,
        settings=chosen,
        learning=price_learning(tables, state, settings),
        latency_price=chosen.penalty_weight / (require_reference(state).latency_s * share),
        price_mi=price_energy(tables, state, chosen),
        room_mi=np.full_like(tables.members.budget_mi, np.inf),
    )


def choose_weight(state: SchedulerState, settings: SchedulerConfig) -> float:
    """Choose V: the user's, or what the first plan found."""
    return settings.penalty_weight or state.weight or USUAL_WEIGHT


def price_energy(tables: Tables, state: SchedulerState, settings: SchedulerConfig) -> Array:
    """Price a joule of every member: ``Q / budget^2``, plus a little so that nothing is wasted."""
    members, reference = tables.members, require_reference(state)
    queue = tabulate_members(tables, state.energy_queue_j) + tabulate_members(
        tables, state.placeholder_j
    )
    finite = np.isfinite(members.budget_mi)
    budget = np.where(finite, members.budget_mi, 1.0)
    busy_w = members.energy_per_flop_mi * members.speed_mi + members.power_max_mi
    least = THRIFT * choose_weight(state, settings) / (busy_w * reference.latency_s)
    least /= max(int(members.present_mi.sum()), 1)
    return np.where(finite, queue / budget**2, 0.0) + least


def compute_energy_room(tables: Tables, state: SchedulerState, settings: SchedulerConfig) -> Array:
    """Compute the joules that devices may spend in this round, (M, I): account plus budget.

    Infinite without a budget, and for control units, which must work whatever it takes.
    """
    opened = open_accounts(collect_budgets({}, tables.snapshot), state.rounds, settings)
    known = {c: accounts | dict(state.account_j.get(c, {})) for c, accounts in opened.items()}
    share = settings.aim_share(state.rounds + 1)
    room = share * tables.members.budget_mi + tabulate_members(tables, known)
    room[:, 0] = np.inf
    return room


def tabulate_members(tables: Tables, values: Nested) -> Array:
    """Convert values by cluster and device to (M, I), 0 where none is known."""
    table = np.zeros_like(tables.members.speed_mi)
    for m, cluster in enumerate(tables.snapshot.clusters):
        known = values.get(cluster.profile.cluster_id, {})
        if known:
            row = [known.get(member.device_id, 0.0) for member in cluster.profile.members]
            table[m, : len(row)] = row
    return table


def name_values(tables: Tables, values_mi: Array) -> dict[str, dict[str, float]]:
    """Convert (M, I) to the values above 0 by cluster and device."""
    return {
        cluster.profile.cluster_id: {
            member.device_id: float(value)
            for member, value in zip(cluster.profile.members, values, strict=False)
            if value > 0.0
        }
        for cluster, values in zip(tables.snapshot.clusters, values_mi, strict=True)
    }


def make_plan(solution: Solution, policy: str, share: float) -> Plan:
    """Convert a solution to a `Plan` with device names."""
    chain = solution.chain
    depths, step_s = schedule_rows(chain, solution.allocation.times, solution.priced)
    priced = price_clusters(
        chain, solution.priced.energy_j, solution.allocation.times, depths, step_s
    )
    clusters = tuple(
        _make_cluster_plan(solution, m, each, depths[m]) for m, each in enumerate(priced)
    )
    return Plan(
        round_index=chain.tables.snapshot.round_index,
        policy=policy,
        clusters=clusters,
        latency_s=max(c.latency_s for c in clusters),
        rho=solution.rho / share,
    )


def _make_cluster_plan(
    solution: Solution, m: int, priced: PricedCluster, depths: Depths
) -> ClusterPlan:
    rows, chain = solution.rows, solution.chain
    names = list_stage_names(chain.tables, rows, m)
    forward, backward = solution.powers[m, :, 0].tolist(), solution.powers[m, :, 1].tolist()
    return ClusterPlan(
        cluster_id=priced.cluster_id,
        segments=make_segments(chain.tables, rows, m),
        micro_batch_size=int(rows.micro_batch_size_r[m]),
        micro_batches=int(rows.micro_batches_r[m]),
        warmup_depth=depths,
        local_steps=int(chain.steps_r[m]),
        bandwidth_hz=float(solution.allocation.edge_hz_r[m]),
        tx_power_w=dict(zip(names, forward, strict=False)),
        gradient_power_w=dict(zip(names[1:], backward, strict=False)),
        latency_s=priced.latency_s,
        step_s=priced.step_s,
        energy_j=priced.energy_j,
        memory_bytes=priced.memory_bytes,
        hops=make_hop_configs(chain.hops, m),
        edge=chain.tables.snapshot.clusters[m].profile.edge_id,
        execution=chain.options.execution,
    )
