"""What choosing batches by their progress buys in real training: seconds to a target loss.

    python benchmarks/ablation_bound.py --task number-words --seeds 300 301 302 303 304 \\
        --json docs/results/scheduler/ablation-number-words.json

A task is really learnt by a small model: number words to digits by a Marian, or the thousands of
a number in words, a classification, by a BERT. Plans heed progress by the measured noise scale of
gradients, by the convergence bound, or not at all with one small batch prescribed: what somebody
who knew the answer might choose. Worlds, first weights and order of the examples are the same.
The clock is simulated: a round lasts what its plan costs. Where blocks run never changes a gradient
(tests/laws), so each cluster trains the whole model in one piece, on the batches and steps of its
plan. The scheduler learns noise, smoothness and drift from this training, as in a real run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import product
from operator import add
from pathlib import Path
from typing import Any

import torch
from ablation_digits import TEST_ROWS, leading_digits
from ablation_results import TARGETS, compared
from rich.progress import Progress
from torch import Tensor, nn

from collapipe_flwr.cluster.unsplit import evaluate_unsplit
from collapipe_flwr.config.schema import AppConfig, parse
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.measurements import ClusterMeasurement, StageMeasurement
from collapipe_flwr.core.outcome import ClusterOutcome, Movement, RoundOutcome
from collapipe_flwr.costs.price import PricedPlan, price
from collapipe_flwr.data.batches import Example, cut_batches, draw_round_examples
from collapipe_flwr.federation.run.learner import Learner, make_learner
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.pipeline.meter import sum_squares
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.world import make_world, mixed_devices

CLUSTERS, DEVICES, EXAMPLES = 4, 4, 256
BOARDS = ("raspberry-pi-4", "raspberry-pi-5", "jetson-nano", "phone")
MARIAN = (
    "d_model=32 encoder_layers=4 decoder_layers=1 encoder_attention_heads=2 "
    "decoder_attention_heads=2 encoder_ffn_dim=64 decoder_ffn_dim=64 "
    "max_position_embeddings=64 scale_embedding=true init_std=0.05 dropout=0.0"
)
BERT = (
    "hidden_size=32 num_hidden_layers=4 num_attention_heads=2 intermediate_size=64 "
    "max_position_embeddings=64 hidden_dropout_prob=0.0 attention_probs_dropout_prob=0.0"
)
NUMBER_WORDS, LEADING = "number-words", "leading-digit"
MODELS = {NUMBER_WORDS: ("marian", MARIAN), LEADING: ("bert", BERT)}
SIZES, COUNTS = (1, 2, 4, 8, 16), (1, 2, 4, 8)
VARIANTS: dict[str, dict[str, Any]] = {
    "bound": {"progress": "bound"},
    "noise_scale": {"progress": "noise-scale"},
    "small_batch": {"bound": False, "micro_batch_sizes": (1,)},
}
TEST_BATCH = 128
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How to train: one optimiser for both variants."""

    task: str
    optimizer: OptimizerConfig
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """After a round: the clock, the test loss, and what was planned."""

    seconds: float
    test_loss: float
    batch_mean: float
    steps_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Locally:
    """One cluster's round: its weights as one vector, and what it measured."""

    weights: Tensor
    told: ClusterMeasurement


class Fleet:
    """All clusters' data and the one model that they take turns to train."""

    def __init__(self, seed: int, task_name: str) -> None:
        self.folder = tempfile.TemporaryDirectory()  # read when examples are first asked for
        self.seed, self.learner = seed, learner(seed, task_name, Path(self.folder.name))
        task = self.learner.task
        self.parts = [task.partition(m, CLUSTERS) for m in range(CLUSTERS)]
        weights = self.learner.splitter.initial_weights(seed)
        self.model: nn.Module = self.learner.splitter.build_whole(weights)
        self.vector = flat(self.model)
        rows = [dict(row) for row in task.test]
        self.test = [[task.collate(chunk)] for chunk in cut_batches(rows, TEST_BATCH)]

    def test_loss(self) -> float:
        """Mean over the test set's tokens."""
        put(self.model, self.vector)
        return evaluate_unsplit(self.learner.splitter, self.model, self.test).loss

    def train(self, m: int, plan: ClusterPlan, index: int, rule: OptimizerConfig) -> Locally:
        """The steps of cluster ``m`` from the common weights."""
        put(self.model, self.vector)
        optimizer = Optimizer(rule, self.model.named_parameters())
        steps = [
            self._step(examples, plan.micro_batch_size, optimizer)
            for examples in self._steps(m, plan, index)
        ]
        told = ClusterMeasurement(
            cluster_id=plan.cluster_id,
            examples=EXAMPLES,
            wall_s=0.0,
            losses=tuple(loss for loss, _ in steps),
            reports=(StageMeasurement(name=plan.member_ids[0]),),
            edge=reduce(add, (report for _, report in steps)),
        )
        return Locally(weights=flat(self.model), told=told)

    def _step(
        self, examples: list[Example], size: int, optimizer: Optimizer
    ) -> tuple[float, StageMeasurement]:
        """One optimiser step: its loss, and the gradients of its first micro-batch and of all.

        The first micro-batch, then the rest at once: the same gradient as micro-batch by
        micro-batch (tests/laws), and both norms on the way.
        """
        parts = [part for part in (examples[:size], examples[size:]) if part]
        micro_batches = [self.learner.task.collate(part) for part in parts]
        counts = [self.learner.splitter.weight_of(m) for m in micro_batches]
        losses, squares = [], []
        for micro_batch, count in zip(micro_batches, counts, strict=True):
            loss = self.model(**micro_batch).loss * (count / sum(counts))
            loss.backward()
            losses.append(float(loss.detach()))
            gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
            squares.append(sum_squares(gradients))
        optimizer.step()
        optimizer.zero_grad()
        total, first = float(sum(counts)), float(counts[0])
        return sum(losses), StageMeasurement(
            name="edge",
            steps=1,
            small_square_norm=squares[0] * (total / first) ** 2,
            small_weight=first,
            small_squares=first**2,
            big_square_norm=squares[-1],
            big_weight=total,
            big_squares=total**2,
        )

    def _steps(self, m: int, plan: ClusterPlan, index: int) -> Iterator[list[Example]]:
        rows = draw_round_examples(
            self.parts[m], seed=self.seed, rounds_done=index - 1, cluster_id=m, limit=EXAMPLES
        )
        yield from cut_batches(rows, plan.micro_batch_size * plan.micro_batches)


def learner(seed: int, task: str, folder: Path) -> Learner:
    """The task with a small model; ``folder`` is for its data."""
    config: AppConfig = parse({})
    kind, overrides = MODELS[task]
    data = replace(config.data, test_examples=TEST_ROWS)
    if task == LEADING:
        train, test = leading_digits(folder, seed)
        data = replace(data, task="classification", train=str(train), test=str(test))
    return make_learner(
        replace(
            config,
            run=replace(config.run, seed=seed),
            model=replace(config.model, type=kind, overrides=overrides),
            data=data,
        )
    )


def flat(model: nn.Module) -> Tensor:
    """All trained weights as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def put(model: nn.Module, vector: Tensor) -> None:
    """The inverse of ``flat``."""
    at = 0
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.requires_grad):
            p.copy_(vector[at : at + p.numel()].reshape(p.shape))
            p.grad = None
            at += p.numel()


class Run:
    """One variant's training: the fleet, the scheduler and the simulated clock."""

    def __init__(self, seed: int, variant: str, training: Training) -> None:
        self.fleet, self.training = Fleet(seed, training.task), training
        self.model = profile_model(self.fleet.learner.splitter, self.fleet.learner.shape)
        self.world = make_world(
            cluster_devices=mixed_devices(CLUSTERS, DEVICES, seed, BOARDS),
            examples=[EXAMPLES] * CLUSTERS,
            channel="block-fading",
            seed=seed,
        )
        settings = SchedulerConfig(
            micro_batch_sizes=SIZES,
            micro_batches=COUNTS,
            learning_rate=training.optimizer.learning_rate,
            schedule="1f1b",
        )
        self.settings = replace(settings, **VARIANTS[variant])
        self.scheduler = make_scheduler("dssda", self.settings)
        self.state = self.scheduler.init(self.world.snapshot(1, self.model))
        self.seconds, self.last = 0.0, torch.zeros(0)

    def rounds(self) -> Iterator[Round]:
        """Train until the last target or the last round; the first entry is the untrained model."""
        first = self.fleet.test_loss()
        yield Round(seconds=0.0, test_loss=first, batch_mean=0.0, steps_mean=0.0)
        for index in range(1, self.training.rounds + 1):
            done = self._round(index)
            yield done
            if done.test_loss <= TARGETS[-1] * first:
                return

    def _round(self, index: int) -> Round:
        snapshot = self.world.snapshot(index, self.model)
        plan, self.state = self.scheduler.step(self.state, snapshot)
        priced = price(plan, snapshot, self.settings)
        rule = self.training.optimizer
        told = [self.fleet.train(m, c, index, rule) for m, c in enumerate(plan.clusters)]
        outcome = self._aggregated(priced, told, index)
        self.state = self.scheduler.observe(self.state, plan, outcome)
        self.seconds += priced.latency_s
        count = len(plan.clusters)
        return Round(
            seconds=self.seconds,
            test_loss=self.fleet.test_loss(),
            batch_mean=sum(c.micro_batch_size * c.micro_batches for c in plan.clusters) / count,
            steps_mean=sum(c.local_steps for c in plan.clusters) / count,
        )

    def _aggregated(self, priced: PricedPlan, told: list[Locally], index: int) -> RoundOutcome:
        """Average the clusters (equal examples each); what the scheduler may learn from it."""
        mean = torch.stack([t.weights for t in told]).mean(0)
        update, last = mean - self.fleet.vector, self.last
        self.fleet.vector, self.last = mean, update
        clusters = tuple(
            ClusterOutcome(
                cluster_id=c.cluster_id,
                latency_s=c.latency_s,
                energy_j=c.energy_j,
                loss=t.told.loss,
                gradient_noise=t.told.gradient_noise,
            )
            for c, t in zip(priced.clusters, told, strict=True)
        )
        return RoundOutcome(
            round_index=index,
            latency_s=priced.latency_s,
            clusters=clusters,
            movement=Movement(
                norm=float(update.norm()),
                change_norm=float((update - last).norm()) if len(last) else None,
                spread=sum(float((t.weights - mean).norm() ** 2) for t in told) / len(told),
            ),
        )


def reached(rounds: list[Round], share: float) -> float | None:
    """Simulated seconds until the test loss first is at most ``share`` of the untrained one."""
    limit = share * rounds[0].test_loss
    return next((r.seconds for r in rounds if r.test_loss <= limit), None)


def summary(rounds: list[Round], cpu_s: float) -> dict[str, object]:
    """One run in plain data."""
    return {
        "time_to_target_s": {str(share): reached(rounds, share) for share in TARGETS},
        "rounds": len(rounds) - 1,
        "seconds": rounds[-1].seconds,
        "first_loss": rounds[0].test_loss,
        "last_loss": rounds[-1].test_loss,
        "batch_mean": sum(r.batch_mean for r in rounds[1:]) / (len(rounds) - 1),
        "round_s_mean": rounds[-1].seconds / (len(rounds) - 1),
        "cpu_s": cpu_s,
        "curve": [asdict(r) for r in rounds],
    }


def measure(seeds: list[int], training: Training, path: Path) -> None:
    """All variants for every seed that ``path`` has not yet; it is written anew after each."""
    asked: dict[str, Any] = {
        "clusters": CLUSTERS,
        "devices": DEVICES,
        "examples_per_round": EXAMPLES,
        "model": MODELS[training.task],
        "micro_batch_sizes": SIZES,
        "micro_batches": COUNTS,
        "targets": TARGETS,
        "training": asdict(training),
        "seeds": {},
    }
    result = resumed(path, json.loads(json.dumps(asked)))
    with Progress() as progress:
        for seed, name in product(seeds, VARIANTS):
            runs = result["seeds"].setdefault(str(seed), {})
            if name in runs:
                continue
            bar = progress.add_task(f"seed {seed} {name}", total=training.rounds)
            started, rounds = time.process_time(), []
            for done in Run(seed, name, training).rounds():
                rounds.append(done)
                text = f"seed {seed} {name} loss {done.test_loss:.2f}"
                progress.update(bar, completed=len(rounds) - 1, description=text)
            runs[name] = summary(rounds, time.process_time() - started)
            path.write_text(json.dumps(compared(result, tuple(VARIANTS)), indent=1) + "\n")
    path.write_text(json.dumps(compared(result, tuple(VARIANTS)), indent=1) + "\n")


def resumed(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What ``path`` holds of the same experiment, else ``asked`` with nothing measured."""
    if not path.exists():
        return asked
    found: dict[str, Any] = json.loads(path.read_text())
    same = all(found.get(key) == value for key, value in asked.items() if key != "seeds")
    if not same:
        raise SystemExit(f"{path} holds another experiment: name a new file")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--task", choices=tuple(MODELS), default=NUMBER_WORDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[300, 301, 302, 303, 304])
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rule = OptimizerConfig(
        name=options.optimizer, learning_rate=options.learning_rate, weight_decay=0.0
    )
    training = Training(task=options.task, optimizer=rule, rounds=options.rounds)
    measure(options.seeds, training, options.json)


if __name__ == "__main__":
    main()
