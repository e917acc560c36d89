"""Output of ``collapipe simulate``: tables and JSON.

Every column of the tables is explained in docs/simulate.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import cast

from rich import box
from rich.table import Table

from collapipe_flwr.core.links import CODECS
from collapipe_flwr.reporting.output import (
    PlainTable,
    format_count,
    number_table,
    prepare,
    progress,
    terminal,
    write_json,
)
from collapipe_flwr.simulation import summary
from collapipe_flwr.simulation.setting import Setting
from collapipe_flwr.simulation.simulate import OURS, Simulation, simulate

COLUMNS = (
    "latency\ns",
    "p95\ns",
    "effi-\nciency",
    "busy\nshare",
    "memory\nMiB",
    "energy/\nbudget",
    "target\nh",
    "decide\nms",
)
CLAIMS = {
    "latency_lower_percent": ("latency below fedavg, splitfed, uniform [%]", ">="),
    "efficiency_higher_percent": ("efficiency above the best pipeline in budget [%]", ">="),
    "peak_memory_share": ("peak device memory over that of fedavg", "<"),
    "energy_over_budget_max": ("energy over budget, worst device", "<="),
}


def run_simulation(setting: Setting, *, json_file: Path | None = None) -> None:
    """Simulate with a progress bar, print tables, write a file.

    Raises ConfigError before the work where the file cannot be written.
    """
    prepare("--json", json_file)
    steps = setting.rounds * len(setting.seeds) * len(setting.policies)
    with progress(steps) as tick:
        simulation = simulate(setting, tick)
    console = terminal()
    console.print(policy_table(simulation))
    refusals = [f"{p.policy}: {p.refusal}" for p in simulation.policies if p.refusal is not None]
    for sentence in (*bound_lines(simulation), *codec_lines(simulation), *refusals):
        console.print(sentence)
    compared = summary.compare(simulation)
    if compared is not None:
        console.print(claims_table(cast("dict[str, summary.Json]", compared["claims"])))
    write_json(json_file, summary.simulation_json(simulation))


def policy_table(simulation: Simulation) -> Table:
    """Build a table with a line per policy."""
    setting = simulation.setting
    size = f"{format_count(setting.rounds, 'round')}, {format_count(len(setting.seeds), 'seed')}"
    where = f"{size}, budget {setting.budget}"
    table = number_table(f"scheduler only, no training: {where}", ("policy",), COLUMNS)
    for row in summary.summaries(simulation):
        hours = row.time_to_target_s / 3600
        table.add_row(
            row.policy if row.keeps_budgets else f"{row.policy} *",
            f"{row.latency_s['mean']:.1f}",
            f"{row.latency_s['p95']:.1f}",
            f"{row.compute_efficiency:.3f}",
            f"{row.busy_share:.3f}",
            f"{row.peak_device_memory_bytes / 2**20:.0f}",
            f"{row.energy_over_budget_max:.3f}",
            f"{hours:.1f}" if isfinite(hours) else "never",
            f"{1e3 * row.decision_s['median']:.1f}",
        )
    for result in simulation.policies:
        if result.refusal is not None:
            table.add_row(result.policy, "refused", *["-"] * (len(COLUMNS) - 1))
    return table


def bound_lines(simulation: Simulation) -> list[str]:
    """Say the bound of any pipeline, our distance from it, and who breaks a budget."""
    rows, bound = summary.summaries(simulation), summary.average_bounds(simulation)
    lines = [
        f"No plan within budgets takes less than {bound.latency_in_budget_s:.1f} s a round on "
        f"average or is more efficient than {bound.compute_efficiency:.3f}; without budgets, "
        f"{bound.latency_s:.1f} s."
    ]
    ours = next((row for row in rows if row.policy == OURS), None)
    if ours is not None:
        ratio = ours.latency_s["mean"] / bound.latency_in_budget_s
        lines.append(f"{OURS} takes {ratio:.3f} times the bound.")
    if not all(row.keeps_budgets for row in rows):
        lines.append("* breaks an energy budget in some seed: does not count as a winner.")
    return lines


def codec_lines(simulation: Simulation) -> list[str]:
    """Count hops by codec in each policy's last plans; nothing if there is one codec."""
    if len(simulation.setting.settings.codecs) < 2:
        return []
    lines = []
    for result in simulation.policies:
        clusters = [c for score in result.scores for c in score.last_plan.clusters]
        found = Counter(hop.codec for cluster in clusters for hop in cluster.hops)
        counts = ", ".join(f"{name} {found[name]}" for name in CODECS if found[name])
        lines += [f"codecs of {result.policy}: {counts} hops"] if counts else []
    return lines


def claims_table(claims: Mapping[str, summary.Json]) -> Table:
    """Build a table of claims, results, and what a plan at the bound would reach."""
    table = PlainTable(box=box.SIMPLE_HEAD).set_title("dssda against the baselines")
    for name in ("claim", "needed", "seen", "possible", ""):
        table.add_column(name)
    for key, (says, sign) in CLAIMS.items():
        claim = claims[key]
        if claim["seen"] is not None:
            kept, possible = "kept" if claim["kept"] else "MISSED", claim.get("possible")
            limit = "" if possible is None else f"{possible:.3g}"
            needed = f"{sign} {claim['needed']:g}"
            table.add_row(says, needed, f"{claim['seen']:.3g}", limit, kept)
    return table
