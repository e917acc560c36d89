"""Time to a test loss with one cluster five times slower: waiting, dropping, joining late.

    python benchmarks/late_updates.py docs/results/late-updates.json
    python benchmarks/late_updates.py --table docs/results/late-updates.json   # what was measured

Three clusters train a classifier of ten classes by FedAvg through `CollaPipe`, each in a thread
that takes real seconds; four of five examples of a cluster are of classes of its own, so that the
slow one's are missed. All is as in a run but the training itself, which costs nothing here:
deadlines, late replies, plans and weights. ``drop`` closes rounds when ``join`` does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from collapipe_flwr import CollaPipe
from collapipe_flwr.core.measurements import ClusterMeasurement
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.late import RoundDeadline
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.members import ClusterGrid
from collapipe_flwr.federation.records import EXAMPLES, write_telemetry

WAYS = {"wait": ("drop", 0.0), "drop": ("drop", 1.5), "join": ("join", 1.5)}
SEEDS = (11, 12, 13, 14, 15)
TARGET, SECONDS_LIMIT, ROUNDS = 0.6, 60.0, 1000
TRAIN_S, SLOWER = 0.2, 5.0  # of a round of the two fast clusters; the third's is so much longer
CLASSES, FEATURES, COUNT, STEPS, RATE = 10, 32, 600, 5, 0.05
OWN = ((0, 1, 2), (3, 4, 5), (6, 7, 8, 9))
_LOOK_S = 0.01


class Reached(Exception):
    """The loss is reached."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Normal clouds around ten centres."""

    seed: int

    def draw(self, shares: Tensor, count: int, salt: int) -> tuple[Tensor, Tensor]:
        """Examples (count, FEATURES) and their classes (count,)."""
        centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(self.seed))
        rng = torch.Generator().manual_seed(1000 * self.seed + salt)
        labels = torch.multinomial(shares, count, replacement=True, generator=rng)
        return 0.6 * centres[labels] + torch.randn(count, FEATURES, generator=rng), labels

    def share_of(self, cluster: int) -> tuple[Tensor, Tensor]:
        """A cluster's training set: one example of five is of any class."""
        shares = torch.full((CLASSES,), 0.2 / CLASSES)
        shares[list(OWN[cluster])] += 0.8 / len(OWN[cluster])
        return self.draw(shares, COUNT, salt=cluster + 1)


@dataclass(frozen=True, slots=True)
class Client:
    """Trains as long as a board would."""

    cluster: int
    data: tuple[Tensor, Tensor]

    def __call__(self, message: Message, context: Context) -> Message:
        """A reply after the seconds that it takes."""
        seconds = TRAIN_S * (SLOWER if self.cluster == len(OWN) - 1 else 1.0)
        time.sleep(seconds)
        name, arrays = next(iter(message.content.array_records.items()))
        weight = decode_tensors(arrays)["weight"].requires_grad_()
        inputs, labels = self.data
        for _ in range(STEPS):
            loss = torch.nn.functional.cross_entropy(inputs @ weight, labels)
            (gradient,) = torch.autograd.grad(loss, weight)
            weight = (weight - RATE * gradient).detach().requires_grad_()
        metrics = MetricRecord({"loss": float(loss.detach()), EXAMPLES: COUNT})
        content = RecordDict(
            {name: encode_tensors({"weight": weight.detach()}), "metrics": metrics}
        )
        told = ClusterMeasurement(
            cluster_id=f"node-{context.node_id}", examples=COUNT, wall_s=seconds, losses=()
        )
        return Message(write_telemetry(content, told), reply_to=message)


class ThreadGrid(LocalGrid):
    """Nodes that answer side by side, and late where they take longer than there is time."""

    def __init__(self, nodes: dict[int, Client]) -> None:
        super().__init__(dict(nodes))
        self._pool = ThreadPoolExecutor(len(nodes))
        self._answers: dict[str, Future[Message]] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver; nodes answer when they are done."""
        ids = []
        for message in messages:
            name = f"message-{len(self.sent) + 1}"
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            self._answers[name] = self._pool.submit(self._answer, message)
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that are there, each once."""
        done = [n for n in message_ids if n in self._answers and self._answers[n].done()]
        return [self._answers.pop(name).result() for name in done]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push, then pull until all are there or it is time."""
        left, replies = self.push_messages(messages), []
        end_s = time.monotonic() + (SECONDS_LIMIT if timeout is None else timeout)
        while left and time.monotonic() < end_s:
            found = self.pull_messages(left)
            replies += found
            answered = {reply.metadata.reply_to_message_id for reply in found}
            left = [name for name in left if name not in answered]
            time.sleep(_LOOK_S)
        return replies

    def close(self) -> None:
        """Wait for all nodes."""
        self._pool.shutdown()


@dataclass(slots=True)
class Judge:
    """Flower's ``evaluate_fn``: ends the run when the loss is reached."""

    test: tuple[Tensor, Tensor]
    started_s: float = field(default_factory=time.monotonic)
    rounds: int = 0

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Raises Reached, also when it takes too long."""
        inputs, labels = self.test
        loss = torch.nn.functional.cross_entropy(inputs @ decode_tensors(arrays)["weight"], labels)
        self.rounds = server_round
        if float(loss) <= TARGET or time.monotonic() - self.started_s > SECONDS_LIMIT:
            raise Reached
        return MetricRecord({"loss": float(loss)})


def seconds_to_target(way: str, seed: int) -> tuple[float, int]:
    """Seconds and rounds; the limit where it is not reached."""
    late, slack = WAYS[way]
    problem = Problem(seed)
    grid = ThreadGrid({n + 1: Client(n, problem.share_of(n)) for n in range(len(OWN))})
    names = {node: f"node-{node}" for node in grid.get_node_ids()}
    clock = RoundDeadline(slack or 1.0, joins_late=bool(slack))
    members = ClusterGrid(grid, names, clock) if slack else grid
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    judge = Judge(problem.draw(torch.full((CLASSES,), 1 / CLASSES), 2000, salt=0))
    start = encode_tensors({"weight": torch.zeros(FEATURES, CLASSES)})
    with suppress(Reached):
        CollaPipe(inner, late=late).start(
            members, start, num_rounds=ROUNDS, timeout=SECONDS_LIMIT, evaluate_fn=judge
        )
    seconds = time.monotonic() - judge.started_s
    grid.close()
    return min(seconds, SECONDS_LIMIT), judge.rounds


def main(target: Path) -> None:
    """Measure all ways, taking turns, and write them."""
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
    for seed in SEEDS:
        for way in WAYS:
            found[way].append(seconds_to_target(way, seed))
    told = {
        way: {
            "seconds": [round(s, 2) for s, _ in runs],
            "rounds": [rounds for _, rounds in runs],
            "median_s": round(median(s for s, _ in runs), 2),
        }
        for way, runs in found.items()
    }
    settings = {"target": TARGET, "slower": SLOWER, "train_s": TRAIN_S, "limit_s": SECONDS_LIMIT}
    target.write_text(json.dumps({**settings, "seeds": SEEDS, "ways": told}, indent=1) + "\n")


def table(source: Path) -> str:
    """What was measured, as Markdown."""
    told = json.loads(source.read_text())
    limit_s = told["limit_s"]
    lines = []
    for way, runs in told["ways"].items():
        taken = (runs["median_s"], min(runs["seconds"]), max(runs["seconds"]))
        middle, least, most = (_seconds(seconds, limit_s) for seconds in taken)
        lines.append(f"| {way} | {middle} | {least} to {most} | {median(runs['rounds']):.0f} |")
    head = "| late clusters | median | of all seeds | rounds |\n|---|---|---|---|"
    return "\n".join([head, *lines])


def _seconds(seconds: float, limit_s: float) -> str:
    return f"{seconds:.1f} s" if seconds < limit_s else f"over {limit_s:.0f} s"


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(table(Path(sys.argv[2])))
    else:
        torch.set_num_threads(1)
        main(Path(sys.argv[1]))
