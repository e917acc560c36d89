"""Write docs/results-scheduler.md from what ``collapipe simulate`` and ``collapipe bench`` wrote.

    python benchmarks/results_scheduler.py FOLDER > docs/results-scheduler.md

FOLDER holds the files that the commands in ``RUNS`` (any of them) and ``BENCH`` write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNS = {
    "paper": ("--preset paper", "Weak boards, Wi-Fi with fading, tight energy budgets"),
    "same-batches": (
        "--preset paper --micro-batch-sizes 4 --micro-batches 4",
        "The same, every policy with 4 micro-batches of 4",
    ),
    "half-memory": (
        "--preset paper --memory-margin 0.5",
        "The same, half of every memory left to the board's owner",
    ),
    "one-strong": ("--preset one-strong", "Some boards as fast as a whole cluster, no budgets"),
    "cellular": ("--preset cellular", "Eight moving clusters in a 5G cell, a larger model"),
}
BENCH = "collapipe bench scheduler --clusters 10,100,1000 --instances 120 --json bench.json"
COLUMNS = (
    "policy | latency s | p95 s | efficiency | capacity | memory MiB | energy / budget | target h "
    "| decision ms"
)
CLAIMS = {
    "latency_lower_percent": ("latency lower than fedavg, splitfed and uniform, least", "%", ">="),
    "efficiency_higher_percent": ("compute efficiency over the best pipeline", "%", ">="),
    "peak_memory_share": ("peak device memory over fedavg's", "", "<"),
    "energy_over_budget_max": ("energy over budget, worst device", "", "<="),
}
WORSE = {
    "latency_lower_percent": "latency {:.1f} % higher",
    "time_to_target_lower_percent": "time to target {:.1f} % longer",
    "efficiency_higher_percent": "compute efficiency {:.1f} % lower",
}
Json = dict[str, Any]


def lines(folder: Path) -> Iterator[str]:
    """The whole document."""
    yield from ("# Results of the scheduler", "")
    yield "Scheduler-only simulations: nothing is trained, rounds cost what the cost model says."
    yield "Columns, presets and definitions are explained in [simulate.md](simulate.md). Made with"
    yield from ("", "```bash")
    runs = {name: run for name, run in RUNS.items() if (folder / f"{name}.json").exists()}
    for name, (options, _) in runs.items():
        yield f"collapipe simulate {options} --json {name}.json"
    yield from (
        BENCH,
        "python benchmarks/results_scheduler.py . > docs/results-scheduler.md",
        "```",
    )
    for name, (options, title) in runs.items():
        yield from run_lines(title, options, read(folder / f"{name}.json"))
    yield from bench_lines(read(folder / "bench.json"))


def read(path: Path) -> Json:
    """One result file."""
    values: Json = json.loads(path.read_text(encoding="utf-8"))
    return values


def run_lines(title: str, options: str, run: Json) -> Iterator[str]:
    """One simulation: table, claims, seeds, and where others are better."""
    setting = run["setting"]
    yield from ("", f"## {title}", "")
    yield f"`{options}`: {setting['clusters']} clusters of {setting['devices']} devices"
    yield f"({', '.join(setting['kinds'])}), {setting['model']['blocks']} blocks of width"
    yield f"{setting['model']['width']}, {setting['rounds']} rounds, {len(setting['seeds'])} seeds,"
    yield f"{setting['radio']}, {setting['channel']}, energy budget {setting['budget']}."
    yield from ("", f"| {COLUMNS} |", "|---|" + "---:|" * 8)
    for name, policy in run["policies"].items():
        yield policy_line(name, policy)
    yield from ("", "| DSSDA against the claims | needed | seen | |", "|---|---:|---:|---|")
    yield from claim_lines(run["comparison"]["claims"])
    yield from ("", seeds_line(run), "")
    yield "Where DSSDA does not win:"
    yield ""
    yield from worse_lines(run)


def policy_line(name: str, policy: Json) -> str:
    """One row of the table."""
    if "refused" in policy:
        return f"| {name} | does not fit |" + " |" * 7
    target = policy["time_to_target_s"]
    cells = (
        f"{policy['latency_s']['mean']:.1f}",
        f"{policy['latency_s']['p95']:.1f}",
        f"{policy['compute_efficiency']:.3f}",
        f"{policy['capacity_used']:.3f}",
        f"{policy['peak_device_memory_bytes'] / 2**20:.0f}",
        f"{policy['energy_over_budget_max']:.3f}",
        "never" if target is None else f"{target / 3600:.1f}",
        f"{1e3 * policy['decision_s']['median']:.1f}",
    )
    return f"| {name} | {' | '.join(cells)} |"


def claim_lines(claims: Json) -> Iterator[str]:
    """Each claim that could be checked."""
    for key, (says, unit, sign) in CLAIMS.items():
        seen, needed = claims[key]["seen"], claims[key]["needed"]
        if seen is None:
            yield f"| {says} | {sign} {needed:g} {unit} | no baseline fits | |"
            continue
        kept = "kept" if claims[key]["kept"] else f"missed by {abs(seen - needed):.3g}"
        yield f"| {says} | {sign} {needed:g} {unit} | {seen:.4g} {unit} | {kept} |"


def seeds_line(run: Json) -> str:
    """How much seeds differ: latency against the best of the paper's three baselines."""
    policies = run["policies"]
    rivals = [n for n in ("fedavg", "splitfed", "uniform") if "seeds" in policies[n]]
    parts = []
    for k, ours in enumerate(policies["dssda"]["seeds"]):
        best = min(mean(policies[n]["seeds"][k]["latency_s"]) for n in rivals)
        parts.append(f"{100 * (1 - mean(ours['latency_s']) / best):.1f}")
    who = " and ".join([", ".join(rivals[:-1]), rivals[-1]]) if len(rivals) > 1 else rivals[0]
    return f"Latency below the best of {who}, seed by seed: {', '.join(parts)} %."


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
        "| clusters | devices | blocks | first s | median s |",
        "|---:|---:|---:|---:|---:|",
    )
    for row in bench["decisions"]:
        size = f"{row['clusters']} | {row['devices']} | {row['blocks']}"
        yield f"| {size} | {row['first_s']:.3f} | {row['median_s']:.3f} |"
    radio, gaps = bench["radio"], bench["optimality"]
    yield ""
    yield f"Radio of {radio['clusters']} clusters: {1e3 * radio['fast_s']:.1f} ms against"
    yield f"{1e3 * radio['cvxpy_s']:.0f} ms with cvxpy, {radio['speedup']:.0f} times as fast; its"
    yield f"objective lies {radio['relative_gap']:.1e} above the reference's. Against brute force"
    yield f"on {gaps['instances']} random small instances the mean gap is"
    yield f"{100 * gaps['mean_gap']:.4f} %,"
    yield f"the worst {100 * gaps['max_gap']:.2f} %; {100 * gaps['exact_share']:.1f} % are optimal."


def main() -> None:
    """Print the document; exits with a sentence when a file is missing."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python benchmarks/results_scheduler.py FOLDER")
    try:
        print("\n".join(lines(Path(sys.argv[1]))))
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}; run the commands first") from error


if __name__ == "__main__":
    main()
