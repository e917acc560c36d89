"""Policies take turns on one testbed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.demo import machine_busy_s
from benchmarks.testbed.bed import Bed, running
from benchmarks.testbed.boards import (
    WIRED_BIT_PER_S,
    Board,
    Cluster,
    Slowness,
    slowness,
)
from benchmarks.testbed.results import policy_json, run_json
from benchmarks.testbed.runs import Run, read_run
from benchmarks.testbed.training import METRIC, WIDTH, Training, turns, write_data
from collapipe_flwr.cluster.profile import Measurements
from collapipe_flwr.pipeline.benchmark import BenchmarkRequest, run_benchmark

FEDERATION = (
    "ServerApp, strategy and ClientApps of the project with real daemons as edge and devices; each "
    "control unit is a process behind a LocalGrid over TCP, without SuperLink and SuperNodes"
)
VERSIONS = ("collapipe-flwr", "flwr", "torch", "transformers", "grpcio")
PREPARED = 3  # steps before the first run
WARM = "uniform"  # its first round has every device load what it needs
ALONE = "fedavg"  # one device of a cluster trains all blocks: what budgets are shares of
Json = dict[str, Any]
Tick = Callable[[str], None]


def steps(training: Training) -> int:
    """How often `measure` ticks."""
    return PREPARED + training.rounds * len(training.policies) * training.repetitions


def measure(
    clusters: Sequence[Cluster], training: Training, factor: float, folder: Path, tick: Tick
) -> Json:
    """The JSON of the bench; ``folder`` is for run directories, logs and data."""
    processors = os.cpu_count() or 1
    slow = slowness(clusters, host_flop_per_s(), processors, factor)
    write_data(training.seeds, folder)
    with running(clusters, slow, folder, training.loss) as bed:
        brake, figures, measured = prepare(bed, training, folder, tick)
        runs = [
            run_once(bed, measured, policy, seed, folder / f"run-{turn}", tick)
            for turn, (policy, seed) in enumerate(turns(training))
        ]
        shaping = {"links": bed.links, "brake": brake}
    settings = settings_json(clusters, measured, slow, figures)
    settings |= {
        "shaping": shaping,
        "useful_flop": runs[0].useful_flop,
        "blocks": runs[0].blocks,
        "budget_share": training.energy_share,
    }
    speeds = {
        f"{name}/{member.name}": member.speed_flop_per_s or 0.0
        for name, found in figures.items()
        for member in found.members
    }
    return {
        "settings": settings,
        "policies": {
            name: policy_json([r for r in runs if r.policy == name], training.target, speeds)
            for name in training.policies
        },
        "runs": [run_json(run) for run in runs],
    }


def prepare(
    bed: Bed, training: Training, folder: Path, tick: Tick
) -> tuple[str, Mapping[str, Measurements], Training]:
    """Warm up, slow down and check the boards: by which means, what they do, fair budgets."""
    tick("machines")
    warm = replace(training, policies=(WARM,), rounds=1)
    run_once(bed, warm, WARM, training.seed, folder / "warm", lambda _: None)
    tick("warm")
    brake = bed.slow_down()
    figures = bed.check(WIDTH)
    alone = replace(training, rounds=1, policies=(ALONE,))
    solo = run_once(bed, alone, ALONE, training.seed, folder / "alone", lambda _: None)
    tick("checked")
    share = training.energy_share * solo.alone_over_model
    return brake, figures, replace(training, energy_share=share)


def settings_json(
    clusters: Sequence[Cluster],
    training: Training,
    slow: Slowness,
    figures: Mapping[str, Measurements],
) -> Json:
    """Everything that the numbers depend on."""
    return {
        **asdict(training),
        "seeds": training.seeds,
        "metric": METRIC,
        "clusters": [_cluster_json(cluster, slow, figures[cluster.name]) for cluster in clusters],
        "slow_down": slow.factor,
        "host": {
            "processors": os.cpu_count(),
            "flop_per_s": slow.host_flop_per_s,
            "kernel": platform.release(),
        },
        "server_and_edge_bit_per_s": WIRED_BIT_PER_S / slow.factor,
        "federation": FEDERATION,
        "run_config": dict(training.run_config("POLICY", training.seed, Path("FOLDER/RUN"))),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS}
        | {"python": platform.python_version()},
    }


def _cluster_json(cluster: Cluster, slow: Slowness, found: Measurements) -> Json:
    def board_json(board: Board) -> Json:
        figures = next(m for m in found.members if m.name == board.name)
        return {
            "name": board.name,
            "kind": board.preset.kind,
            "processor_share": slow.share(board),
            "flop_per_s": figures.speed_flop_per_s,
            "overhead_s": figures.overhead_s,
            "uplink_bit_per_s": board.uplink_bit_per_s / slow.factor,
        }

    return {"name": cluster.name, "boards": [board_json(board) for board in cluster.boards]}


def run_once(bed: Bed, training: Training, policy: str, seed: int, path: Path, tick: Tick) -> Run:
    """One policy with one seed; ticks once per round."""
    seen = _Rounds(path / "events.jsonl", lambda: tick(f"{policy} {seed}"))
    started_s, busy_s = time.monotonic(), machine_busy_s()
    told = bed.run(training.run_config(policy, seed, path), seen.look)
    seen.look()
    wall_s = time.monotonic() - started_s
    share = (machine_busy_s() - busy_s) / (wall_s * (os.cpu_count() or 1))
    return read_run(policy, seed, path, told, share)


class _Rounds:
    """Ticks for every line that a file has grown by."""

    def __init__(self, path: Path, tick: Callable[[], None]) -> None:
        self._path, self._tick, self._seen = path, tick, 0

    def look(self) -> None:
        """Look at the file, if it is there by now."""
        lines = self._path.read_bytes().count(b"\n") if self._path.exists() else 0
        for _ in range(lines - self._seen):
            self._tick()
        self._seen = lines


def host_flop_per_s() -> float:
    """Of one thread, at the size of the task's blocks, whatever else runs here."""
    import torch

    torch.set_num_threads(1)
    request = BenchmarkRequest(width=WIDTH, tokens=16, examples=16, seconds=1.0)
    return run_benchmark(request, clock=time.process_time).speed_flop_per_s
