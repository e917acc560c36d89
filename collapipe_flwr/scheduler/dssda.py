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
from collapipe_flwr.scheduler.accounts import settled_placeholders
from collapipe_flwr.scheduler.base import (
    Policy,
    by_name,
    energy_prices,
    energy_room,
    known_budgets,
    member_table,
    planner_for,
    solution_plan,
    weight_of,
)
from collapipe_flwr.scheduler.decision import Decision, closing_early
from collapipe_flwr.scheduler.edges import EdgeChoice
from collapipe_flwr.scheduler.estimates import with_profiles
from collapipe_flwr.scheduler.gain_estimates import robust, with_averages, with_forecast
from collapipe_flwr.scheduler.model_share import capped, least_shares, widened
from collapipe_flwr.scheduler.multipliers import Dual, unlearned_weight, weight_for
from collapipe_flwr.scheduler.planner import PlanSolver, Solution
from collapipe_flwr.scheduler.plans import strangers
from collapipe_flwr.scheduler.protocol import (
    Nested,
    SchedulerConfig,
    SchedulerState,
    reference_of,
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
        return EdgeChoice(snapshot, state, self.settings, self._step).choose(self._cost)

    def _cost(self, plan: Plan, snapshot: Snapshot, state: SchedulerState) -> float:
        """Return the objective of a plan for ``snapshot``."""
        tables, reference = tabulate(snapshot), reference_of(state)
        spent_j = member_table(tables, {c.cluster_id: c.energy_j for c in plan.clusters})
        late = weight_of(state, self.settings) * plan.rho * plan.latency_s / reference.latency_s
        worth = float((energy_prices(tables, state, self.settings) * spent_j).sum())
        return late + worth + heads_worth(plan, snapshot, state)

    def _step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """`step` where every cluster has one edge."""
        seen, profiles = with_profiles(snapshot, state.beliefs, self.settings.profile_memory)
        gains = state.doubt
        try:
            gains = with_averages(gains, seen)
            believed = robust(gains, seen)
            if not state.weight:
                state = self._started(state, believed)
            plan = self._plan(state, believed)
        except (ScheduleError, np.linalg.LinAlgError) as error:
            plan = repeated(state, snapshot, error)
        gains = with_forecast(gains, plan, seen, self.settings)
        budgets = known_budgets(state.budget_j, snapshot)
        spare = with_spare(state.spare_plan, plan, budgets, self.settings, snapshot)
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

            return closing_early(best, decide, self.settings.late_slack).plan(self.name)
        if self.settings.participation_floor < 1.0 and len(snapshot.clusters) > 1:
            best = self._without_stragglers(state, snapshot, best)
        return best.plan(self.name)

    def _started(self, state: SchedulerState, snapshot: Snapshot) -> SchedulerState:
        """V and place-holders of the queues, from the static dual of the first round."""
        settings = replace(self.settings, penalty_weight=1.0)
        tables = tabulate(snapshot, settings.coarsest)
        tables = capped(tables, least_shares(tables, settings), settings)
        dual, spare = Dual(planner_for(tables, state, settings)), None
        theta = np.zeros_like(tables.members.budget_mi)
        try:
            if dual.broken:
                share = 1.0 - settings.budget_margin
                limited = dual.at(theta, share * tables.members.budget_mi)
                kept = within(limited, limited.solve())
                theta, spare = dual.multipliers(kept), solution_plan(kept, self.name, 1.0)
        except InfeasibleError:  # the round's own search widens the caps
            pass
        usual = weight_for(theta) if dual.learns else unlearned_weight(int(dual.limited.sum()))
        weight = self.settings.penalty_weight or usual
        budget = np.where(theta > 0.0, tables.members.budget_mi, 0.0)
        known = known_budgets(state.budget_j, snapshot)
        return replace(
            state,
            weight=weight,
            placeholder_j=by_name(tables, weight * theta * budget),
            spare_plan=spare and with_spare(None, spare, known, settings, snapshot),
        )

    def _room(self, tables: Tables, state: SchedulerState) -> Array:
        """Joules that every device may spend in this round."""
        return energy_room(tables, state, self.settings)

    def _placeholders(self, state: SchedulerState, accounts_j: Nested) -> Nested:
        """Place-holders after a round."""
        return settled_placeholders(state.placeholder_j, accounts_j, state.budget_j)

    def _decide(self, state: SchedulerState, snapshot: Snapshot, share: float) -> Decision:
        """Find the best plan in which exactly the clusters of ``snapshot`` take part."""
        tables = tabulate(snapshot, self.settings.coarsest)
        caps = least_shares(tables, self.settings)
        while True:
            limited = capped(tables, caps, self.settings)
            planner = planner_for(limited, state, self.settings, share)
            planner = replace(planner, room_mi=self._room(limited, state))
            try:
                solution = self._settle(planner, state)
            except InfeasibleError:
                if not np.isfinite(caps).any():
                    raise
                caps = widened(caps)
                continue
            return Decision(planner=planner, solution=solution, share=share, model_share_m=caps)

    def _without_stragglers(
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
            cost = fewer.solution.objective + weight_of(state, self.settings) * deficit
            if not cost < value:
                break
            best, value = fewer, cost
        return best

    def _settle(self, planner: PlanSolver, state: SchedulerState) -> Solution:
        """Return the new optimum, unless the segments in place are nearly as good."""
        last = state.last_plan
        kept = kept_rows(planner.tables, last, self.settings)
        if last is None or kept is None:
            return within(planner, planner.solve())
        stay = planner.stayed(kept, bandwidths_of(planner.tables, last))
        left = with_radio(planner, stay)
        stay = left.priced(stay.chain, stay.allocation, stay.rho)
        spare = kept_rows(planner.tables, state.spare_plan, self.settings)
        solution = left.solve(stay, None if planner.few else spare)
        if not planner.few and not planner.hasty:
            # Over today's channels, what is in place may transmit far longer than another plan.
            again = with_radio(planner, solution).solve(stay, spare)
            solution = min(solution, again, key=lambda s: s.objective)
        if spare is not None and planner.few:
            rival = left.radio(spare)
            quicker = rival.rho * rival.priced.latency_s.max()
            # The spare may overdraw an account in this round and still lead to a better plan.
            if quicker < solution.rho * solution.priced.latency_s.max() or (
                rival.objective < min(stay.objective, solution.objective)
            ):
                solution = min(solution, left.improve(rival), key=lambda s: s.objective)
        worth = stay.objective - solution.objective
        better = worth > self.settings.hysteresis * abs(stay.objective)
        return within(planner, solution if better else stay)


def heads_worth(plan: Plan, snapshot: Snapshot, state: SchedulerState) -> float:
    """Price the energy of devices that are edges, ``Q / budget^2`` a joule as that of others."""
    total = 0.0
    for profile in (cluster.profile for cluster in snapshot.clusters):
        name, part = profile.edge_device, plan.find_cluster(profile.cluster_id)
        if name and part is not None and (budget := profile.budgets_j[name]):
            queues = (state.energy_queue_j, state.placeholder_j)
            queue = sum(each.get(profile.cluster_id, {}).get(name, 0.0) for each in queues)
            total += queue / budget**2 * part.energy_j.get(name, 0.0)
    return total


def with_radio(planner: PlanSolver, solution: Solution) -> PlanSolver:
    """``planner`` in which computing leaves room for the transmissions of ``solution``."""
    needed = (1.0 + RADIO_SPARE) * solution.radio_mi(planner.room_mi.shape)
    return replace(planner, room_mi=planner.room_mi - needed)


def within(planner: PlanSolver, solution: Solution) -> Solution:
    """``solution``, improved with less room for computing while transmissions overdraw accounts.

    Many clusters leave no time for that: what is overdrawn by transmissions is paid back later.
    """
    if not planner.few:
        return repair_late_clusters(planner, solution)
    for _ in range(OVERDRAFTS):
        room = gather_members(planner.room_mi, solution.rows, padding=np.inf)
        if (solution.priced.energy_j <= room).all():
            break
        left = with_radio(planner, solution)
        solution = left.improve(left.priced(solution.chain, solution.allocation, solution.rho))
    return solution


def bandwidths_of(tables: Tables, last: Plan) -> Array:
    """Divide the band among today's clusters in proportion to ``last``, in hertz, (M,)."""
    hz = {plan.cluster_id: plan.bandwidth_hz for plan in last.clusters}
    hz_m = np.array([hz[c.profile.cluster_id] for c in tables.snapshot.clusters])
    return np.asarray(hz_m * (tables.snapshot.radio.bandwidth_hz / hz_m.sum()))


def kept_rows(tables: Tables, last: Plan | None, settings: SchedulerConfig) -> Layouts | None:
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


def with_spare(
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
        if here <= {c.cluster_id for c in usable_plans(spare, snapshot)}:
            return spare
    share = 1.0 - settings.budget_margin
    kept = all(
        joule <= share * budgets_j[cluster.cluster_id][device]
        for cluster in plan.clusters
        for device, joule in cluster.energy_j.items()
        if device in cluster.tx_power_w  # no plan changes what an edge spends
    )
    return plan if kept else spare


def usable_plans(last: Plan | None, snapshot: Snapshot) -> tuple[ClusterPlan, ...]:
    """Return the cluster plans of ``last`` whose cluster and devices are connected, and trusted."""
    here = {c.profile.cluster_id: c.profile for c in snapshot.clusters}

    def stands(plan: ClusterPlan) -> bool:
        profile = here.get(plan.cluster_id)
        if profile is None:
            return False
        names = {device.device_id for device in profile.devices}
        connected = names.issuperset(plan.device_ids) and plan.edge == profile.edge_id
        return connected and not strangers(plan, profile)

    return () if last is None else tuple(c for c in last.clusters if stands(c))


def repeated(state: SchedulerState, snapshot: Snapshot, error: Exception) -> Plan:
    """Repeat the last plan for the parties still here; else raise ``error`` as a ScheduleError.

    The error is also raised if it is of clusters that have no plan to repeat: the others can be
    planned without them.
    """
    last, usable = state.last_plan, usable_plans(state.last_plan, snapshot)
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
    place = planner.in_place(best)
    near = place.bound_rows(planner.fitting(planner.neighbours(best.rows.take(late))))
    dearer = near.costs.worth - place.costs.worth[near.near.cluster_r]
    in_time = near.costs.latency <= MUCH_LATER * bound_s
    near = near.take(np.flatnonzero(in_time & (dearer < WORTH_A_CHANGE * best.objective)))
    if not len(near.near):
        return best
    rows = place.play_rows(near.keep_first(TRIED).near, joint=True).combine()
    trial = planner.play(planner.stayed(rows, best.allocation.edge_hz_r))
    return min(best, trial, key=lambda s: s.objective)
