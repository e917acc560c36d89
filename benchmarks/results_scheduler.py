"""Measure the scheduler, and write docs/results-scheduler.md from what was measured.

    python benchmarks/results_scheduler.py measure FOLDER [NAME ...]    # what has no file there yet
    python benchmarks/results_scheduler.py write FOLDER > docs/results-scheduler.md

Every file of FOLDER is what a command in ``scheduler_runs`` wrote; sections without one are left
out. Files that were made on other terms than today's say so above their numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ablation_lines import ABLATIONS, ablation_lines
from further_seeds import interval, more_lines, seed_means
from scheduler_runs import (
    ALONE,
    BENCH,
    LEAST_SEEDS,
    PRICED,
    SEARCH,
    SHARES,
    SWEEP,
    TABLES,
    WRONG,
    measure,
    read,
    search_files,
)
from search_lines import search_lines

COLUMNS = (
    "policy | latency s | efficiency | memory MiB | energy / budget | over bound | target h "
    "| decision ms"
)
WORSE = {
    "latency_lower_percent": "latency {:.1f} % higher",
    "time_to_target_lower_percent": "time to target {:.1f} % longer",
    "efficiency_higher_percent": "efficiency {:.1f} % lower",
}
Json = dict[str, Any]


def lines(folder: Path) -> Iterator[str]:
    """The whole document."""
    yield from ("# Results of the scheduler", "")
    yield "Rounds cost what the cost model says; only the section on real training trains anything."
    yield "[Simulate](simulate.md) explains columns and presets. Other programs ran beside, so"
    yield "decisions took longer than they need. Made with"
    yield from ("", "```bash")
    yield "python benchmarks/results_scheduler.py measure docs/results/scheduler"
    yield "python benchmarks/results_scheduler.py write docs/results/scheduler \\"
    yield from ("    > docs/results-scheduler.md", "```")
    tables = {name: run for name in TABLES if (run := read(folder, name)) is not None}
    for name, run in tables.items():
        yield from run_lines(name, run)
    yield from claim_lines(tables)
    for name, run in tables.items():
        yield from more_lines(folder, name, run)
        yield from price_lines(folder, name, run)
    yield from gain_lines(folder)
    yield from share_lines(folder)
    yield from wrong_lines(folder)
    if (bench := read(folder, "bench")) is not None:
        yield from bench_lines(bench)
    searched = [run for name in search_files() if (run := read(folder, name)) is not None]
    if searched:
        yield from search_lines(searched, SEARCH)
    tasks = [run for name in ABLATIONS if (run := read(folder, f"ablation-{name}")) is not None]
    if tasks:
        yield from ablation_lines(tasks)


def old_terms(run: Json) -> Iterator[str]:
    """What is wrong about a run that was made before all policies met on equal terms."""
    setting = run["setting"]
    faults = []
    if len(setting["seeds"]) < LEAST_SEEDS:
        faults.append(f"{len(setting['seeds'])} seeds only, and those of the development")
    if "bounds" not in run:
        faults.append("the memory cap of a third bound DSSDA alone")
        faults.append("the schedule was GPipe")
        faults.append("the search that ran then got stuck at these sizes")
    if "outdated" in run:
        faults.append(run["outdated"])
    if faults:
        yield from ("", f"**Not on today's terms**: {'; '.join(faults)}. To be measured again.")


def gain_lines(folder: Path) -> Iterator[str]:
    """Step by step from equal segments to DSSDA."""
    run = read(folder, "paper")
    if run is None or "bounds" not in run:
        return
    steps = (
        ("equal segments (`uniform`)", "uniform"),
        ("segments by speed (`throughput`)", "throughput"),
        ("`dssda`: segments, batches, devices and radio jointly, within budgets", "dssda"),
    )
    yield from ("", "## Where the gain comes from", "")
    yield "Every step with the micro-batches that are best for it."
    yield from ("", "| step | latency s | shorter | energy / budget |", "|---|---:|---:|---:|")
    before: float | None = None
    for title, policy in steps:
        values = run["policies"].get(policy)
        if values is None or "refused" in values:
            continue
        seconds = values["latency_s"]["mean"]
        gained = "" if before is None else f"{100 * (1 - seconds / before):.1f} %"
        yield f"| {title} | {seconds:.1f} | {gained} | {values['energy_over_budget_max']:.3f} |"
        before = seconds


def share_lines(folder: Path) -> Iterator[str]:
    """What the cap on the model's share of a device costs, and what it saves."""
    runs = {s: run for s in SHARES if (run := read(folder, f"share-{s}")) is not None}
    if not runs:
        return
    yield from ("", "## No device holds most of the model")
    yield from (*old_terms(next(iter(runs.values()))), "")
    yield f"`{SWEEP} -c scheduler.max-model-share=SHARE`; memory is that of the fullest device."
    yield from ("", "| share | latency s | p95 s | memory MiB | energy / budget |")
    yield "|---:|---:|---:|---:|---:|"
    for share, run in runs.items():
        ours = run["policies"]["dssda"]
        cells = (
            f"{ours['latency_s']['mean']:.1f}",
            f"{ours['latency_s']['p95']:.1f}",
            f"{ours['peak_device_memory_bytes'] / 2**20:.0f}",
            f"{ours['energy_over_budget_max']:.3f}",
        )
        yield f"| {share} | {' | '.join(cells)} |"


def wrong_lines(folder: Path) -> Iterator[str]:
    """What profiles that are wrong or old cost, seed by seed."""
    runs = {name: run for name in WRONG if (run := read(folder, f"wrong-{name}")) is not None}
    exact = read(folder, "paper")
    if not runs or exact is None:
        return
    truth = exact["policies"]["dssda"]
    seeds = [seed["seed"] for seed in truth["seeds"]]
    runs = {n: r for n, r in runs.items() if r["setting"]["seeds"] == seeds}
    if not runs:
        return
    yield from ("", "## Wrong and old profiles")
    yield from (*old_terms(next(iter(runs.values()))), "")
    yield f"`{ALONE}` with [errors](simulate.md#wrong-profiles), against"
    yield f"{truth['latency_s']['mean']:.1f} s with exact profiles. Devices"
    yield "that worked report their true speeds: this shows errors of planning, not of measuring."
    yield from ("", "| what schedulers see | latency s | longer | worst seed | energy / budget |")
    yield "|---|---:|---:|---:|---:|"
    for name, run in runs.items():
        ours = run["policies"]["dssda"]
        pairs = zip(ours["seeds"], truth["seeds"], strict=True)
        longer = [mean(a["latency_s"]) / mean(b["latency_s"]) for a, b in pairs]
        total = ours["latency_s"]["mean"] / truth["latency_s"]["mean"]
        yield (
            f"| {WRONG[name][1]} | {ours['latency_s']['mean']:.1f} | {100 * (total - 1):+.1f} % | "
            f"{100 * (max(longer) - 1):+.1f} % | {ours['energy_over_budget_max']:.3f} |"
        )


def run_lines(name: str, run: Json) -> Iterator[str]:
    """One simulation: its setting, its table and its bounds."""
    setting, (options, title) = run["setting"], TABLES[name]
    yield from ("", f"## `{name}`: {title}", "")
    yield f"`{options}`: {setting['clusters']} clusters of {setting['devices']} devices,"
    yield f"{setting['model']['blocks']} blocks of width {setting['model']['width']},"
    yield f"{setting['rounds']} rounds, {len(setting['seeds'])} seeds, {setting['radio']},"
    yield f"{setting['channel']}, energy budget {setting['budget']}, at most"
    yield f"{setting['settings']['max_model_share']:.3g} of the model on a device,"
    yield f"{setting['settings']['schedule']}."
    yield from old_terms(run)
    yield from ("", f"| {COLUMNS} |", "|---|" + "---:|" * COLUMNS.count("|"))
    for name, policy in run["policies"].items():
        yield policy_line(name, policy)
    yield from bound_lines(run)


def claim_lines(tables: Mapping[str, Json]) -> Iterator[str]:
    """What the paper claims of DSSDA, world by world, and where others are better."""
    if not tables:
        return
    claims = next(iter(tables.values()))["comparison"]["claims"]
    needed = {key: claim["needed"] for key, claim in claims.items()}
    yield from ("", "## Against the claims", "")
    yield "*Lower* is the latency below the best of `fedavg`, `splitfed` and `uniform`, beside the"
    yield "median and worst seed; *possible* is what no plan can exceed; *95 %* where it would lie"
    yield "with as many other seeds (bootstrap)."
    yield ""
    yield "| world | lower | possible | median, worst seed | 95 % | efficiency higher | memory |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    yield (
        f"| needed | {needed['latency_lower_percent']} % | | | | "
        f"{needed['efficiency_higher_percent']} % | < {needed['peak_memory_share']:g} |"
    )
    for name, run in tables.items():
        yield f"| `{name}` | {' | '.join(claim_cells(run))} |"
    yield from ("", "Where DSSDA is worse, against rules that keep the budgets:", "")
    for name, run in tables.items():
        yield f"- `{name}`: {'; '.join(worse(run)) or 'nowhere'}."


def claim_cells(run: Json) -> Iterator[str]:
    """What was seen of each claim that could be checked."""
    claims = run["comparison"]["claims"]
    lower, higher = claims["latency_lower_percent"], claims["efficiency_higher_percent"]
    if lower["seen"] is None or "seeds" not in lower:
        yield from ("not measured", "", "", "")
    else:
        yield f"{lower['seen']:.2f} %"
        yield f"{lower['possible']:.1f} %"
        seeds = lower["seeds"]
        yield f"{seeds['median']:.1f}, {seeds['worst']:.1f} %"
        ours, theirs = (seed_means(run["policies"][n]) for n in ("dssda", lower["rival"]))
        low, high = interval(ours, theirs)
        yield f"{low:.1f} to {high:.1f}"
    yield f"{higher['seen']:.1f} %"
    memory = claims["peak_memory_share"]["seen"]
    yield "" if memory is None else f"{memory:.2f}"


def worse(run: Json) -> Iterator[str]:
    """Policies within budgets that beat DSSDA in something, and by how much."""
    for name, against in run["comparison"]["against"].items():
        if run["policies"][name]["energy_over_budget_max"] > 1.0:
            continue
        faults = [text.format(-against[key]) for key, text in WORSE.items() if below(against[key])]
        if against["peak_memory_share"] > 1.0:
            faults.append(f"peak memory {against['peak_memory_share']:.2f} times as large")
        if faults:
            yield f"`{name}`: {', '.join(faults)}"


def price_lines(folder: Path, table: str, run: Json) -> Iterator[str]:
    """How near a run is to what a scheduler reaches that knows all channels beforehand."""
    values = read(folder, PRICED[table]) if table in PRICED else None
    if values is None or "outdated" in run:
        return
    world = values["worlds"][table]
    above, worst = world["above_bound_mean"], world["above_bound_max"]
    seen = run["comparison"]["claims"]["latency_lower_percent"]["seen"]
    shorter = sum(c["bound"] for c in values["cases"]) / sum(c["dssda"] for c in values["cases"])
    possible = 100 - (100 - seen) * shorter
    yield ""
    yield f"`{table}`: DSSDA's rho T is {100 * above:.2f} % (worst seed"
    yield f"{100 * worst:.2f} %) above what no scheduler undercuts that keeps every budget on"
    yield "average and knows all channels ([theory](theory.md#5-the-long-term-problem), 5.5). With"
    yield f"the same batches, latency would be {possible:.2f} % below the best baseline's there,"
    yield f"instead of {seen:.2f} %."


def policy_line(name: str, policy: Json) -> str:
    """One row of the table."""
    if "refused" in policy:
        return f"| {name} | does not fit |" + " |" * (COLUMNS.count("|") - 1)
    target, latency = policy["time_to_target_s"], policy["latency_s"]
    over = policy.get("latency_over_bound")
    mark = "" if policy["energy_over_budget_max"] <= 1.0 else " *"
    cells = (
        f"{latency['mean']:.1f}",
        f"{policy['capacity_used']:.3f}",
        f"{policy['peak_device_memory_bytes'] / 2**20:.0f}",
        f"{policy['energy_over_budget_max']:.3f}",
        "" if over is None else f"{over:.3f}",
        "never" if target is None else f"{target / 3600:.1f}",
        f"{1e3 * policy['decision_s']['median']:.1f}",
    )
    return f"| {name}{mark} | {' | '.join(cells)} |"


def bound_lines(run: Json) -> Iterator[str]:
    """What no plan can beat, and who is no winner."""
    if any(p.get("energy_over_budget_max", 0.0) > 1.0 for p in run["policies"].values()):
        yield from ("", "\\* breaks an energy budget in some seed: does not count as a winner.")
    if (bounds := run.get("bounds")) is None:
        return
    yield ""
    yield f"No plan within budgets takes less than {bounds['latency_in_budget_s']:.1f} s a round or"
    yield f"is more efficient than {bounds['compute_efficiency']:.3f}"
    yield "([proof](theory.md#10-what-no-plan-can-beat))."


def mean(values: list[float]) -> float:
    """Average."""
    return sum(values) / len(values)


def below(value: float | None) -> bool:
    """Whether DSSDA is worse by more than rounding."""
    return value is not None and value < -0.05


def bench_lines(bench: Json) -> Iterator[str]:
    """Decision times, radio solvers, optimality."""
    yield from ("", "## Speed and quality of decisions", "")
    yield f"`{BENCH}`: one thread, wall-clock times of the machine that ran it;"
    yield from ("other load on it lengthens them.", "")
    yield from (
        "| clusters | devices | blocks | codecs to choose from | first s | median s |",
        "|---:|---:|---:|---|---:|---:|",
    )
    for row in bench["decisions"]:
        size = f"{row['clusters']} | {row['devices']} | {row['blocks']}"
        size += f" | {', '.join(row['codecs'])}"
        yield f"| {size} | {row['first_s']:.3f} | {row['median_s']:.3f} |"
    radio, gaps = bench["radio"], bench["optimality"]
    yield ""
    yield f"Radio of {radio['clusters']} clusters: {1e3 * radio['fast_s']:.1f} ms against"
    yield f"{1e3 * radio['cvxpy_s']:.0f} ms with cvxpy, {radio['speedup']:.0f} times as fast; its"
    yield f"objective lies {radio['relative_gap']:.1e} above the reference's. Against brute force"
    yield f"on {gaps['instances']} random small instances the mean gap is"
    yield f"{100 * gaps['mean_gap']:.4f} %, the 95th percentile"
    yield f"{100 * gaps['quantiles']['0.95']:.4f} %, the 99th"
    yield f"{100 * gaps['quantiles']['0.99']:.3f} %, the worst {100 * gaps['max_gap']:.2f} %."


def main() -> None:
    """Measure or print the document."""
    if len(sys.argv) < 3 or sys.argv[1] not in ("measure", "write"):
        raise SystemExit("usage: python benchmarks/results_scheduler.py measure|write FOLDER")
    if sys.argv[1] == "measure":
        measure(Path(sys.argv[2]), sys.argv[3:])
    else:
        print("\n".join(lines(Path(sys.argv[2]))))


if __name__ == "__main__":
    main()
