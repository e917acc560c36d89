"""Write docs/results-testbed.md from what ``collapipe bench testbed --json FILE`` measured.

python benchmarks/results_testbed.py FILE SAME-ON-ANOTHER-DAY [WITH-OPTIONS] [OVER-WI-FI] \
    > docs/results-testbed.md
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Json = dict[str, Any]
COMMAND = "collapipe bench testbed"
WHOLE = ("fedavg", "splitfed")  # one device of a cluster holds all blocks
RIVALS = ("fedavg", "splitfed", "uniform")
LEARNT = 3  # rounds, after which predictions count
REPAID = 10  # rounds, see `scheduler.protocol.REPAID`
SATURATED = 0.9  # of the host's processors
WIDTH = 100
LATENCY, EFFICIENCY, MEMORY = 48.98, 15.09, 0.5
NEAR = 0.05  # of predictions, in ln


def lines(results: Mapping[str, Json]) -> Iterator[str]:
    """The whole document, from the files' contents by path, in the order of `main`."""
    first, again, *optional = results.values()
    settings, policies = first["settings"], first["policies"]
    yield from ("# Results of the testbed", "")
    yield from _paragraph(
        "Measured, not simulated: policies take turns on real daemons, each in a network "
        "namespace behind a shaped link and as slow as its board."
    )
    yield from ("", "```bash")
    for path, result in results.items():
        yield from _command(path, result["settings"])
    yield f"python benchmarks/results_testbed.py {' '.join(results)} > docs/results-testbed.md"
    yield from ("```", "")
    yield from _setting(settings)
    yield from ("", "## Policies", "")
    yield from _table(policies, settings)
    yield from _legend(policies, settings)
    yield from _busy(policies)
    yield from ("", "## The claims", "")
    yield from _claims(policies)
    yield from _possible(settings)
    yield from ("", "## Predicted beside measured", "")
    yield from _predictions(policies)
    for result in (r for r in optional if not r["settings"].get("loss")):
        yield from ("", "## Predicted beside measured, with options", "")
        yield from _options(result)
    for result in (r for r in optional if r["settings"].get("loss")):
        yield from ("", "## Adapters of an instruct model over Wi-Fi", "")
        yield from _over_wifi(result)
    yield from ("", "## Again, on another day", "")
    yield from _again(again, settings)
    yield from _boards(settings)


def _command(path: str, settings: Json) -> Iterator[str]:
    policies = ",".join(settings["policies"])
    options = {
        "policies": f'"{policies}"' if " " in policies else policies,
        "rounds": settings["rounds"],
        "repetitions": settings["repetitions"],
        "seed": settings["seed"],
        "examples": settings["examples"],
        "target": settings["target"],
    }
    words = [f"--{name} {value}" for name, value in options.items()]
    yield f"{COMMAND} {' '.join(words[:3])} \\"
    if settings.get("options"):
        yield f"    --options '{settings['options']}' \\"
    if settings.get("loss"):
        sent = settings["clusters"][0]["boards"][0]["uplink_bit_per_s"] * settings["slow_down"]
        words.append(f"--uplink-mbit {sent / 1e6:g} --loss {settings['loss']:g}")
    yield f"    {' '.join(words[3:])} --json {path}"


def _again(result: Json, before: Json) -> Iterator[str]:
    """The tables of a second recording; ``before`` are the settings of the first."""
    settings, policies = result["settings"], result["policies"]
    yield from _paragraph(
        f"Everything anew, with seeds {', '.join(map(str, settings['seeds']))}. The host computed "
        f"{settings['host']['flop_per_s'] / 1e9:.0f} GFLOP/s on one thread, so each board ran "
        f"{settings['slow_down']:.2f} times slower than its preset, against "
        f"{before['slow_down']:.2f} on the first day."
    )
    yield ""
    yield from _table(policies, settings)
    yield from _busy(policies)
    yield ""
    yield from _claims(policies)
    yield from _possible(settings)
    yield ""
    yield from _prediction_table(policies)


def _setting(settings: Json) -> Iterator[str]:
    shaping, host = settings["shaping"], settings["host"]
    federation, share = settings["federation"], settings.get("budget_share", 0.5)
    yield from _paragraph(
        f"Each board runs {settings['slow_down']:.2f} times slower than its preset: operations "
        f"({shaping['brake']}), bits ({shaping['links']}, without a delay) and watts. So joules "
        "are those of the boards, and a round takes that many times as long as on them. The host "
        f"has {host['processors']} processors of {host['flop_per_s'] / 1e9:.0f} GFLOP/s on one "
        "thread. Data, first weights, schedule, memory cap and grid of micro-batches are equal, "
        "and every rule has its best micro-batches. Seeds "
        f"{', '.join(map(str, settings['seeds']))}; the task is to name the digit with which all "
        "numbers of a list in words begin, "
        f"{settings['examples']} examples per cluster and round."
    )
    yield ""
    yield from _paragraph(
        f"{federation[0].upper()}{federation[1:]}. Joules are modelled from measured times; a "
        f"budget is {100 * share:.0f} % of what a device spends on training all blocks alone, as "
        "measured on the fastest. Senders are not paced."
    )


def _table(
    policies: Mapping[str, Json], settings: Json, *, to_target: bool = True
) -> Iterator[str]:
    target = f"s to {100 * settings['target']:.0f} % {settings['metric']}"
    heads = ["policy", "round s", *([target] if to_target else [])]
    heads += ["RSS MB", "over idle MB", "joule / budget", "used"]
    yield f"| {' | '.join(heads)} |"
    yield f"|---|{'---:|' * (len(heads) - 1)}"
    for name, policy in policies.items():
        cells = (
            _spread(policy["round_s"]),
            *([_spread(policy["time_to_target_s"])] if to_target else []),
            f"{policy['peak_rss_bytes'] / 1e6:.0f}",
            f"{policy['peak_rss_over_idle_bytes'] / 1e6:.0f}",
            f"{policy['energy_over_budget_max']:.2f}",
            f"{policy['capacity_used']:.3f}",
        )
        yield f"| {name}{'' if _keeps(policy) else ' *'} | {' | '.join(cells)} |"


def _legend(policies: Mapping[str, Json], settings: Json) -> Iterator[str]:
    yield ""
    yield from _paragraph(
        "Median (quartiles); rounds are by the server's clock, without evaluation. RSS is that of "
        "the largest device process, most of it libraries. *Used* is useful operations over all "
        "that all devices could compute."
    )
    if not all(map(_keeps, policies.values())):
        yield from ("", "\\* breaks an energy budget: does not count as a winner.")
    if not _keeps(policies["dssda"]) and settings["rounds"] < REPAID:
        yield ""
        yield from _paragraph(
            "DSSDA may spend one budget in advance, which is paid back by the end of round "
            f"{REPAID}: after {settings['rounds']} rounds a device may be above its budget."
        )


def _busy(policies: Mapping[str, Json]) -> Iterator[str]:
    busy = max(p["host_busy_share"] for p in policies.values())
    yield from ("", f"The host's processors were busy for {100 * busy:.0f} % of the time at most.")
    if busy > SATURATED:
        yield from _paragraph(
            "**That is too much**: something else ran there, and seconds are longer than they "
            "should be. To be measured again on a quiet machine."
        )


def _claims(policies: Mapping[str, Json]) -> Iterator[str]:
    """What the paper claims of DSSDA, read off the table."""
    ours = policies["dssda"]
    yield from ("| DSSDA against | needed | seen | |", "|---|---:|---:|---|")
    for name in (n for n in RIVALS if n in policies):
        seen = 100 * (1 - ours["round_s"]["mean"] / policies[name]["round_s"]["mean"])
        mark = "" if _keeps(policies[name]) else " (breaks a budget)"
        rows = f"mean round below `{name}`{mark} | {LATENCY} % | {seen:.1f} %"
        yield f"| {rows} | {_kept(seen, LATENCY)} |"
    others = {n: p for n, p in policies.items() if n not in (*WHOLE, "dssda")}
    feasible = {n: p for n, p in others.items() if _keeps(p)}
    if feasible:
        best = max(feasible, key=lambda n: feasible[n]["capacity_used"])
        seen = 100 * (ours["capacity_used"] / feasible[best]["capacity_used"] - 1)
        rows = f"capacity used, over `{best}` | {EFFICIENCY} % | {seen:.1f} %"
        yield f"| {rows} | {_kept(seen, EFFICIENCY)} |"
    elif others:
        yield f"| capacity used, over the best pipeline within budgets | {EFFICIENCY} % | none | |"
    whole = [policies[n]["peak_rss_over_idle_bytes"] for n in WHOLE if n in policies]
    if whole:
        seen = ours["peak_rss_over_idle_bytes"] / max(whole)
        kept = "kept" if seen < MEMORY else f"missed by {seen - MEMORY:.2f}"
        rows = f"memory over idle, of a device with all blocks | < {MEMORY} | {seen:.2f}"
        yield f"| {rows} | {kept} |"


def _possible(settings: Json) -> Iterator[str]:
    """What a pipeline could gain over one device if nothing but computing took time."""
    blocks, share = settings["blocks"], settings["budget_share"]
    flop = settings["useful_flop"] / len(settings["clusters"]) / blocks
    speeds = [
        [board["flop_per_s"] for board in cluster["boards"][1:]] for cluster in settings["clusters"]
    ]
    alone_s = max(blocks * flop / max(each) for each in speeds)
    cut_s = max(flop * quickest_cut(each, blocks) for each in speeds)
    kept_s = max(flop * least_within(each, blocks, share * blocks) for each in speeds)
    yield ""
    yield from _paragraph(
        f"Computing alone takes {alone_s:.1f} s on the fastest device of the slower cluster, and "
        f"{cut_s:.1f} s on the slowest stage of its best cut into whole blocks, whatever memory "
        f"and budgets allow. If every device computes at most {100 * share:.0f} % of the work, as "
        f"budgets allow on average, it takes at least {kept_s:.1f} s. With no bubble, no overhead "
        f"and no message, a pipeline would be {100 * (1 - cut_s / alone_s):.0f} % below `fedavg` "
        f"at most, and one within budgets {100 * (1 - max(cut_s, kept_s) / alone_s):.0f} %."
    )


def quickest_cut(speeds: Sequence[float], blocks: int) -> float:
    """Blocks over speed of the slowest stage in the best cut into whole blocks."""
    counts = [0] * len(speeds)
    for _ in range(blocks):
        best = min(range(len(speeds)), key=lambda n: (counts[n] + 1) / speeds[n])
        counts[best] += 1
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def least_within(speeds: Sequence[float], blocks: float, most: float) -> float:
    """Seconds in which devices compute all blocks, cut at will, none of them more than ``most``.

    Infinite where that is not all.
    """
    left, free = blocks, sorted(speeds)
    if left > most * len(free):
        return math.inf
    while len(free) > 1 and left * free[-1] > most * sum(free):
        left -= most
        free.pop()
    return left / sum(free)


def _kept(seen: float, needed: float) -> str:
    return "kept" if seen >= needed else f"missed by {needed - seen:.1f}"


def _predictions(policies: Mapping[str, Json]) -> Iterator[str]:
    yield from _paragraph(
        "Medians of abs(ln(predicted / measured)) after three rounds: of whole rounds by the "
        "server's clock, and of clusters by their control units' clocks."
    )
    yield ""
    yield from _prediction_table(policies)
    yield from ("", "Where they miss:", "")
    for reason in REASONS:
        yield from textwrap.wrap(f"- {reason}", WIDTH, subsequent_indent="  ")


def _prediction_table(policies: Mapping[str, Json]) -> Iterator[str]:
    yield "| policy | predicted s | measured s | rounds | clusters |"
    yield "|---|---:|---:|---:|---:|"
    for name, policy in policies.items():
        seconds = (_median(policy, key) for key in ("predicted_s", "round_s"))
        errors = (policy[key] for key in ("prediction_error", "prediction_error_clusters"))
        cells = (
            *(f"{s:.1f}" for s in seconds),
            *("-" if e is None else f"{e:.3f}" for e in errors),
        )
        yield f"| {name} | {' | '.join(cells)} |"


def _options(result: Json) -> Iterator[str]:
    settings, policies = result["settings"], result["policies"]
    yield from _paragraph(
        f"{settings['examples']} examples per cluster and round, seeds "
        f"{', '.join(map(str, settings['seeds']))}, each board {settings['slow_down']:.2f} times "
        "slower than its preset; adapters on a model of the same shape with drawn weights."
    )
    yield ""
    yield from _prediction_table(policies)
    yield ""
    keys = ("prediction_error", "prediction_error_clusters")
    near = sum(max(policy[k] for k in keys) <= NEAR for policy in policies.values())
    yield from _paragraph(
        f"{near} of {len(policies)} are within {NEAR} in both columns. Seconds are medians of all "
        f"rounds of one run, errors of its {settings['rounds'] - LEARNT} rounds after the third. "
        "Budgets are shares of operations: adapters have fewer of them but start as many, so what "
        "starting takes weighs more, and their rounds within budgets are longer."
    )


def _over_wifi(result: Json) -> Iterator[str]:
    settings, policies = result["settings"], result["policies"]
    sent = settings["clusters"][0]["boards"][0]["uplink_bit_per_s"]
    yield from _paragraph(
        "SmolLM2-135M-Instruct, adapters of rank 8, the instructions of "
        f"[Results on real data](results.md); {settings['examples']} examples per cluster and "
        f"round, all of them one step, seed {', '.join(map(str, settings['seeds']))}. Every "
        "board, control units included, sends "
        f"{sent * settings['slow_down'] / 1e6:g} Mbit/s to each neighbour (slowed down "
        f"{settings['slow_down']:.2f} times like everything else), and "
        f"{100 * settings['loss']:g} % of all packets get lost, drawn at random. Unlike the air, "
        "these links add no delay, and a board may send to several neighbours at once, which plans "
        "do not expect; they also took the control units' way to the server to be a cable. The "
        "command needs the model's folder `smollm2` and `instructions.json` where it is run. A "
        "round less its slowest cluster, which is mostly the adapters' way to the server, took "
        f"{_median_beside(result['runs']):.0f} s (median)."
    )
    yield ""
    yield from _table(policies, settings, to_target=False)
    yield from _busy(policies)
    yield ""
    yield from _prediction_table(policies)


def _median_beside(runs: Sequence[Json]) -> float:
    """Compute the median of seconds that rounds took beside their slowest clusters."""
    return median(
        done["round_s"] - max(measured for _, measured in done["clusters"])
        for run in runs
        for done in run["rounds"]
    )


REASONS = (
    "Opening a session, taking weights and giving them back cost a device about a tenth of a "
    "second of a whole processor per round: seconds on the slowest boards. Plans begin with a "
    "usual figure and learn the cluster's own from its rounds; what a device loads at its first "
    "work is in no plan.",
    "All boards are processes of one host: a round in which that is slower is slower on all.",
    "A cluster that is not the slowest gets less power and bandwidth; cables do not slow down for "
    "that, so it is faster than predicted.",
)


def _boards(settings: Json) -> Iterator[str]:
    yield from ("", "## The boards as they ran", "")
    yield "| board | share of a processor | GFLOP/s | ms per block | uplink Mbit/s |"
    yield "|---|---:|---:|---:|---:|"
    boards: dict[str, list[Json]] = {}
    for cluster in settings["clusters"]:
        for place, board in enumerate(cluster["boards"]):
            role = board["kind"] if place else f"{board['kind']} (control unit)"
            boards.setdefault(f"{cluster['name']} {role}", []).append(board)
    for name, each in boards.items():
        cells = (
            f"{100 * each[0]['processor_share']:.1f} %",
            _joined(f"{board['flop_per_s'] / 1e9:.1f}" for board in each),
            _joined(f"{1e3 * (board['overhead_s'] or 0.0):.0f}" for board in each),
            f"{each[0]['uplink_bit_per_s'] / 1e6:.0f}",
        )
        yield f"| {name} | {' | '.join(cells)} |"
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    yield from (
        "",
        "Speeds and overheads are what `collapipe cluster check` measured; plans began with them.",
    )
    yield f"Versions: {versions}."


def _joined(cells: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(cells))


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def _keeps(policy: Json) -> bool:
    """Whether every energy budget is kept, in every repetition."""
    return bool(policy["energy_over_budget_max"] <= 1.0)


def _median(policy: Json, key: str) -> float:
    value: float = policy[key]["median"]
    return value


def _spread(values: Json) -> str:
    middle, low, high = (_seconds(values[key]) for key in ("median", "q1", "q3"))
    return middle if low == high else f"{middle} ({low} to {high})"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


def main() -> None:
    """Print the document."""
    if len(sys.argv) < 3:
        raise SystemExit(f"usage: {__doc__}")
    results = {path: json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]}
    print("\n".join(lines(results)))


if __name__ == "__main__":
    main()
