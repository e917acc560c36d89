"""The measurements behind docs/results-scheduler.md, each a command that writes one file."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from collapipe_flwr.core.processes import open_lifeline

Json = dict[str, Any]

SEEDS = "--seeds 1000-1019"  # fixed before any of their results was seen
LEAST_SEEDS = 20
RIVALS = "--policies dssda,fedavg,splitfed,uniform,memory,throughput,random"
PAPER = f"--preset paper {SEEDS}"
TABLES = {
    "paper": (f"{PAPER} {RIVALS}", "Weak boards, Wi-Fi with fading, tight energy budgets"),
    "neutral": (
        f"--clusters 5 --devices 4 --blocks 12 {SEEDS} {RIVALS}",
        "Five clusters of four boards, everything else by default",
    ),
    "paper-32": (
        f"{PAPER} -c scheduler.micro-batches=1,2,4,8,16,32 {RIVALS}",
        "The first of these with up to 32 micro-batches",
    ),
    "one-strong": (
        f"--preset one-strong {SEEDS} {RIVALS}",
        "Some boards as fast as a whole cluster, no budgets",
    ),
    "cellular": (
        f"--preset cellular {SEEDS} {RIVALS}",
        "Eight moving clusters in a 5G cell, a larger model",
    ),
}
# Twenty seeds leave open whether the first table's claim holds; fixed before any was seen.
MORE = {"paper": ("1020-1059", "1060-1099")}
PRICED = {"paper": "prices-paper-1f1b", "neutral": "prices-neutral-1f1b"}  # tables and files
SHARES = ("1", "0.5", "0.4", "0.3333", "0.25", "0.2")
WRONG = {
    "noise": ("--profile-error 0.3", "speeds and energies off by up to 30 %, anew every round"),
    "bias": (
        "--profile-error 0.3 --profile-error-kind bias",
        "off by up to 30 %, the same for a device in every round",
    ),
    "late": ("--profile-delay 1", "exact, but a round old, channel gains included"),
    "noise-late": (
        "--profile-error 0.3 --profile-delay 1",
        "off anew every round, and a round old",
    ),
    "bias-late": (
        "--profile-error 0.3 --profile-error-kind bias --profile-delay 1",
        "always off, and a round old",
    ),
}
ALONE = f"{PAPER} --policies dssda"
SWEEP = f"{ALONE} --rounds 25"
BENCH = (
    "collapipe bench scheduler --clusters 10,100,1000,10000 --instances 500 "
    "--sections decisions,radio,optimality"
)
PRICES = "collapipe bench scheduler --sections prices --schedule 1f1b"
# What no scheduler undercuts with those further seeds; ten of them take some ten minutes.
BOUNDED = {"paper": [f"{first}-{first + 9}" for first in range(1020, 1100, 10)]}
BOUNDS = "collapipe bench scheduler --sections bounds --schedule 1f1b"
# Twenty of the largest size take ten minutes.
TWENTIES = tuple(f"{first}-{first + 19}" for first in range(83000, 83200, 20))
SEARCHED = {  # by size; fixed before any of them was decided
    f"{shape}{schedule}": TWENTIES if shape == "100x10x24" else ("83000-83199",)
    for schedule in ("", ":1f1b")
    for shape in ("4x6x12", "5x4x12", "8x5x24", "100x10x24")
}
SEARCHED["4x6x12:1f1b"] = ("84000-84199",)  # one of those before showed a fault that is mended
SEARCHED["100x10x24:1f1b"] = ("83000-83039", *TWENTIES[2:])
SEARCH = "collapipe bench scheduler --sections search --search"


def commands() -> Iterator[tuple[str, str]]:
    """Every file's name and the command that makes it, up to ``--json``."""
    for name, (options, _) in TABLES.items():
        yield name, f"collapipe simulate {options}"
        for seeds in MORE.get(name, ()):
            yield (
                f"{name}-{seeds}",
                f"collapipe simulate {options.replace(SEEDS, f'--seeds {seeds}')}",
            )
    for share in SHARES:
        yield f"share-{share}", f"collapipe simulate {SWEEP} -c scheduler.max-model-share={share}"
    for name, (options, _) in WRONG.items():
        yield f"wrong-{name}", f"collapipe simulate {ALONE} {options}"
    for world, name in PRICED.items():
        yield name, f"{PRICES} --worlds {world} {SEEDS}"
    for world, groups in BOUNDED.items():
        for seeds in groups:
            yield f"bounds-{world}-{seeds}", f"{BOUNDS} --worlds {world} --seeds {seeds}"
    yield "bench", BENCH
    for name, (size, seeds) in search_files().items():
        yield name, f"{SEARCH} {size}={seeds}"


def search_files() -> dict[str, tuple[str, str]]:
    """Size and seeds of every file; in names no colon, which Windows takes for something else."""
    found = {}
    for size, groups in SEARCHED.items():
        for place, seeds in enumerate(groups):
            name = f"search-{size.replace(':', '-')}"
            found[f"{name}-{seeds}" if place else name] = (size, seeds)
    return found


def read(folder: Path, name: str) -> Json | None:
    """One result, None where it was not measured."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    values: Json = json.loads(path.read_text(encoding="utf-8"))
    return values


def condensed(values: Json) -> Json:
    """What the document needs: without plans and queues, latencies to the millisecond."""
    for policy in values.get("policies", {}).values():
        for seed in policy.get("seeds", ()):
            del seed["last_plan"], seed["queue_share"]
            seed["latency_s"] = [round(value, 3) for value in seed["latency_s"]]
    return values


def is_measured(path: Path) -> bool:
    """Whether there is such a file and, if it is a simulation's, one with bounds and all seeds."""
    if not path.exists():
        return False
    values = json.loads(path.read_text(encoding="utf-8"))
    if "policies" not in values:
        return True
    if "outdated" in values:  # says why
        return False
    return "bounds" in values and len(values["setting"]["seeds"]) >= LEAST_SEEDS


def measure(folder: Path, only: Sequence[str] = ()) -> None:
    """Run whatever has no file on today's terms in ``folder``, or ``only`` those of such names.

    Exits with the status of a command that fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in commands():
        path = folder / f"{name}.json"
        if (not only or name in only) and not is_measured(path):
            print(f"{command} --json {path}", flush=True)
            child = [sys.executable, "-m", "collapipe_flwr.cli.child", *shlex.split(command)[1:]]
            with open_lifeline() as stdin:
                status = subprocess.run([*child, "--json", str(path)], stdin=stdin, check=False)
            if status.returncode:
                sys.exit(status.returncode)
            values = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps(condensed(values)) + "\n", encoding="utf-8")
