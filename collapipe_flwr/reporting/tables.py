"""Tables of simulations; every column is explained in docs/simulate.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isfinite

from rich import box
from rich.table import Table

from collapipe_flwr.core.links import CODECS
from collapipe_flwr.simulation.simulate import Simulation
from collapipe_flwr.simulation.summary import Json, Summary, summaries

COLUMNS = (
    "latency\ns",
    "p95\ns",
    "effi-\nciency",
    "capa-\ncity",
    "memory\nMiB",
    "energy/\nbudget",
    "target\nh",
    "decide\nms",
)
CLAIMS = {
    "latency_lower_percent": ("latency below fedavg, splitfed, uniform [%]", ">="),
    "efficiency_higher_percent": ("efficiency above the best pipeline [%]", ">="),
    "peak_memory_share": ("peak device memory over that of fedavg", "<"),
    "energy_over_budget_max": ("energy over budget, worst device", "<="),
}


def policy_table(simulation: Simulation) -> Table:
    """One line per policy."""
    setting = simulation.setting
    where = f"{setting.rounds} rounds, {len(setting.seeds)} seeds, budget {setting.budget}"
    title = f"scheduler only, no training: {where}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in summaries(simulation):
        table.add_row(row.policy, *_cells(row))
    for result in simulation.policies:
        if result.refusal is not None:
            table.add_row(result.policy, "refused", *["-"] * (len(COLUMNS) - 1))
    return table


def codec_lines(simulation: Simulation) -> list[str]:
    """How many hops of each policy's last plans use which codec; nothing where all use one."""
    if len(simulation.setting.settings.codecs) < 2:
        return []
    lines = []
    for result in simulation.policies:
        clusters = [c for score in result.scores for c in score.last_plan.clusters]
        found = Counter(hop.codec for cluster in clusters for hop in cluster.hops)
        counts = ", ".join(f"{name} {found[name]}" for name in CODECS if found[name])
        lines += [f"codecs of {result.policy}: {counts} hops"] if counts else []
    return lines


def refusals(simulation: Simulation) -> list[str]:
    """A sentence for every policy that could not run."""
    return [f"{p.policy}: {p.refusal}" for p in simulation.policies if p.refusal is not None]


def _cells(row: Summary) -> list[str]:
    hours = row.time_to_target_s / 3600
    return [
        f"{row.latency_mean_s:.1f}",
        f"{row.latency_p95_s:.1f}",
        f"{row.compute_efficiency:.3f}",
        f"{row.capacity_used:.3f}",
        f"{row.peak_device_memory_bytes / 2**20:.0f}",
        f"{row.energy_over_budget_max:.3f}",
        f"{hours:.1f}" if isfinite(hours) else "never",
        f"{1e3 * row.decision_median_s:.1f}",
    ]


def claims_table(claims: Mapping[str, Json]) -> Table:
    """What was claimed, what came out."""
    table = Table(title="dssda against the baselines", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("claim", "needed", "seen", ""):
        table.add_column(name)
    for key, (says, sign) in CLAIMS.items():
        claim = claims[key]
        if claim["seen"] is not None:
            kept = "kept" if claim["kept"] else "MISSED"
            table.add_row(says, f"{sign} {claim['needed']:g}", f"{claim['seen']:.3g}", kept)
    return table
