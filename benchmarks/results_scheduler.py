"""Measure the scheduler, and write docs/results-scheduler.md from what was measured.

    python benchmarks/results_scheduler.py measure FOLDER [NAME ...]    # what has no file there yet
    python benchmarks/results_scheduler.py write FOLDER > docs/results-scheduler.md

Every file of FOLDER is what a command in ``scheduler_runs`` wrote; sections without one are left
out. Files that were made on other terms than today's say so above their numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
    "policy | latency s | q1 to q3 | p95 s | efficiency | busy | memory MiB | energy / budget "
    "| over bound | target h | decision ms"
)
CLAIMS = {
    "latency_lower_percent": ("latency lower than fedavg, splitfed and uniform, least", "%", ">="),
    "efficiency_higher_percent": ("efficiency over the best pipeline within budgets", "%", ">="),
    "peak_memory_share": ("peak device memory over fedavg's", "", "<"),
    "energy_over_budget_max": ("energy over budget, worst device", "", "<="),
}
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
    yield "Columns, presets and definitions are explained in [simulate.md](simulate.md). Other"
    yield "programs ran beside, so decisions took longer than they need (*decision ms*). Made with"
    yield from ("", "```bash")
    yield "python benchmarks/results_scheduler.py measure docs/results/scheduler"
    yield "python benchmarks/results_scheduler.py write docs/results/scheduler \\"
    yield from ("    > docs/results-scheduler.md", "```")
    for name, (options, title) in TABLES.items():
        if (run := read(folder, name)) is not None:
            yield from run_lines(title, options, run)
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
    yield from ("", "## No device holds most of the model: what that costs")
    yield from (*old_terms(next(iter(runs.values()))), "")
    yield f"`{SWEEP} -c scheduler.max-model-share=SHARE`; memory is that of the fullest device."
    yield from ("", "| share | latency s | p95 s | efficiency | memory MiB | energy / budget |")
    yield "|---:|---:|---:|---:|---:|---:|"
    for share, run in runs.items():
        ours = run["policies"]["dssda"]
        cells = (
            f"{ours['latency_s']['mean']:.1f}",
            f"{ours['latency_s']['p95']:.1f}",
            f"{ours['capacity_used']:.3f}",
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
    yield f"`{ALONE}` with what stands in the first column, against the same with exact profiles:"
    yield f"{truth['latency_s']['mean']:.1f} s. Errors are defined in [simulate.md](simulate.md);"
    yield f"at most {exact['setting']['settings']['max_model_share']:.3g} of the model on a device."
    yield "Devices that worked report their true speeds: this shows errors of planning, not of"
    yield "measuring."
    yield from ("", "| what schedulers see | latency s | longer | seed by seed | energy / budget |")
    yield "|---|---:|---:|---|---:|"
    for name, run in runs.items():
        ours = run["policies"]["dssda"]
        pairs = zip(ours["seeds"], truth["seeds"], strict=True)
        longer = [mean(a["latency_s"]) / mean(b["latency_s"]) for a, b in pairs]
        seeds = ", ".join(f"{100 * (ratio - 1):+.1f}" for ratio in longer)
        total = ours["latency_s"]["mean"] / truth["latency_s"]["mean"]
        yield (
            f"| {WRONG[name][1]} | {ours['latency_s']['mean']:.1f} | {100 * (total - 1):+.1f} % | "
            f"{seeds} % | {ours['energy_over_budget_max']:.3f} |"
        )


def run_lines(title: str, options: str, run: Json) -> Iterator[str]:
    """One simulation: table, claims, seeds, and where others are better."""
    setting = run["setting"]
    yield from ("", f"## {title}", "")
    yield f"`{options}`: {setting['clusters']} clusters of {setting['devices']} devices"
    yield f"({', '.join(setting['kinds'])}), {setting['model']['blocks']} blocks of width"
    yield f"{setting['model']['width']}, {setting['rounds']} rounds, {len(setting['seeds'])} seeds,"
    yield f"{setting['radio']}, {setting['channel']}, energy budget {setting['budget']}, at most"
    yield f"{setting['settings']['max_model_share']:.3g} of the model on a device,"
    yield f"{setting['settings']['schedule']}."
    yield from old_terms(run)
    yield from ("", f"| {COLUMNS} |", "|---|" + "---:|" * COLUMNS.count("|"))
    for name, policy in run["policies"].items():
        yield policy_line(name, policy)
    yield from bound_lines(run)
    yield from ("", "| DSSDA against the claims | needed | seen | possible | |")
    yield "|---|---:|---:|---:|---|"
    yield from claim_lines(run["comparison"]["claims"])
    yield from ("", *seed_lines(run), "")
    yield "Where DSSDA does not win:"
    yield ""
    yield from worse_lines(run)


def price_lines(folder: Path, table: str, run: Json) -> Iterator[str]:
    """How near a run is to what a scheduler reaches that knows all channels beforehand."""
    values = read(folder, PRICED[table]) if table in PRICED else None
    if values is None or "outdated" in run:
        return
    world = values["worlds"][table]
    above, worst = world["above_bound_mean"], world["above_bound_max"]
    seen = run["comparison"]["claims"]["latency_lower_percent"]["seen"]
    yield ""
    shorter = sum(c["bound"] for c in values["cases"]) / sum(c["dssda"] for c in values["cases"])
    possible = 100 - (100 - seen) * shorter
    yield f"DSSDA's rho T is {100 * above:.2f} % (worst seed {100 * worst:.2f} %) above what no"
    yield "scheduler undercuts that keeps every budget on average, even if it knows all channels"
    yield "beforehand and mixes plans at will ([theory](theory.md#5-the-long-term-problem), 5.5)."
    yield f"There, with the same batches, latency would be {possible:.2f} % below the best"
    needed = run["comparison"]["claims"]["latency_lower_percent"]["needed"]
    rest = "" if possible >= needed else f" No scheduler reaches {needed} % with them."
    yield f"baseline's instead of {seen:.2f} %.{rest}"


def policy_line(name: str, policy: Json) -> str:
    """One row of the table."""
    if "refused" in policy:
        return f"| {name} | does not fit |" + " |" * (COLUMNS.count("|") - 1)
    target, latency = policy["time_to_target_s"], policy["latency_s"]
    over, spread = policy.get("latency_over_bound"), "q1" in latency
    mark = "" if policy["energy_over_budget_max"] <= 1.0 else " *"
    cells = (
        f"{latency['mean']:.1f}",
        f"{latency['q1']:.0f} to {latency['q3']:.0f}" if spread else "",
        f"{latency['p95']:.1f}",
        f"{policy['capacity_used']:.3f}",
        f"{policy.get('busy_share', policy['compute_efficiency']):.3f}",
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
    yield f"is more efficient than {bounds['compute_efficiency']:.3f}; without budgets,"
    yield f"{bounds['latency_s']:.1f} s ([proof](theory.md#10-what-no-plan-can-beat))."


def claim_lines(claims: Json) -> Iterator[str]:
    """Each claim that could be checked."""
    for key, (says, unit, sign) in CLAIMS.items():
        claim = claims[key]
        seen, needed, possible = claim["seen"], claim["needed"], claim.get("possible")
        if seen is None:
            yield f"| {says} | {sign} {needed:g} {unit} | no baseline fits | | |"
            continue
        kept = "kept" if claim["kept"] else f"missed by {abs(seen - needed):.3g}"
        if possible is not None and possible < needed:
            kept += ", as by every plan"
        limit = "" if possible is None else f"{possible:.4g} {unit}"
        rival = f" (`{claim['rival']}`)" if "rival" in claim else ""
        yield f"| {says} | {sign} {needed:g} {unit} | {seen:.4g} {unit}{rival} | {limit} | {kept} |"


def seed_lines(run: Json) -> Iterator[str]:
    """How much seeds differ."""
    claims = run["comparison"]["claims"]
    for key, what in (
        ("latency_lower_percent", "Latency below the best of fedavg, splitfed and uniform"),
        ("efficiency_higher_percent", "Efficiency over the best pipeline within budgets"),
    ):
        if (seeds := claims[key].get("seeds")) is not None:
            yield f"{what}, seed by seed: median {seeds['median']:.1f} %, quartiles"
            yield f"{seeds['q1']:.1f} and {seeds['q3']:.1f} %, worst {seeds['worst']:.1f} %."
    rival = claims["latency_lower_percent"].get("rival")
    ours, theirs = (seed_means(run["policies"].get(name, {})) for name in ("dssda", rival))
    if len(ours) == len(theirs) >= LEAST_SEEDS:
        low, high = interval(ours, theirs)
        yield f"With as many other seeds it would lie between {low:.1f} and {high:.1f} % in 95 % of"
        yield f"cases, against `{rival}` (bootstrap over seeds)."


def mean(values: list[float]) -> float:
    """Average."""
    return sum(values) / len(values)


def worse_lines(run: Json) -> Iterator[str]:
    """Every policy that beats DSSDA in something, and by how much."""
    ours, found = run["policies"]["dssda"], False
    for name, against in run["comparison"]["against"].items():
        faults = [text.format(-against[key]) for key, text in WORSE.items() if below(against[key])]
        if against["peak_memory_share"] > 1.0:
            faults.append(f"peak memory {against['peak_memory_share']:.2f} times as large")
        if faults:
            found = True
            theirs = run["policies"][name]["energy_over_budget_max"]
            yield f"- against `{name}`: {'; '.join(faults)}{excuse(theirs, ours)}."
    if not found:
        yield "- nowhere in this setting."


def below(value: float | None) -> bool:
    """Whether DSSDA is worse by more than rounding."""
    return value is not None and value < -0.05


def excuse(theirs: float, ours: Json) -> str:
    """What the other policy's energy says about the comparison."""
    if theirs <= 1.0 or ours["energy_over_budget_max"] > 1.0:
        return ""
    return f" (it breaks an energy budget by {100 * (theirs - 1):.0f} %)"


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
    yield from ("", "| gap | instances |", "|---|---:|")
    for part in gaps["histogram"]:
        edge = "more" if part["below"] is None else f"below {100 * part['below']:g} %"
        yield f"| {edge} | {part['instances']} |"


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
