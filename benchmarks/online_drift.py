"""Learn from a stream whose distribution drifts, with different shares of replay.

    python benchmarks/online_drift.py docs/results/online-drift.json
    python benchmarks/online_drift.py --table docs/results/online-drift.json   # what was measured

Number words to digits: the clusters start with numbers below 1,000; while they train, files with
ever larger numbers arrive, one per cluster and round, as long as the fresh part of a round. Each
variant is a real `collapipe run`; the files are moved into its stream while it goes on, each a
round before it is read. The test set holds numbers of all sizes, so forgetting shows.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from collapipe_flwr.data.seq2seq import spell

ROUNDS, CLUSTERS, EXAMPLES = 12, 2, 960  # examples a round of each cluster
PHASES = ((0, 1_000), (1_000, 10_000), (10_000, 100_000))  # sizes of numbers, four rounds each
REPLAY_SHARES = (0.0, 0.5, 0.8)
LOOK_S, PATIENCE_S = 0.2, 300.0
Json = dict[str, Any]


def main(target: Path) -> None:
    """Run every variant and write their curves."""
    runs = [_run(share) for share in REPLAY_SHARES]
    target.write_text(json.dumps({"rounds": ROUNDS, "runs": runs}, indent=1) + "\n")


def table(runs: Sequence[Json]) -> str:
    """The curves as Markdown, a row per round."""
    shares = [f"replay {run['replay_share']:g}" for run in runs]
    heads = [f"{share}: {name}" for share in shares for name in ("loss before", "exact match")]
    rows = [f"| round | {' | '.join(heads)} |", "| --- " * (1 + len(heads)) + "|"]
    for number in range(ROUNDS):
        cells = [
            "" if value is None else f"{value:.3f}"
            for run in runs
            for value in (run["prequential_loss"][number], run["exact_match"][number])
        ]
        rows.append(f"| {number + 1} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _run(replay_share: float) -> Json:
    rng, fresh = np.random.default_rng(11), EXAMPLES - int(EXAMPLES * replay_share)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "train.csv", rng.choice(1_000, 900, replace=False))
        _write(folder / "test.csv", np.concatenate([rng.integers(*p, size=150) for p in PHASES]))
        for cluster in range(CLUSTERS):
            (folder / "stream" / str(cluster)).mkdir(parents=True)
        with subprocess.Popen(_command(folder, replay_share), stdin=subprocess.PIPE) as process:
            for number in range(ROUNDS):
                # A file ahead: none comes too late, and a round reads no more than one.
                _await_round(folder, number - 1, process)
                for cluster in range(CLUSTERS):
                    low, high = PHASES[number * len(PHASES) // ROUNDS]
                    ready = folder / f"{number:02}-{cluster}.csv"
                    _write(ready, rng.integers(low, high, size=fresh))
                    ready.rename(folder / "stream" / str(cluster) / f"{number:02}.csv")
            process.wait()  # before its input is closed, which would stop it
        if process.returncode != 0:
            raise SystemExit(f"the run with replay share {replay_share} failed")
        return {"replay_share": replay_share, **_curves(_events(folder))}


def _command(folder: Path, replay_share: float) -> list[str]:
    values = {
        "data.task": "translation",
        "data.train": folder / "train.csv",
        "data.test": folder / "test.csv",
        "data.stream": folder / "stream",
        "data.stream-replay": replay_share,
        "train.examples-per-round": EXAMPLES,
        "train.decay": "none",
        "num-server-rounds": ROUNDS,
        "clusters": CLUSTERS,
    }
    options = [word for key, value in values.items() for word in ("-c", f"{key}={value}")]
    start = [sys.executable, "-m", "collapipe_flwr.cli.child", "run", ".", "--federation-config"]
    return [*start, "sim.toml", "--output-dir", str(folder / "runs"), *options]


def _write(path: Path, numbers: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["source", "target"])
        rows.writerows([spell(int(number)), str(int(number))] for number in numbers)


def _await_round(folder: Path, number: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while len(_events(folder)) < number and process.poll() is None:
        if time.monotonic() > deadline_s:
            process.terminate()
            raise SystemExit(f"round {number} did not end within {PATIENCE_S:.0f} s")
        time.sleep(LOOK_S)


def _events(folder: Path) -> list[Json]:
    found = list((folder / "runs").glob("*/events.jsonl"))
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


def _curves(events: list[Json]) -> Json:
    return {
        "fresh_examples": [event["fresh_examples"] for event in events],
        "prequential_loss": [event["prequential_loss"] for event in events],
        "train_loss": [event["loss"] for event in events],
        "test_loss": [event["metrics"]["loss"] for event in events],
        "exact_match": [event["metrics"]["exact_match"] for event in events],
    }


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python benchmarks/online_drift.py [--table] FILE.json")
    if sys.argv[1] != "--table":
        main(Path(sys.argv[-1]))
    print(table(json.loads(Path(sys.argv[-1]).read_text())["runs"]))
