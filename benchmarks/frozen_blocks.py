"""What it saves to compute frozen blocks once: seconds, CPU, joules and bytes of every epoch.

A model of MiniLM's size (6 blocks, width 384) classifies texts of 8 to 48 tokens on two device
daemons and an edge daemon on loopback, planned by DSSDA. Three sides take turns, epoch by epoch, in
one call: all blocks train, frozen lower blocks on devices, and frozen lower blocks whose results
the control unit keeps. Each example comes once an epoch, in an order drawn anew. CPU seconds are of
all processes and hardly depend on what else the machine does (``others_busy``), all others do.

    python benchmarks/frozen_blocks.py docs/results/frozen-blocks/*.json --into docs/lora.md
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from benchmarks.data_plane.recovery import cluster_of, daemons
from benchmarks.demo import machine_busy_s, tree_cpu_s
from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.hosted import HostedEdge
from collapipe_flwr.cluster.loader import LoaderBatches, join_parts
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.profile import profile_cluster
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.costs.measured import compute_server_s
from collapipe_flwr.federation.client.pipeline_round import build_telemetry, micro_batch
from collapipe_flwr.federation.planner import (
    KnownClusters,
)
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.round import ClosedRound
from collapipe_flwr.models.describing import keep_frozen, make_spec
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import CacheConfig
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.step import MicroBatch
from collapipe_flwr.scheduler.protocol import SchedulerConfig

TRAINED, ON_DEVICES, KEPT = "all blocks train", "frozen, on devices", "frozen, kept"
SIDES = (TRAINED, ON_DEVICES, KEPT)
SIZE, COUNT = 8, 4  # examples of a micro-batch, micro-batches of a step
_LENGTHS, _LABELS, _VOCABULARY = (8, 48), 77, 30522
MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_NODE = 1
_PLACE = re.compile(r"(<!-- table frozen-blocks -->\n).*?(<!-- end -->)", re.DOTALL)
Example = Mapping[str, Tensor]
Json = dict[str, Any]


def make_examples(count: int, seed: int) -> list[Example]:
    """Texts of random tokens, each a batch of one."""
    rng = torch.Generator().manual_seed(seed)
    found: list[Example] = []
    for _ in range(count):
        length = int(torch.randint(_LENGTHS[0], _LENGTHS[1] + 1, (1,), generator=rng))
        ids = torch.randint(1000, _VOCABULARY, (1, length), generator=rng)
        label = torch.randint(0, _LABELS, (1,), generator=rng)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label})
    return found


def make_splitter(side: str, frozen: int, sizes: Mapping[str, object] = MINILM) -> Splitter:
    """The model of a side."""
    spec = make_spec(
        "sequence-classification",
        model_type="bert",
        overrides=sizes,
        vocab_size=_VOCABULARY,
        pad_token_id=0,
        num_labels=_LABELS,
        frozen_blocks=0 if side == TRAINED else frozen,
    )
    return Splitter(keep_frozen(spec) if side == KEPT else spec)


@dataclass(kw_only=True)
class Side:
    """One way to train, with its own planner; ``epochs`` are what it measured."""

    name: str
    splitter: Splitter
    cluster: ClusterConfig
    weights: Mapping[str, Tensor]
    planner: KnownClusters
    server_s: float  # of the way to a server, which is not there
    epochs: list[Json] = field(default_factory=list)

    @staticmethod
    def of(name: str, splitter: Splitter, cluster: ClusterConfig, examples: list[Example]) -> Side:
        """Plan with what is known of the daemons before the first round: next to nothing."""
        length = round(fmean(each["input_ids"].shape[1] for each in examples))
        model = profile_model(splitter, BatchShape(source_length=length))
        settings = SchedulerConfig(micro_batch_sizes=(SIZE,), micro_batches=(COUNT,))
        planning = Planning(settings=settings)
        profile = profile_cluster(cluster, len(examples))
        planner = KnownClusters(
            planning, planning.world([profile], model), model, {_NODE: profile.cluster_id}
        )
        weights = splitter.initial_weights(seed=1)
        return Side(
            name=name,
            splitter=splitter,
            cluster=cluster,
            weights=weights,
            planner=planner,
            server_s=compute_server_s(profile, model),
        )

    def train(self, examples: list[Example], order: Sequence[int]) -> None:
        """Take one epoch as a round, from plan to outcome."""
        number = len(self.epochs) + 1
        planned = self.planner.plan(number, [_NODE])
        plan = planned.cluster_plan(_NODE)
        assert plan is not None
        cache = CacheConfig(max_gb=4.0 if self.name == KEPT else 0.0)
        learning = LearningSettings(
            optimizer=OptimizerConfig(name="adamw", learning_rate=1e-4), cache=cache
        )
        steps = list(self._cut(examples, order))
        before_s, busy_s, begin_s = _cpu_s(), machine_busy_s(), time.perf_counter()
        result = train_round(
            self.splitter,
            TrainingOrder(plan=plan, weights=self.weights, learning=learning, batches=len(steps)),
            steps,
            RemoteFleet(
                cluster=self.cluster,
                edges={"": HostedEdge(address=self.cluster.edges[0].address)},
            ),
        )
        self.weights = dict(result.weights)
        wall_s, cpu_s = time.perf_counter() - begin_s, _cpu_s() - before_s
        busy_s = machine_busy_s() - busy_s
        batches = LoaderBatches(loader=())
        batches.examples = len(order)
        measured = build_telemetry(result, batches, (), wall_s=wall_s)
        name = plan.cluster_id
        outcome = self.planner.settle(
            ClosedRound(
                plan=planned,
                before=ArrayRecord(),
                models={name: ArrayRecord()},
                telemetry={name: measured},
            )
        )
        use, spared = measured.cache, outcome.spared.get(name)
        self.epochs.append(
            {
                "wall_s": wall_s,
                "cpu_s": cpu_s,
                "others_busy": (busy_s - cpu_s) / wall_s / (os.cpu_count() or 1),
                "energy_j": sum(outcome.energy_j[name].values()),
                "link_bytes": sum(measured.link_bytes.values()),
                "weight_bytes": measured.moved.sent_bytes + measured.moved.received_bytes,
                "hits": use.hits,
                "visits": use.visits,
                "spared_s": spared.seconds if spared else 0.0,
                "spared_j": spared.joules if spared else 0.0,
                "predicted_s": plan.latency_s - self.server_s,
                "blocks": [[s.first_block, s.stop_block] for s in plan.segments],
                "losses": list(result.losses),
                "peak_tensor_bytes": {r.name: r.peak_tensor_bytes for r in measured.reports},
            }
        )

    def _cut(self, examples: list[Example], order: Sequence[int]) -> Iterator[list[MicroBatch]]:
        for step in range(0, len(order), SIZE * COUNT):
            rows = order[step : step + SIZE * COUNT]
            parts = [rows[start : start + SIZE] for start in range(0, len(rows), SIZE)]
            batches = (join_parts([examples[row] for row in part]) for part in parts)
            yield [micro_batch(self.splitter, batch) for batch in batches]


def measure(
    epochs: int,
    frozen: int,
    count: int,
    seed: int,
    say: Callable[[str], object] = lambda _: None,
    sizes: Mapping[str, object] = MINILM,
) -> Json:
    """All sides in turns, each epoch beginning with another one; returns the JSON of the bench."""
    torch.set_num_threads(1)  # as each daemon has one
    examples, rng = make_examples(count, seed), random.Random(seed)
    with (
        TemporaryDirectory() as folder,
        patch.dict(os.environ, XDG_CACHE_HOME=folder),
        daemons(2) as (hosts, edge),
    ):
        cluster = cluster_of(hosts, edge)
        warm = Side.of(TRAINED, make_splitter(TRAINED, frozen, sizes), cluster, examples)
        warm.train(examples, range(SIZE * COUNT))  # daemons import what they need
        sides = [
            Side.of(name, make_splitter(name, frozen, sizes), cluster, examples) for name in SIDES
        ]
        for number in range(epochs):
            order = rng.sample(range(count), count)
            at = number % len(sides)
            for side in (*sides[at:], *sides[:at]):
                say(f"epoch {number + 1} of {epochs}: {side.name}")
                side.train(examples, order)
        kept_bytes = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    return {
        "model": dict(sizes),
        "frozen_blocks": frozen,
        "examples": count,
        "epochs": epochs,
        "seed": seed,
        "kept_bytes": kept_bytes,
        "losses_apart": _losses_apart(*(sides[SIDES.index(name)] for name in (ON_DEVICES, KEPT))),
        "sides": {side.name: side.epochs for side in sides},
    }


def _losses_apart(one: Side, other: Side) -> float:
    """Return the largest relative difference of the losses of any step."""
    pairs = (
        zip(a["losses"], b["losses"], strict=True)
        for a, b in zip(one.epochs, other.epochs, strict=True)
    )
    return max(abs(a - b) / abs(a) for pair in pairs for a, b in pair)


def _cpu_s() -> float:
    """CPU seconds so far of this process and all daemons."""
    return sum(tree_cpu_s(os.getpid()).values())


def summarise(found: Json) -> dict[str, dict[str, dict[str, float]]]:
    """By side: the first epoch, and medians of those after it."""
    names = ("wall_s", "cpu_s", "energy_j", "link_bytes", "weight_bytes")
    return {
        side: {
            "first": {name: epochs[0][name] for name in names},
            "later": {name: median(each[name] for each in epochs[1:]) for name in names},
        }
        for side, epochs in found["sides"].items()
    }


def table(cases: Sequence[Json]) -> str:
    """Write results in Markdown."""
    lines = [
        "| frozen | | CPU s, first epoch | later | s, first epoch | later | J (modelled) "
        "| MB on links | MB of weights | MB in memory |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for found in cases:
        share = f"{found['frozen_blocks']} of {found['model']['num_hidden_layers']}"
        for side, row in summarise(found).items():
            first, later = row["first"], row["later"]
            cells = [f"{each[name]:.1f}" for name in ("cpu_s", "wall_s") for each in (first, later)]
            cells += [f"{later['energy_j']:.0f}"]
            cells += [f"{later[name] / 1e6:.1f}" for name in ("link_bytes", "weight_bytes")]
            cells += [f"{max(found['sides'][side][-1]['peak_tensor_bytes'].values()) / 1e6:.0f}"]
            lines.append(f"| {share} | {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--into", type=Path)
    asked = parser.parse_args()
    text = table([json.loads(file.read_text()) for file in asked.files])
    if asked.into is None:
        print(text)
        return
    page = asked.into.read_text()
    asked.into.write_text(_PLACE.sub(lambda place: f"{place[1]}{text}\n{place[2]}", page))


if __name__ == "__main__":
    main()
