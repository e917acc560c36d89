"""How far DSSDA's decisions are from the optimum: brute force on random small instances."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.oracles.brute_force import optimal_plan
from collapipe_flwr.core.domain import Plan, Snapshot
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.base import USUAL_WEIGHT, make_solver
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig, SchedulerState
from collapipe_flwr.simulation.setting import ModelShape, Setting
from collapipe_flwr.simulation.simulate import Tick
from collapipe_flwr.simulation.world import EnergyBudget

QUANTILES = (0.5, 0.9, 0.95, 0.99)
EDGES = (1e-6, 1e-4, 1e-3, 1e-2, 5e-2)  # of the histogram's bins; the last bin is open
MOST = {1: (4, 5), 2: (3, 4), 3: (2, 3)}  # devices and blocks by number of clusters


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """How many gaps lie under an edge and not under the one before; None is no edge."""

    below: float | None
    instances: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Objective of DSSDA over the optimum, less 1."""

    instances: int
    mean_gap: float
    max_gap: float
    exact_share: float  # instances solved to 1e-6
    quantiles: dict[str, float]
    histogram: tuple[Bin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One small decision with queues as they might stand in mid-run."""

    snapshot: Snapshot
    state: SchedulerState
    settings: SchedulerConfig


def optimality(instances: int, tick: Tick) -> Gaps:
    """Decide and brute-force ``instances`` instances, seeds 0, 1, 2, ..."""
    gaps = []
    for seed in range(instances):
        gaps.append(gap(instance(seed)))
        tick("optimality")
    return gaps_of(np.array(gaps))


def gaps_of(values: NDArray[np.float64]) -> Gaps:
    """The distribution of measured gaps."""
    counts = np.bincount(np.searchsorted(EDGES, values, side="right"), minlength=len(EDGES) + 1)
    return Gaps(
        instances=len(values),
        mean_gap=float(values.mean()),
        max_gap=float(values.max()),
        exact_share=float((values < 1e-6).mean()),
        quantiles={f"{q:g}": float(np.quantile(values, q)) for q in QUANTILES},
        histogram=tuple(
            Bin(below=edge, instances=int(count))
            for edge, count in zip((*EDGES, None), counts, strict=True)
        ),
    )


def instance(seed: int) -> Instance:
    """One to three clusters, small enough for brute force, with random queues and V."""
    rng = np.random.default_rng([seed, 2509])
    clusters = int(rng.integers(1, 4))
    settings = SchedulerConfig(
        schedule="gpipe",
        penalty_weight=float(10 ** rng.uniform(-1, 2)),
        micro_batch_sizes=(2, 8) if clusters == 1 else (4,),
        micro_batches=(2, 8),
        bound=bool(rng.random() < 0.5),
    )
    most_devices, most_blocks = MOST[clusters]
    setting = Setting(
        clusters=clusters,
        devices=int(rng.integers(2, most_devices + 1)),
        radio=str(rng.choice(["wifi", "5g"])),
        budget=EnergyBudget(share=float(rng.uniform(0.1, 0.8))),
        examples=int(rng.integers(100, 2000)),
        model=ModelShape(
            blocks=int(rng.integers(3, most_blocks + 1)), width=int(rng.choice([256, 768]))
        ),
        settings=replace(settings, max_model_share=float(rng.choice([1.0, 0.4]))),
    )
    settings = setting.settings
    profile = setting.model.profile()
    snapshot = setting.world(seed, profile).snapshot(1, profile)
    state = make_scheduler("dssda", settings).init(snapshot)
    return Instance(snapshot=snapshot, state=queued(state, snapshot, rng), settings=settings)


def queued(state: SchedulerState, snapshot: Snapshot, rng: np.random.Generator) -> SchedulerState:
    """``state`` with energy queues of up to a few budgets on about half of all members.

    V is the settings', and accounts have room for any plan, as the brute force does not know them.
    """
    queues = {
        c.profile.cluster_id: {
            m.device_id: float(rng.exponential(2.0) * rng.integers(0, 2)) * m.energy_budget_j
            for m in c.profile.members
        }
        for c in snapshot.clusters
    }
    full = {cluster: dict.fromkeys(members, np.inf) for cluster, members in queues.items()}
    return replace(state, energy_queue_j=queues, account_j=full, weight=USUAL_WEIGHT)


def gap(case: Instance) -> float:
    """Relative distance of DSSDA's objective from the optimum."""
    ours, _ = make_scheduler("dssda", case.settings).step(case.state, case.snapshot)
    best = optimal_plan(case.snapshot, case.settings, case.state)
    return _objective(case, ours) / _objective(case, best) - 1.0


def _objective(case: Instance, plan: Plan) -> float:
    """Penalty plus drift of a plan: ``V rho T / T_ref + sum Q / budget^2 * energy``."""
    tables = tabulate(case.snapshot)
    planner = make_solver(tables, case.state, case.settings)
    total = planner.latency_price * plan.rho * plan.latency_s
    for m, cluster in enumerate(case.snapshot.clusters):
        chosen = plan.find_cluster(cluster.profile.cluster_id)
        assert chosen is not None
        for i, member in enumerate(cluster.profile.members):
            total += float(planner.price_mi[m, i]) * chosen.energy_j[member.device_id]
    return total
