"""Seconds per round by how many blocks stay on trusted devices, and by where the edge is.

    python benchmarks/trusted_depth.py docs/results/trusted-depth.json
    python benchmarks/trusted_depth.py --table docs/results/trusted-depth.json   # what was measured

Simulated rounds of ``dssda`` in the presets' worlds of some seeds: two clusters of six devices.
The first two devices of every cluster are trusted. The edge is a machine beside the server, the
control unit, or the last device, which then holds no block. What no plan fits has no number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from collapipe_flwr.core.domain import ClusterSnapshot, ModelProfile, Snapshot
from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.scheduler.controller import RoundController
from collapipe_flwr.scheduler.edges import divide_memory
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.simulation.setting import PRESETS, Setting
from collapipe_flwr.simulation.world import with_edge_at_home

NAMES = ("paper", "one-strong")
TRUSTED = 2  # devices of every cluster
SEEDS, CLUSTERS, ROUNDS = (0, 1, 2), 2, 4
Place = Callable[[ClusterSnapshot, ModelProfile], ClusterSnapshot]


def beside_the_server(cluster: ClusterSnapshot, model: ModelProfile) -> ClusterSnapshot:
    """As worlds have it."""
    del model
    return cluster


def at_the_control_unit(cluster: ClusterSnapshot, model: ModelProfile) -> ClusterSnapshot:
    """One machine at both ends of the pipeline."""
    profile = divide_memory(with_edge_at_home(cluster.profile), model)
    return replace(cluster, profile=profile, channel=cluster.channel.to_member(0))


def on_the_last_device(cluster: ClusterSnapshot, model: ModelProfile) -> ClusterSnapshot:
    """It computes the head in place of blocks."""
    del model
    device = cluster.profile.devices[-1]
    placed = replace(
        cluster,
        profile=replace(cluster.profile, edge=device.as_edge),
        channel=cluster.find_channel(device.as_edge),
    )
    return placed.without({device.device_id})


PLACES: dict[str, Place] = {
    "beside the server": beside_the_server,
    "control unit": at_the_control_unit,
    "last device": on_the_last_device,
}


def trusting(cluster: ClusterSnapshot, blocks: int) -> ClusterSnapshot:
    """The cluster with so many blocks for its first devices, which are trusted."""
    devices = cluster.profile.devices
    marked = (replace(device, trusted=n < TRUSTED) for n, device in enumerate(devices))
    profile = replace(cluster.profile, devices=tuple(marked), trusted_blocks=blocks)
    return replace(cluster, profile=profile)


def seconds(
    setting: Setting, model: ModelProfile, blocks: int, place: Place, seed: int
) -> float | None:
    """The mean of some rounds; None where no plan fits."""
    world = setting.world(seed, model)
    scheduler = make_scheduler("dssda", setting.settings)
    controller, taken_s = RoundController(scheduler, setting.settings), []

    def seen(index: int) -> Snapshot:
        snapshot = world.snapshot(index, model)
        placed = (place(trusting(cluster, blocks), model) for cluster in snapshot.clusters)
        return replace(snapshot, clusters=tuple(placed))

    for index in range(1, ROUNDS + 1):
        snapshot = seen(index)
        try:
            plan = controller.plan(snapshot)
        except InfeasibleError:
            return None
        outcome = controller.learn(plan, plan, snapshot, snapshot)
        taken_s.append(max(cluster.latency_s for cluster in outcome.clusters))
    return fmean(taken_s)


def cell(setting: Setting, model: ModelProfile, where: str, blocks: int) -> float | None:
    """`seconds` by the place's name, the mean of all seeds; None where one has no plan."""
    found = [seconds(setting, model, blocks, PLACES[where], seed) for seed in SEEDS]
    return None if None in found else fmean(each for each in found if each is not None)


def measured(settings: dict[str, Setting], pool: Executor) -> dict[str, Any]:
    """Seconds by preset and place, from no trusted block to all."""
    begun = {
        name: {
            where: {
                str(blocks): pool.submit(cell, setting, setting.model.profile(), where, blocks)
                for blocks in range(setting.model.blocks + 1)
            }
            for where in PLACES
        }
        for name, setting in settings.items()
    }
    found = {
        name: {w: {k: v.result() for k, v in cells.items()} for w, cells in places.items()}
        for name, places in begun.items()
    }
    settled = {"trusted": TRUSTED, "seeds": SEEDS, "clusters": CLUSTERS, "rounds": ROUNDS}
    return {**settled, "seconds": found}


def table(told: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    columns = [(name, where) for name, places in told["seconds"].items() for where in places]
    depths = list(dict.fromkeys(d for name, where in columns for d in told["seconds"][name][where]))
    head = ["trusted blocks", *(f"{name}: {where}" for name, where in columns)]
    lines = [head, ["---:"] * len(head)]
    for depth in depths:
        cells = (told["seconds"][name][where].get(depth) for name, where in columns)
        lines.append([depth, *("no plan" if s is None else f"{s:.1f}" for s in cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python benchmarks/trusted_depth.py [--table] FILE.json")
    target = Path(sys.argv[-1])
    if sys.argv[1] != "--table":
        settings = {name: replace(PRESETS[name], clusters=CLUSTERS) for name in NAMES}
        with ProcessPoolExecutor() as pool:
            told = measured(settings, pool)
        target.write_text(json.dumps(told, indent=1) + "\n")
    print(table(json.loads(target.read_text())))
