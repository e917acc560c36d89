"""Runs that nobody trained: events of any size, as a run writes them, from a seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpRun:
    """``incident_every`` rounds, a device is lost, a cluster after twice as many."""

    clusters: int = 2
    devices: int = 3
    blocks: int = 12
    rounds: int = 5
    seed: int = 0
    measured: bool = True
    incident_every: int = 3
    name: str = "cluster"

    @property
    def cluster_ids(self) -> list[str]:
        """Names of the clusters."""
        return [f"{self.name}-{number}" for number in range(self.clusters)]

    def device_ids(self, cluster: str) -> list[str]:
        """Names of a cluster's devices."""
        return [f"{cluster}/{number + 1}-board" for number in range(self.devices)]

    @property
    def members(self) -> list[str]:
        """Control units and devices."""
        return [n for c in self.cluster_ids for n in (f"{c}/cu", *self.device_ids(c))]

    def events(self) -> Iterator[Json]:
        """One event after the other."""
        random = Random(self.seed)
        queues = dict.fromkeys(self.members, 0.0)
        for index in range(1, self.rounds + 1):
            yield self.event(index, random, queues)

    def event(self, index: int, random: Random, queues: dict[str, float]) -> Json:
        """Round ``index``; ``queues`` are those before it and afterwards those after it."""
        plans = [self._plan(cluster, random) for cluster in self.cluster_ids]
        clusters = {plan["cluster_id"]: self._cluster(plan, random) for plan in plans}
        energy = {name: 8 * random.random() for name in self.members}
        for name, joules in energy.items():
            queues[name] = max(0.0, queues[name] + joules - 4.0)
        loss = 0.3 + 4 * exp(-index / 40)
        incidents = self._incidents(index)
        return {
            "round_index": index,
            "wall_s": 2.0 + random.random(),
            "metrics": {"loss": 1.1 * loss, "accuracy": 1 - loss / 5},
            "evaluation_s": 0.25,
            "loss": loss,
            "clusters_loss": 1.05 * loss,
            "clusters_metrics": {"accuracy": 1 - loss / 4.9},
            "plan": {
                "round_index": index,
                "policy": "dssda",
                "clusters": plans,
                "latency_s": max(plan["latency_s"] for plan in plans),
                "rho": 1.0,
                "fallback": None,
            },
            "predicted_latency_s": max(plan["latency_s"] for plan in plans),
            "latency_s": max(told["latency_s"] for told in clusters.values()),
            "clusters": clusters,
            "energy_j": energy,
            "queues_j": dict(queues),
            "bytes": {"d2d": 9_000_000, "d2e": 4_000_000, "flower": 2_000_000, "weights": 500_000}
            | {"spared": 100_000},
            "links": [link for plan in plans for link in self._links(plan, random)],
            "memory_bytes": {
                role: 50_000_000 + random.randrange(30_000_000)
                for cluster in self.cluster_ids
                for role in (
                    f"{cluster}/control-unit",
                    *self.device_ids(cluster),
                    f"{cluster}/edge",
                )
            },
            "failures": [i["text"] for i in incidents if i["kind"] != "quarantined"],
            "incidents": incidents,
            "lost": [i["cluster"] for i in incidents if i["kind"] == "lost"],
            "fresh_examples": 0,
            "prequential_loss": None,
        }

    def summary(self, status: str = "completed") -> Json:
        """What a report reads of the summary."""
        return {
            "status": status,
            "reason": None if status == "completed" else "somebody pulled the plug",
            "rounds": self.rounds,
            "rounds_asked": self.rounds,
            "notes": ["made up"],
            "untrained": {"loss": 4.9, "accuracy": 0.1},
            "metric": {"name": "accuracy", "initial": 0.1, "final": 0.9, "curve": []},
            "wall_s": 2.5 * self.rounds,
            "prediction_error": 0.05,
            "energy": {"budget_j": dict.fromkeys(self.members, 4.0), "mean_j": {}},
            "memory_limit_bytes": dict.fromkeys(self.members, 90_000_000),
            "versions": {"collapipe-flwr": "0.1.0", "flwr": "1.41.0", "Python": "3.11.7"},
        }

    def write(self, folder: Path, status: str = "completed") -> Path:
        """The run directory."""
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(self.summary(status)))
        config = {"num-server-rounds": self.rounds, "clusters": self.clusters, "resume": ""}
        (folder / "run-config.json").write_text(json.dumps(config))
        with (folder / "events.jsonl").open("w") as file:
            for event in self.events():
                file.write(json.dumps(event) + "\n")
        return folder

    def _plan(self, cluster: str, random: Random) -> Json:
        devices = self.device_ids(cluster)
        if self.devices > 1 and random.random() < 0.3:
            devices = devices[:-1]
        cuts = sorted(random.sample(range(1, self.blocks), len(devices) - 1))
        ends = zip([0, *cuts], [*cuts, self.blocks], strict=True)
        segments = [
            {"device_id": name, "first_block": first, "stop_block": stop, "replicas": []}
            for name, (first, stop) in zip(devices, ends, strict=True)
        ]
        rate = {"forward_bit_per_s": 4e7, "backward_bit_per_s": 3e7, "lane": 0, "lanes": 1}
        return {
            "cluster_id": cluster,
            "segments": segments,
            "micro_batch_size": 8,
            "micro_batches": 4,
            "warmup_depth": [4] * (len(devices) + 2),
            "local_steps": 10,
            "bandwidth_hz": 2e7,
            "tx_power_w": dict.fromkeys([f"{cluster}/cu", *devices], 0.1),
            "gradient_power_w": dict.fromkeys(devices, 0.1),
            "latency_s": 1.0 + random.random() / 10,
            "step_s": 0.1,
            "energy_j": dict.fromkeys([f"{cluster}/cu", *devices], 4.0),
            "memory_bytes": dict.fromkeys([f"{cluster}/cu", *devices], 70_000_000),
            "model_share": 0.5,
            "hops": [{"codec": "int8", **rate}] * (len(devices) + 1),
        }

    def _cluster(self, plan: Json, random: Random) -> Json:
        latency_s = plan["latency_s"] * (0.95 + random.random() / 5)
        members = [f"{plan['cluster_id']}/cu", *(s["device_id"] for s in plan["segments"])]
        return {
            "predicted_s": plan["latency_s"],
            "latency_s": latency_s,
            "measured": self.measured,
            "error": log(plan["latency_s"] / latency_s),
            "loss": 1 + random.random(),
            "stages": {
                name: {
                    "predicted_s": 0.010,
                    "measured_s": 0.008 + random.random() / 200,
                    "planned_bytes": None if name == "edge" else 70_000_000,
                    "peak_bytes": 60_000_000,
                }
                for name in (*members, "edge")
            },
            "energy": {
                name: {"predicted_j": 4.0, "energy_j": 4.1, "source": "metered"} for name in members
            },
        }

    def _links(self, plan: Json, random: Random) -> Iterator[Json]:
        ends = ["control-unit", *(s["device_id"] for s in plan["segments"]), "edge"]
        for sender, receiver in pairwise(ends):
            way = {"bytes": 1_000_000, "sending_s": 0.2, "planned_bit_per_s": 4e7}
            yield {
                "cluster": plan["cluster_id"],
                "sender": sender,
                "receiver": receiver,
                "codec": "int8",
                "forward": {**way, "bit_per_s": 3e7 + 1e7 * random.random()},
                "backward": {**way, "bit_per_s": 2e7 + 1e7 * random.random()},
            }

    def _incidents(self, index: int) -> list[Json]:
        cluster = self.cluster_ids[index % self.clusters]
        device = self.device_ids(cluster)[-1]
        if not self.incident_every or index % self.incident_every:
            return []
        found = [
            {"kind": "recovered", "cluster": cluster, "text": f"{device} lost, replayed"},
            {"kind": "quarantined", "cluster": cluster, "text": f"{device}: sent NaN"},
        ]
        if index % (2 * self.incident_every) == 0:
            found.append({"kind": "lost", "cluster": cluster, "text": "no reply in time"})
            found.append({"kind": "retry", "cluster": "", "text": "all clusters failed"})
        return found
