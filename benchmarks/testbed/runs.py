"""What a run on the testbed came to: its run directory beside what its processes showed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.data_plane.crew import BenchError
from benchmarks.testbed.bed import Memory, Told
from benchmarks.testbed.training import METRIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of a run: by the server's clock, without the evaluation of the model.

    Predicted is the slowest cluster, with what the server took besides in the rounds before.
    """

    round_s: float
    predicted_s: float
    clusters: tuple[tuple[float, float], ...]  # predicted and measured seconds of each
    energy_j: Mapping[str, float]
    busy_s: Mapping[str, float]  # of devices, computing
    metric: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One policy with one seed; ``busy_share`` is that of all the host's processors."""

    policy: str
    seed: int
    rounds: tuple[Round, ...]
    budget_j: Mapping[str, float]
    energy_share: float
    memory: Mapping[str, Memory]
    useful_flop: float
    blocks: int  # of devices
    busy_share: float

    def time_to(self, target: float) -> float | None:
        """Seconds of rounds until the metric is first at the target; None where it never is."""
        seconds = 0.0
        for done in self.rounds:
            seconds += done.round_s
            if done.metric >= target:
                return seconds
        return None

    @property
    def energy_over_budget(self) -> float:
        """Of the worst device: joules per round over its budget."""
        means = {name: self._mean_j(name) / j for name, j in self.budget_j.items() if j > 0}
        return max(means.values())

    @property
    def alone_over_model(self) -> float:
        """How many times what operations alone would cost devices with blocks really spend.

        Budgets are shares of that price of all blocks, as `world.energy-share` says; batches of
        few examples take longer than their operations at the speed of a benchmark.
        """
        used = sorted({name for done in self.rounds for name in done.busy_s})
        return self.energy_share * fmean(self._mean_j(n) / self.budget_j[n] for n in used)

    def _mean_j(self, name: str) -> float:
        return sum(done.energy_j.get(name, 0.0) for done in self.rounds) / len(self.rounds)


def read_run(policy: str, seed: int, path: Path, told: Told, busy_share: float) -> Run:
    """The run in a run directory; raises BenchError for one in which somebody failed."""
    lines = (path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    failures = [words for event in events for words in event["failures"]]
    if failures:
        raise BenchError(f"{policy} with seed {seed}: {failures[0]}")
    summary, config = (
        json.loads((path / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("summary", "run-config")
    )
    return Run(
        policy=policy,
        seed=seed,
        rounds=tuple(map(_round, events)),
        budget_j=summary["energy"]["budget_j"],
        energy_share=config["world.energy-share"],
        memory=told.memory,
        useful_flop=told.useful_flop,
        blocks=max(each["stop_block"] for each in events[0]["plan"]["clusters"][0]["segments"]),
        busy_share=busy_share,
    )


def _round(event: Mapping[str, Any]) -> Round:
    clusters = event["clusters"].values()
    return Round(
        round_s=event["wall_s"] - event["evaluation_s"],
        predicted_s=event["predicted_wall_s"],
        clusters=tuple((c["predicted_s"], c["latency_s"]) for c in clusters),
        energy_j=event["energy_j"],
        busy_s=_busy_s(event),
        metric=event["metrics"][METRIC],
    )


def _busy_s(event: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a micro-batch times those that passed it, by device with blocks."""
    plans = {plan["cluster_id"]: plan for plan in event["plan"]["clusters"]}
    found = {}
    for name, cluster in event["clusters"].items():
        plan = plans[name]
        for segment in plan["segments"]:
            members = (segment["device_id"], *segment["replicas"])
            for turn, device in enumerate(members):
                passed = len(range(turn, plan["micro_batches"], len(members)))
                stage = cluster["stages"].get(device)
                count = plan["local_steps"] * passed
                found[device] = count * stage["measured_s"] if stage else 0.0
    return found
