"""A small split model and clusters that train it by hand, for tests of split rounds."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.core.domain import ClusterPlan, Plan, Segment
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.measurements import ClusterMeasurement
from collapipe_flwr.core.outcome import RoundOutcome
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.records import (
    ARRAYS,
    EXAMPLES,
    METRICS,
    SHORT,
    read_assignment,
    write_telemetry,
)
from collapipe_flwr.federation.round import RoundPlan
from collapipe_flwr.federation.strategy import CollaPipe
from collapipe_flwr.models.any_splitter import DescribedModel
from collapipe_flwr.pipeline.optimizer import OptimizerConfig

CONSTANT = "embed.sinusoid"


def model() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.ones(3, 2),
        CONSTANT: torch.tensor([0.1, 0.1, float("-inf")]),
        "blocks.0.weight": torch.ones(2, 2, dtype=torch.bfloat16),
        "decoder.weight": torch.ones(2, 2),
        "decoder.steps": torch.tensor(4),
    }


def cluster_plan(name: str) -> ClusterPlan:
    return ClusterPlan(
        cluster_id=name,
        segments=(Segment(device_id=f"{name}/d1", first_block=0, stop_block=1),),
        micro_batch_size=4,
        micro_batches=2,
        warmup_depth=(3, 2, 1),
        local_steps=5,
        bandwidth_hz=1e6,
        tx_power_w={f"{name}/d1": 0.1},
        gradient_power_w={f"{name}/d1": 0.1},
        latency_s=1.0,
        step_s=0.2,
        energy_j={f"{name}/d1": 2.0},
        memory_bytes={f"{name}/d1": 1000},
    )


class FixedPlanner:
    """Plans the named clusters and nobody else; node n is cluster cn."""

    def __init__(self, *planned: str, bundles: Collection[str] = ()) -> None:
        self.planned = planned
        self.bundles = frozenset(bundles)
        self.settled: list[RoundPlan] = []

    def plan(self, server_round, nodes):
        clusters = tuple(cluster_plan(name) for name in self.planned)
        plan = Plan(
            round_index=server_round, policy="fixed", clusters=clusters, latency_s=1.0, rho=1.0
        )
        names = {node: f"c{node}" for node in nodes}
        return RoundPlan(
            server_round=server_round,
            plan=plan,
            cluster_ids=names,
            bundles=self.bundles,
        )

    def settle(self, closed):
        self.settled.append(closed.plan)
        return RoundOutcome(latency_s=2.0)


def trainer(step: float, examples: int, **change):
    """A cluster that adds ``step`` to the whole model."""

    def train(message: Message, context) -> Message:
        del context
        task = read_assignment(message.content)
        sent = decode_tensors(message.content[ARRAYS])
        moved = {k: v + int(step) if k.endswith("steps") else v + step for k, v in sent.items()}
        moved |= {CONSTANT: sent[CONSTANT]} if CONSTANT in sent else {}
        moved |= change.get("extra", {})
        moved = {k: v for k, v in moved.items() if k != change.get("missing")}
        content = RecordDict(
            {
                ARRAYS: encode_tensors(moved),
                METRICS: MetricRecord({"loss": step, EXAMPLES: change.get("weight", examples)}),
            }
        )
        telemetry = ClusterMeasurement(
            cluster_id=change.get("telemetry", task.cluster_id),
            examples=examples,
            wall_s=0.1,
            losses=(step,),
            replanned=change.get("replanned"),
            profile=change.get("profile"),
        )
        return Message(write_telemetry(content, telemetry), reply_to=message)

    return train


def failing(message, context):
    del message
    raise LinkError(f"device d2 of node {context.node_id} does not answer; restart it")


def wrapped(planner, records, inner=None, keys=(), updates="fp32", **more) -> CollaPipe:
    splitter = SimpleNamespace(
        all_keys=lambda: keys or model(),
        constant_keys=frozenset({CONSTANT}),
        aliases={},
        held_blocks=0,
        prefix="",
        spec=SimpleNamespace(to_json=lambda: "{}"),
    )

    def learning(r):
        optimizer = OptimizerConfig(learning_rate=0.1 * r)
        return LearningSettings(optimizer=optimizer, updates=updates)

    inner = inner or FedAvg(fraction_evaluate=0.0)
    return CollaPipe(
        inner,
        model=DescribedModel(splitter, SHORT),
        scheduler=planner,
        learning=learning,
        edge="127.0.0.1:1",  # nobody asks it but for progress
        on_round=records.append,
        on_total_failure="raise",
        **more,
    )
