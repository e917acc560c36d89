"""Section ``prices``: DSSDA over a run, a bound on all schedulers, and a rival for every round.

Costs are means over rounds of rho T, in seconds: rounds to the target over the reference's, times
how long the round takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.scheduling.assignments import Round
from benchmarks.scheduling.clairvoyant import clairvoyant
from benchmarks.scheduling.every_round import every_round_cost
from benchmarks.scheduling.played_orders import Replayed
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.reporting.output import prepare, progress, write_json
from collapipe_flwr.scheduler.base import price_learning
from collapipe_flwr.scheduler.model_share import cap_shares, find_least_shares
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.problem import Learning
from collapipe_flwr.scheduler.protocol import REPAID
from collapipe_flwr.simulation.episode import EpisodeStep, run_episode
from collapipe_flwr.simulation.setting import Setting
from collapipe_flwr.simulation.world import EnergyBudget, World

WORST = 3  # seeds of each world in the table
NEUTRAL = Setting(clusters=5, devices=4)
WORLDS = {
    "paper": Setting(),
    # The cap on a device's share of the model leaves little to decide here: blocks are spread
    # evenly, and no budget binds.
    "neutral": NEUTRAL,
    # The same without a cap: quick boards take more, and their budgets bind.
    "free": replace(NEUTRAL, settings=replace(NEUTRAL.settings, max_model_share=1.0)),
    # The same with budgets of 1.2 equal shares, 30 % of training alone.
    "tight": replace(
        NEUTRAL,
        settings=replace(NEUTRAL.settings, max_model_share=1.0),
        budget=EnergyBudget(equal_shares=1.2),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceCase:
    """One seed; costs are mean rho T in seconds, energies shares of budgets."""

    world: str
    seed: int
    rounds: int
    dssda: float
    dssda_latency_s: float
    every_round: float
    bound: float
    energy_used: float  # of the device that used most, over the run
    energy_at_any_end: float  # the same for the worst end of a run from REPAID rounds on
    weight: float  # V
    multipliers: float  # sum of the bound's, in reference latencies

    @property
    def above_bound(self) -> float:
        """DSSDA over the clairvoyant bound, less 1."""
        return self.dssda / self.bound - 1.0

    @property
    def behind(self) -> float:
        """DSSDA over the rival that keeps every round, less 1."""
        return self.dssda / self.every_round - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCase:
    """What no scheduler undercuts in the world of one seed."""

    world: str
    seed: int
    rounds: int
    bound: float  # mean rho T in seconds
    latency_s: float | None  # its rounds, if all have the same batches
    multipliers: float  # their sum, in reference latencies


@dataclass(frozen=True, slots=True)
class PriceBench:
    """All seeds of all worlds."""

    cases: tuple[PriceCase, ...]
    schedule: str

    def as_json(self) -> dict[str, object]:
        """Plain data with what the claims need."""
        rows = [
            {**asdict(c), "above_bound": c.above_bound, "behind_every_round": c.behind}
            for c in self.cases
        ]
        worlds = {name: self.summary(name) for name in dict.fromkeys(c.world for c in self.cases)}
        return {"schedule": self.schedule, "worlds": worlds, "cases": rows}

    def of(self, world: str) -> list[PriceCase]:
        """The seeds of one world, worst first."""
        return sorted((c for c in self.cases if c.world == world), key=lambda c: -c.above_bound)

    def summary(self, world: str) -> dict[str, float]:
        """Means and worst seeds."""
        cases = self.of(world)
        return {
            "seeds": len(cases),
            "above_bound_mean": float(np.mean([c.above_bound for c in cases])),
            "above_bound_max": max(c.above_bound for c in cases),
            "behind_every_round_mean": float(np.mean([c.behind for c in cases])),
            "behind_every_round_max": max(c.behind for c in cases),
            "every_round_above_bound_mean": float(
                np.mean([c.every_round / c.bound - 1.0 for c in cases])
            ),
            "energy_used_max": max(c.energy_used for c in cases),
            "energy_at_any_end_max": max(c.energy_at_any_end for c in cases),
        }


def setting_of(world: str, schedule: str) -> Setting:
    """The setting of that name with plans that follow ``schedule``."""
    base = WORLDS[world]
    return replace(base, settings=replace(base.settings, schedule=schedule))


def price_case(name: str, setting: Setting, seed: int, rounds: int) -> PriceCase:
    """DSSDA, the rival and the bound in one world."""
    profile = setting.model.profile()
    world, scheduler = setting.world(seed, profile), make_scheduler("dssda", setting.settings)
    done = list(run_episode(world, scheduler, profile, rounds, options=setting.settings))
    seen, learning = _rounds(setting, world, rounds)
    lower = _bound(name, setting, seed, seen, learning)
    rng = np.random.default_rng([seed, 16])
    rival = float(np.mean([every_round_cost(one, learning, rng) for one in seen]))
    ours = float(np.mean([r.plan.rho * r.latency_s for r in done]))
    used = energy_used(world, done)
    return PriceCase(
        world=name,
        seed=seed,
        rounds=rounds,
        dssda=ours,
        dssda_latency_s=float(np.mean([r.latency_s for r in done])),
        every_round=rival,
        bound=lower.bound,
        energy_used=float(used[-1].max()),
        energy_at_any_end=float(used[min(REPAID, rounds) - 1 :].max()),
        weight=done[-1].state.weight,
        multipliers=lower.multipliers,
    )


def bound_case(name: str, setting: Setting, seed: int, rounds: int) -> BoundCase:
    """The bound alone."""
    world = setting.world(seed, setting.model.profile())
    return _bound(name, setting, seed, *_rounds(setting, world, rounds))


def _bound(
    name: str, setting: Setting, seed: int, seen: list[Round], learning: Learning
) -> BoundCase:
    lower, scale = clairvoyant(seen, learning), learning.reference.latency_s
    played = setting.settings.schedule == "1f1b"
    least, theta = Replayed(lower, seen).bound() if played else lower.bound()
    rho = lower.batch_rho(theta)
    return BoundCase(
        world=name,
        seed=seed,
        rounds=len(seen),
        bound=least * scale,
        latency_s=None if rho is None else least / rho,
        multipliers=float(theta.sum()),
    )


def _rounds(setting: Setting, world: World, rounds: int) -> tuple[list[Round], Learning]:
    """All of a run, and rounds to the target as plans see them at its start."""
    seen = [_round(setting, world, t) for t in range(1, rounds + 1)]
    first = make_scheduler("dssda", setting.settings).init(
        world.snapshot(1, setting.model.profile())
    )
    return seen, price_learning(seen[0].tables, first, setting.settings)


def _round(setting: Setting, world: World, index: int) -> Round:
    settings = setting.settings
    tables = tabulate(world.snapshot(index, setting.model.profile()), settings.coarsest)
    return Round(cap_shares(tables, find_least_shares(tables, settings), settings), settings)


def energy_used(world: World, done: Sequence[EpisodeStep]) -> Array:
    """Mean energy of every device up to every round over its budget, (T, devices)."""
    members = [device for c in world.clusters for device in c.members]
    spent = np.zeros((len(done), len(members)))
    for t, one in enumerate(done):
        found = {d: j for c in one.outcome.clusters for d, j in c.energy_j.items()}
        spent[t] = [found.get(d.device_id, 0.0) / d.energy_budget_j for d in members]
    return np.asarray(np.cumsum(spent, axis=0) / np.arange(1, len(done) + 1)[:, None])


def run_price_bench(
    section: str,
    worlds: Sequence[str],
    seeds: Sequence[int],
    rounds: int,
    schedule: str,
    json_file: Path | None,
) -> None:
    """Measure ``prices`` or ``bounds`` alone; the file is complete for the seeds so far."""
    if unknown := sorted(set(worlds) - set(WORLDS)):
        raise ConfigError(f"--worlds: unknown {', '.join(unknown)}; choose {', '.join(WORLDS)}")
    prepare("--json", json_file)
    prices: list[PriceCase] = []
    bounds: list[BoundCase] = []
    with progress(len(worlds) * len(seeds)) as tick:
        for world in worlds:
            setting = setting_of(world, schedule)
            for seed in seeds:
                if section == "prices":
                    prices.append(price_case(world, setting, seed, rounds))
                    found = PriceBench(tuple(prices), schedule).as_json()
                else:
                    bounds.append(bound_case(world, setting, seed, rounds))
                    found = {"schedule": schedule, "cases": [asdict(case) for case in bounds]}
                write_json(json_file, found)
                tick(f"{section}, {world}")
    done = PriceBench(tuple(prices), schedule)
    table = price_table(done) if section == "prices" else bound_table(bounds)
    Console(highlight=False).print(table)


def bound_table(bounds: Sequence[BoundCase]) -> Table:
    """Every seed's."""
    table = Table(title="what no scheduler undercuts", title_justify="left")
    for name in ("world", "seed", "rho T in s", "s a round"):
        table.add_column(name)
    for case in bounds:
        latency = "" if case.latency_s is None else f"{case.latency_s:.1f}"
        table.add_row(case.world, str(case.seed), f"{case.bound:.1f}", latency)
    return table


def price_table(bench: PriceBench) -> Table:
    """Every world's means and worst seeds."""
    title = f"mean rho T of a run, {bench.schedule}"
    table = Table(title=title, title_justify="left")
    for name in ("world", "seed", "above the bound", "over every round", "budget used", "any end"):
        table.add_column(name)
    for world in dict.fromkeys(c.world for c in bench.cases):
        found = bench.summary(world)
        table.add_row(
            world,
            f"mean of {found['seeds']:.0f}",
            f"{100 * found['above_bound_mean']:.2f} %",
            f"{100 * found['behind_every_round_mean']:+.2f} %",
            f"{found['energy_used_max']:.3f}",
            f"{found['energy_at_any_end_max']:.3f}",
        )
        for case in bench.of(world)[:WORST]:
            table.add_row(
                "",
                str(case.seed),
                f"{100 * case.above_bound:.2f} %",
                f"{100 * case.behind:+.2f} %",
                f"{case.energy_used:.3f}",
                f"{case.energy_at_any_end:.3f}",
            )
    return table
