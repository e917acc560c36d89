"""What audits cost: a cluster's rounds with none, and with some shares of intervals audited.

    python benchmarks/audits.py docs/results/audits.json
    python benchmarks/audits.py --table docs/results/audits.json   # what was measured

A classifier of MiniLM-L6's size on three devices, which are threads of this process, as is the
control unit: it is as fast as all devices together. Exactly the share is audited, evenly spaced, so
that a hundred intervals measure 1 % of them. Processor seconds are those of all threads.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.plans import make_plan, spread_evenly
from collapipe_flwr.cluster import recovery
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.recovery import RecoveringPipeline, Recovery
from collapipe_flwr.core.domain import ClusterProfile, DeviceProfile
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.step import MicroBatch

SHARES = (0.0, 1e-9, 0.01, 0.05, 0.1)  # 1e-9: all is noted, and nothing audited
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
MINILM |= {"intermediate_size": 1536, "max_position_embeddings": 512}
DEVICES, TOKENS, SIZE, COUNT, STEPS, INTERVALS = 3, 32, 4, 2, 2, 100


class Evenly:
    """Draws that choose a share of intervals, each as far from the next."""

    def __init__(self, share: float) -> None:
        self._share, self._taken = share, 0.5

    def random(self) -> float:
        """Return 0 for an interval that is audited, else 1."""
        before, self._taken = int(self._taken), self._taken + self._share
        return 0.0 if int(self._taken) > before else 1.0


def splitter_of(sizes: dict[str, int], vocabulary: int) -> Splitter:
    """A classifier of four classes."""
    options: dict[str, Any] = {"overrides": sizes, "vocab_size": vocabulary, "pad_token_id": 0}
    return Splitter(
        make_spec("sequence-classification", model_type="bert", num_labels=4, **options)
    )


def profile() -> ClusterProfile:
    """Devices with room for everything."""
    unit, *devices = (
        DeviceProfile(
            device_id=f"A/{name}",
            kind="board",
            speed_flop_per_s=1e9,
            memory_bytes=2**34,
            energy_per_flop_j=1e-9,
            tx_power_max_w=0.1,
            energy_budget_j=1.0,
        )
        for name in ("cu", *(f"d{n}" for n in range(DEVICES)))
    )
    return ClusterProfile(
        cluster_id="A",
        examples=1,
        control_unit=unit,
        devices=tuple(devices),
        d2d_bandwidth_hz=1e6,
        server_rate_bit_per_s=1e6,
    )


def batches(splitter: Splitter, vocabulary: int, steps: int) -> Iterator[list[MicroBatch]]:
    """Random examples."""
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        step = []
        for _ in range(COUNT):
            ids = torch.randint(3, vocabulary, (SIZE, TOKENS), generator=random)
            labels = torch.randint(0, 4, (SIZE,), generator=random)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
            context, weight = splitter.context(batch), splitter.weight_of(batch)
            step.append(MicroBatch(inputs=batch, context=context, weight=weight))
        yield step


def measured(
    sizes: dict[str, int], vocabulary: int, intervals: int, shares: tuple[float, ...]
) -> dict[str, Any]:
    """Seconds of so many intervals by share; raises RuntimeError where an audit finds a liar."""
    splitter = splitter_of(sizes, vocabulary)
    shape = BatchShape(source_length=TOKENS, target_length=1)
    known = Recovery(profile=profile(), model=lambda: profile_model(splitter, shape))
    rule = OptimizerConfig(name="adamw", learning_rate=1e-4)
    order = TrainingOrder(
        plan=make_plan("A", spread_evenly(splitter.num_blocks, DEVICES), size=SIZE, count=COUNT),
        weights=splitter.initial_weights(seed=0),
        learning=LearningSettings(optimizer=rule, snapshot_every=STEPS),
        dropout_seed=1,
    )
    found = {}
    for share in (shares[0], *shares):  # the first warms up
        recovery._draw = Evenly(share)  # type: ignore[assignment]
        asked = replace(order, learning=replace(order.learning, audit_share=share))
        pipeline = RecoveringPipeline(splitter, asked, ThreadFleet(ThreadEdge()), known)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        pipeline.run(batches(splitter, vocabulary, STEPS * intervals))
        told = {"wall_s": time.perf_counter() - start_s}
        told["cpu_s"] = time.process_time() - start_cpu_s
        if pipeline.incidents:
            raise RuntimeError(f"a false alarm: {pipeline.incidents[0]}")
        found[f"{share:g}"] = told
    return {"intervals": intervals, "steps": STEPS, "shares": found}


def table(told: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    none, steps = told["shares"]["0"]["cpu_s"], told["intervals"] * told["steps"]
    lines = [["`trust.audit-share`", "processor seconds per step", "more"], ["---:"] * 3]
    for share, taken in told["shares"].items():
        name = "0, all noted" if share == "1e-09" else share
        more = f"{100 * (taken['cpu_s'] / none - 1):+.1f} %"
        lines.append([name, f"{taken['cpu_s'] / steps:.3f}", more])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python benchmarks/audits.py [--table] FILE.json")
    target = Path(sys.argv[-1])
    if sys.argv[1] != "--table":
        torch.set_num_threads(1)
        told = measured(MINILM, 30522, INTERVALS, SHARES)
        target.write_text(json.dumps(told, indent=1) + "\n")
    print(table(json.loads(target.read_text())))
