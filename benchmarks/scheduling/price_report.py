"""What section ``prices`` shows and writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.scheduling.prices import WORLDS, PriceBench, PriceCase, price_case, setting_of
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting.output import prepare, progress, write_json

WORST = 3  # seeds of each world in the table


def run_price_bench(
    worlds: Sequence[str],
    seeds: Sequence[int],
    rounds: int,
    schedule: str,
    json_file: Path | None,
) -> None:
    """Measure seed by seed; the file is complete for the seeds so far, whenever it ends."""
    if unknown := sorted(set(worlds) - set(WORLDS)):
        raise ConfigError(f"--worlds: unknown {', '.join(unknown)}; choose {', '.join(WORLDS)}")
    prepare("--json", json_file)
    cases: list[PriceCase] = []
    with progress(len(worlds) * len(seeds)) as tick:
        for world in worlds:
            for seed in seeds:
                cases.append(price_case(world, setting_of(world, schedule), seed, rounds))
                write_json(json_file, PriceBench(tuple(cases), schedule).as_json())
                tick(f"prices, {world}")
    Console(highlight=False).print(price_table(PriceBench(tuple(cases), schedule)))


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
