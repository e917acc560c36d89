"""DSSDA: drift-plus-penalty over exact segments and jointly optimal radio. Our reconstruction.

Many clusters leave no time to play every candidate: a plan is made by the lower bound, played once,
and repaired where the bound was far from what is played (`repair_late_clusters`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.domain import ClusterPlan, Plan, Snapshot
from collapipe_flwr.core.errors import InfeasibleError, ScheduleError
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.layouts import Layouts, gather_members, make_plan_rows
from collapipe_flwr.costs.tables import Tables, tabulate
from collapipe_flwr.costs.work import fits
from collapipe_flwr.scheduler.accounts import settle_placeholders
from collapipe_flwr.scheduler.base import (
    Policy,
    choose_weight,
    collect_budgets,
    compute_energy_room,
    make_plan,
    make_solver,
    name_values,
    price_energy,
    tabulate_members,
)
from collapipe_flwr.scheduler.decision import Decision, close_early
from collapipe_flwr.scheduler.edges import EdgeChoice
from collapipe_flwr.scheduler.estimates import estimate_profiles
from collapipe_flwr.scheduler.gain_estimates import average_gains, forecast_round, make_robust
from collapipe_flwr.scheduler.model_share import cap_shares, find_least_shares, widen_caps
from collapipe_flwr.scheduler.multipliers import Dual, derive_weight, guess_weight
from collapipe_flwr.scheduler.planner import PlanSolver, Solution
from collapipe_flwr.scheduler.plans import list_strangers
from collapipe_flwr.scheduler.protocol import (
    Nested,
    SchedulerConfig,
    SchedulerState,
    require_reference,
)

RADIO_SPARE = 0.05  # of transmissions' energy: another plan may need a little more
OVERDRAFTS = 4  # searches at most for a plan whose transmissions overdraw no account
MUCH_LATER = 1.02  # than by the bound: other rows are tried for clusters that end so
WORTH_A_CHANGE = 0.05  # of the objective, by which their rows may be dearer
TRIED = 6  # rows of such a cluster that are played


@dataclass(frozen=True, slots=True)
class Dssda(Policy):
    """The joint scheduler; ``step`` keeps the last good plan when planning fails."""

    name: str = "dssda"

    def step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Plan one round; an unusable snapshot repeats the last plan and says so in it."""
        if not any(cluster.profile.other_edges for cluster in snapshot.clusters):
            return self._step(state, snapshot)
        return EdgeChoice(snapshot, state, self.settings, self._step).choose(self._price_plan)

    def _price_plan(self, plan: Plan, snapshot: Snapshot, state: SchedulerState) -> float:
        """Return the objective of a plan for ``snapshot``."""
        tables, reference = tabulate(snapshot), require_reference(state)
        spent_j = tabulate_members(tables, {c.cluster_id: c.energy_j for c in plan.clusters})
        late = choose_weight(state, self.settings) * plan.rho * plan.latency_s / reference.latency_s
        worth = float((price_energy(tables, state, self.settings) * spent_j).sum())
        return late + worth + price_heads(plan, snapshot, state)

    def _step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Plan as `step` does where every cluster has one edge."""
        seen, profiles = estimate_profiles(snapshot, state.beliefs)
        gains = state.doubt
        try:
            gains = average_gains(gains, seen)
            believed = make_robust(gains, seen)
            if not state.weight:
                state = self._start(state, believed)
            plan = self._plan(state, believed)
        except (ScheduleError, np.linalg.LinAlgError) as error:
            plan = repeat_plan(state, snapshot, error)
        gains = forecast_round(gains, plan, seen, self.settings)
        budgets = collect_budgets(state.budget_j, snapshot)
        spare = choose_spare(state.spare_plan, plan, budgets, self.settings, snapshot)
        return plan, replace(
            state,
            rounds=state.rounds + 1,
            budget_j=budgets,
            last_plan=plan,
            spare_plan=spare,
            beliefs=profiles,
            doubt=gains,
        )

    def _plan(self, state: SchedulerState, snapshot: Snapshot) -> Plan:
        best = self._decide(state, snapshot, 1.0)
        if self.settings.late_slack:

            def decide(part: Snapshot, share: float) -> Decision:
                return self._decide(state, part, share)

            return close_early(best, decide, self.settings.late_slack).plan(self.name)
        if self.settings.participation_floor < 1.0 and len(snapshot.clusters) > 1:
            best = self._drop_stragglers(state, snapshot, best)
        return best.plan(self.name)

    def _start(self, state: SchedulerState, snapshot: Snapshot) -> SchedulerState:
        """Derive V and the queues' place-holders from the static dual of the first round."""
        settings = replace(self.settings, penalty_weight=1.0)
        tables = tabulate(snapshot, settings.coarsest)
        tables = cap_shares(tables, find_least_shares(tables, settings), settings)
        dual, spare = Dual(make_solver(tables, state, settings)), None
        theta = np.zeros_like(tables.members.budget_mi)
        try:
            if dual.broken:
                share = 1.0 - settings.budget_margin
                limited = dual.make_solver(theta, share * tables.members.budget_mi)
                kept = fit_accounts(limited, limited.solve())
                theta, spare = dual.find_multipliers(kept), make_plan(kept, self.name, 1.0)
        except InfeasibleError:  # the round's own search widens the caps
            pass
        usual = derive_weight(theta) if dual.learns else guess_weight(int(dual.limited.sum()))
        weight = self.settings.penalty_weight or usual
        budget = np.where(theta > 0.0, tables.members.budget_mi, 0.0)
        known = collect_budgets(state.budget_j, snapshot)
        return replace(
            state,
            weight=weight,
            placeholder_j=name_values(tables, weight * theta * budget),
            spare_plan=spare and choose_spare(None, spare, known, settings, snapshot),
        )

    def _compute_room(self, tables: Tables, state: SchedulerState) -> Array:
        """Compute the joules that every device may spend in this round."""
        return compute_energy_room(tables, state, self.settings)

    def _settle_placeholders(self, state: SchedulerState, accounts_j: Nested) -> Nested:
        """Return the place-holders after a round."""
        return settle_placeholders(state.placeholder_j, accounts_j, state.budget_j)

    def _decide(self, state: SchedulerState, snapshot: Snapshot, share: float) -> Decision:
        """Find the best plan in which exactly the clusters of ``snapshot`` take part."""
        tables = tabulate(snapshot, self.settings.coarsest)
        caps = find_least_shares(tables, self.settings)
        while True:
            limited = cap_shares(tables, caps, self.settings)
            planner = make_solver(limited, state, self.settings, share)
            planner = replace(planner, room_mi=self._compute_room(limited, state))
            try:
                solution = self._settle(planner, state)
            except InfeasibleError:
                if not np.isfinite(caps).any():
                    raise
                caps = widen_caps(caps)
                continue
            return Decision(planner=planner, solution=solution, share=share, model_share_m=caps)

    def _drop_stragglers(
        self, state: SchedulerState, snapshot: Snapshot, best: Decision
    ) -> Decision:
        """Leave the slowest cluster out, and the next, while that is worth their absence.

        Their participation queues price it.
        """
        examples = sum(c.profile.examples for c in snapshot.clusters)
        value, deficit = best.solution.objective, 0.0
        while len(best.planner.tables.snapshot.clusters) > 1:
            here = best.planner.tables.snapshot.clusters
            slowest = int(np.argmax(best.solution.priced.latency_s))
            rest = tuple(c for m, c in enumerate(here) if m != slowest)
            share = sum(c.profile.examples for c in rest) / examples
            fewer = self._decide(state, replace(snapshot, clusters=rest), share)
            deficit += state.participation_queue.get(here[slowest].profile.cluster_id, 0.0)
            cost = fewer.solution.objective + choose_weight(state, self.settings) * deficit
            if not cost < value:
                break
            best, value = fewer, cost
        return best

    def _settle(self, planner: PlanSolver, state: SchedulerState) -> Solution:
        """Return the new optimum, unless the segments in place are nearly as good."""
        last = state.last_plan
        kept = keep_rows(planner.tables, last, self.settings)
        if last is None or kept is None:
            return fit_accounts(planner, planner.solve())
        stay = planner.stay(kept, divide_band(planner.tables, last))
        left = reserve_radio(planner, stay)
        stay = left.price(stay.chain, stay.allocation, stay.rho)
        spare = keep_rows(planner.tables, state.spare_plan, self.settings)
        solution = left.solve(stay, None if planner.few else spare)
        if not planner.few and not planner.hasty:
            # Over today's channels, what is in place may transmit far longer than another plan.
            again = reserve_radio(planner, solution).solve(stay, spare)
            solution = min(solution, again, key=lambda s: s.objective)
        if spare is not None and planner.few:
            rival = left.optimize_radio(spare)
            quicker = rival.rho * rival.priced.latency_s.max()
            # The spare may overdraw an account in this round and still lead to a better plan.
            if quicker < solution.rho * solution.priced.latency_s.max() or (
                rival.objective < min(stay.objective, solution.objective)
            ):
                solution = min(solution, left.improve(rival), key=lambda s: s.objective)
        worth = stay.objective - solution.objective
        better = worth > self.settings.hysteresis * abs(stay.objective)
        return fit_accounts(planner, solution if better else stay)


def price_heads(plan: Plan, snapshot: Snapshot, state: SchedulerState) -> float:
    """Price a joule of devices that are edges as that of others: ``Q / budget^2``."""
    total = 0.0
    for profile in (cluster.profile for cluster in snapshot.clusters):
        name, part = profile.edge_device, plan.find_cluster(profile.cluster_id)
        if name and part is not None and (budget := profile.budgets_j[name]):
            queues = (state.energy_queue_j, state.placeholder_j)
            queue = sum(each.get(profile.cluster_id, {}).get(name, 0.0) for each in queues)
            total += queue / budget**2 * part.energy_j.get(name, 0.0)
    return total


def reserve_radio(planner: PlanSolver, solution: Solution) -> PlanSolver:
    """Lower the room for computing by what the transmissions of ``solution`` take."""
    needed = (1.0 + RADIO_SPARE) * solution.tabulate_radio(planner.room_mi.shape)
    return replace(planner, room_mi=planner.room_mi - needed)


def fit_accounts(planner: PlanSolver, solution: Solution) -> Solution:
    """Improve ``solution`` with less room for computing while transmissions overdraw accounts.

    Many clusters leave no time for that: what is overdrawn by transmissions is paid back later.
    """
    if not planner.few:
        return repair_late_clusters(planner, solution)
    for _ in range(OVERDRAFTS):
        room = gather_members(planner.room_mi, solution.rows, padding=np.inf)
        if (solution.priced.energy_j <= room).all():
            break
        left = reserve_radio(planner, solution)
        solution = left.improve(left.price(solution.chain, solution.allocation, solution.rho))
    return solution


def divide_band(tables: Tables, last: Plan) -> Array:
    """Divide the band among today's clusters in proportion to ``last``, in hertz, (M,)."""
    hz = {plan.cluster_id: plan.bandwidth_hz for plan in last.clusters}
    hz_m = np.array([hz[c.profile.cluster_id] for c in tables.snapshot.clusters])
    return np.asarray(hz_m * (tables.snapshot.radio.bandwidth_hz / hz_m.sum()))


def keep_rows(tables: Tables, last: Plan | None, settings: SchedulerConfig) -> Layouts | None:
    """Return the layouts of ``last`` if they still fit today's clusters and grid, else None."""
    if last is None:
        return None
    by_id = {plan.cluster_id: plan for plan in last.clusters}
    plans = [by_id.get(c.profile.cluster_id) for c in tables.snapshot.clusters]
    present = [plan for plan in plans if plan is not None]
    used = {(plan.micro_batch_size, plan.micro_batches) for plan in present}
    if len(present) < len(plans) or not used <= set(settings.batches):
        return None
    try:
        rows = make_plan_rows(tables, present)
    except ScheduleError:
        return None
    return rows if fits(tables, rows, settings).all() else None


def choose_spare(
    spare: Plan | None,
    plan: Plan,
    budgets_j: Nested,
    settings: SchedulerConfig,
    snapshot: Snapshot,
) -> Plan | None:
    """Return the better by rho T of the plans that keep every budget in a round of their own.

    A spare plan counts only while all that it needs of this plan's clusters is there.
    """
    if plan.fallback is not None:
        return spare
    if spare is not None and spare.rho * spare.latency_s <= plan.rho * plan.latency_s:
        here = {c.cluster_id for c in plan.clusters}
        if here <= {c.cluster_id for c in select_usable_plans(spare, snapshot)}:
            return spare
    share = 1.0 - settings.budget_margin
    kept = all(
        joule <= share * budgets_j[cluster.cluster_id][device]
        for cluster in plan.clusters
        for device, joule in cluster.energy_j.items()
        if device in cluster.tx_power_w  # no plan changes what an edge spends
    )
    return plan if kept else spare


def select_usable_plans(last: Plan | None, snapshot: Snapshot) -> tuple[ClusterPlan, ...]:
    """Return the cluster plans of ``last`` whose cluster and devices are connected, and trusted."""
    here = {c.profile.cluster_id: c.profile for c in snapshot.clusters}

    def stands(plan: ClusterPlan) -> bool:
        profile = here.get(plan.cluster_id)
        if profile is None:
            return False
        names = {device.device_id for device in profile.devices}
        connected = names.issuperset(plan.device_ids) and plan.edge == profile.edge_id
        return connected and not list_strangers(plan, profile)

    return () if last is None else tuple(c for c in last.clusters if stands(c))


def repeat_plan(state: SchedulerState, snapshot: Snapshot, error: Exception) -> Plan:
    """Repeat the last plan for the parties still here; else raise ``error`` as a ScheduleError.

    The error is also raised if it is of clusters that have no plan to repeat: the others can be
    planned without them.
    """
    last, usable = state.last_plan, select_usable_plans(state.last_plan, snapshot)
    named = set(error.clusters) if isinstance(error, InfeasibleError) else set[str]()
    if last is None or not usable or named - {plan.cluster_id for plan in usable}:
        if isinstance(error, ScheduleError):
            raise error
        raise InfeasibleError(f"the round cannot be planned: {error}") from error
    return replace(
        last,
        round_index=snapshot.round_index,
        clusters=usable,
        latency_s=max(c.latency_s for c in usable),
        fallback=f"kept the plan of round {last.round_index}: {error}",
    )


def repair_late_clusters(planner: PlanSolver, solution: Solution) -> Solution:
    """Play ``solution``, and try other rows for clusters that then end much later."""
    best, bound_s = planner.play(solution), solution.priced.latency_s.max()
    late = np.flatnonzero(best.priced.latency_s > MUCH_LATER * bound_s)
    if not len(late):
        return best
    place = planner.make_incumbent(best)
    near = place.bound_rows(planner.keep_fitting(planner.list_neighbours(best.rows.take(late))))
    dearer = near.costs.worth - place.costs.worth[near.near.cluster_r]
    in_time = near.costs.latency <= MUCH_LATER * bound_s
    near = near.take(np.flatnonzero(in_time & (dearer < WORTH_A_CHANGE * best.objective)))
    if not len(near.near):
        return best
    rows = place.play_rows(near.keep_first(TRIED).near, joint=True).combine()
    trial = planner.play(planner.stay(rows, best.allocation.edge_hz_r))
    return min(best, trial, key=lambda s: s.objective)
