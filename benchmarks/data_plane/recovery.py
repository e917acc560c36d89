"""How long it takes to notice that a device process was killed, and to train on without it.

Real daemons on loopback: devices and edge are ``collapipe device`` and ``collapipe edge``, one
process each. One of them gets a signal in the middle of a round.
"""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import child_environment
from benchmarks.plans import make_plan, spread_evenly
from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.hosted import HostedEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.profile import profile_cluster
from collapipe_flwr.cluster.recovery import Recovery
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterConfig, parse_cluster
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.core.links import Heartbeat
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.step import MicroBatch

START_S, STOP_S = 120.0, 10.0
SPARE_S = 1.0  # for an edge, where there is another
_ID = "recovery"
_VOCABULARY, _LENGTH, _LABELS = 50, 16, 4


class Daemon:
    """One host as a process; ``address`` is where it listens."""

    def __init__(
        self,
        command: str,
        *options: str,
        listen: str = "127.0.0.1:0",
        program: str = "collapipe_flwr.cli.child",
    ) -> None:
        self._words = " ".join((command, "--listen", listen, "--grace-s", "0", *options))
        words = [sys.executable, "-m", program, *self._words.split()]
        env = {**child_environment(), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = ""

    def wait_until_it_listens(self) -> None:
        """Raises RunError when it ends or says nothing."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(START_S) else ""
        if not line:
            raise RunError(f"a daemon did not start within {START_S:g} s: {self._words}")
        self.address = line.split()[-1]

    def stop(self) -> None:
        """Kill it, also when it is suspended."""
        self.process.kill()
        self.process.wait(STOP_S)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@contextmanager
def daemons(count: int) -> Iterator[tuple[list[Daemon], Daemon]]:
    """Device processes and an edge process while the body runs."""
    with ExitStack() as stack:
        names = [f"d{index}" for index in range(count)]
        devices = [_started(stack, Daemon("device", "--name", name)) for name in names]
        edge = _started(stack, Daemon("edge"))
        for daemon in (*devices, edge):
            daemon.wait_until_it_listens()
        yield devices, edge


def _started(stack: ExitStack, daemon: Daemon) -> Daemon:
    stack.callback(daemon.stop)
    return daemon


def cluster_of(devices: Sequence[Daemon], edge: Daemon) -> ClusterConfig:
    """The cluster file of these processes."""
    members = [{"name": f"d{n}", "address": daemon.address} for n, daemon in enumerate(devices)]
    table = {"id": _ID, "device": members, "edge": {"address": edge.address}}
    return parse_cluster(table, Path())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A round to disturb: model, first weights, plan and batches."""

    splitter: Splitter
    weights: Mapping[str, Tensor]
    plan: ClusterPlan
    steps: int
    deadline_s: float = 20.0
    snapshot_every: int = 0
    heartbeat: Heartbeat | None = None
    dropout_seed: int | None = 1

    @property
    def rule(self) -> OptimizerConfig:
        """The optimiser."""
        return OptimizerConfig(name="adamw", learning_rate=1e-2)

    def order(self) -> TrainingOrder:
        """What the control unit is asked."""
        return TrainingOrder(
            plan=self.plan,
            weights=self.weights,
            learning=LearningSettings(
                optimizer=self.rule,
                deadline_s=self.deadline_s,
                snapshot_every=self.snapshot_every,
            ),
            dropout_seed=self.dropout_seed,
        )

    def batches(self) -> Iterator[list[MicroBatch]]:
        """Random examples, the same each time."""
        for step in range(self.steps):
            yield [_micro_batch(self.splitter, 10 * step + index) for index in range(2)]


def small_job(devices: int, *, steps: int = 6, blocks: int = 6) -> Job:
    """A small classifier with dropout, its blocks spread evenly."""
    spec = make_spec(
        "sequence-classification",
        model_type="bert",
        overrides={
            "hidden_size": 32,
            "num_hidden_layers": blocks,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 2 * _LENGTH,
        },
        vocab_size=_VOCABULARY,
        pad_token_id=0,
        num_labels=_LABELS,
    )
    splitter = Splitter(spec)
    return Job(
        splitter=splitter,
        weights=splitter.initial_weights(seed=1),
        plan=make_recovery_plan(spread_evenly(blocks, devices), steps),
        steps=steps,
    )


def make_recovery_plan(stops: Sequence[int], steps: int) -> ClusterPlan:
    """Plan two micro-batches of four examples for blocks up to each of ``stops``."""
    return make_plan(_ID, stops, size=4, count=2, steps=steps)


def _micro_batch(splitter: Splitter, seed: int) -> MicroBatch:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, _VOCABULARY, (4, _LENGTH), generator=rng)
    labels = torch.randint(0, _LABELS, (4,), generator=rng)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return MicroBatch(inputs=batch, context=splitter.context(batch), weight=4)


def run_job(
    job: Job, cluster: ClusterConfig, batches: Iterator[list[MicroBatch]] | None = None
) -> tuple[ClusterResult, dict[str, Tensor]]:
    """One round on the daemons; the result, and its weights."""
    recovery = Recovery(
        profile=profile_cluster(cluster, 8 * job.steps),
        model=lambda: profile_model(
            job.splitter, BatchShape(source_length=_LENGTH, target_length=1)
        ),
    )
    several = bool(cluster.other_edges)
    edges = {
        edge.name if several else "": HostedEdge(
            address=edge.address,
            deadline_s=job.deadline_s,
            patience_s=SPARE_S if several else START_S,
            heartbeat=job.heartbeat,
        )
        for edge in cluster.edges
    }
    fleet = RemoteFleet(
        cluster=cluster, edges=edges, deadline_s=job.deadline_s, heartbeat=job.heartbeat
    )
    result = train_round(
        job.splitter, job.order(), batches or job.batches(), fleet, recovery=recovery
    )
    return result, dict(result.weights)


def measure_recovery(devices: int = 3) -> dict[str, float]:
    """Seconds from SIGKILL of the second device: until it is noticed (``detect_s``), and until the
    first replayed step is done on the new plan (``resume_s``). Raises RunError if nothing broke.
    """
    job = small_job(devices)
    with daemons(devices) as (hosts, edge):
        killed_s = 0.0

        def batches() -> Iterator[list[MicroBatch]]:
            nonlocal killed_s
            for index, batch in enumerate(job.batches()):
                if index == job.steps // 2:
                    killed_s = time.monotonic()
                    hosts[1].process.send_signal(signal.SIGKILL)
                yield batch

        result, _ = run_job(job, cluster_of(hosts, edge), batches())
    if not result.incidents:
        raise RunError("a device was killed and nobody noticed")
    incident = result.incidents[0]
    return {
        "detect_s": incident.noticed_s - killed_s,
        "resume_s": incident.resumed_s - killed_s,
    }
