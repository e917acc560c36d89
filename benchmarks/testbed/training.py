"""What is trained on the testbed: the same by every policy.

Blocks and budgets are those of preset `paper` of `collapipe simulate`, the memory cap is that of
runs; the width is smaller, since these boards are processes of one host. The batch is the same for
all policies, so a step computes the same for all, and the time to a target differs by the length of
rounds alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.testbed.bed import Values
from collapipe_flwr.config.parsing import override, read_overrides
from collapipe_flwr.config.schema import AppConfig, flatten, parse
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.data.seq2seq import spell
from collapipe_flwr.scheduler.policies import POLICIES

METRIC = "accuracy"
WIDTH = 256
BLOCKS = 12
NUMBERS = 7  # in a text, about fifty tokens
TRAIN_ROWS, TEST_ROWS = 4000, 128
BATCH = 64  # examples of a step, by every policy: all take the same steps
GRID = "1,2,4,8,16,32,64"  # how many of them in a micro-batch, and how many micro-batches
VOCABULARY = 384  # at most, of the tokenizer that is trained
BASE = "base"
MODEL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained, and by whom the rounds are planned; the same terms for all ``policies``.

    A policy is a name, which options may follow: ``dssda links.codec=int8``.
    Repetition r has seed ``seed`` + r for data, first weights, order of the examples and world.
    """

    policies: tuple[str, ...] = ("dssda", "fedavg", "splitfed", "uniform", "throughput")
    rounds: int = 5
    repetitions: int = 2
    seed: int = 500
    examples: int = 256  # of a cluster in a round
    target: float = 0.7  # of the metric
    learning_rate: float = 5e-4
    energy_share: float = 0.3  # budget: of what a device spends on training all blocks alone
    timeline: bool = False  # of every stage
    options: str = ""  # KEY=VALUE, of all policies: another task, another model
    loss: float = 0.0  # share of packets that get lost

    @property
    def seeds(self) -> tuple[int, ...]:
        """One for each repetition."""
        return tuple(range(self.seed, self.seed + self.repetitions))

    def run_config(self, policy: str, seed: int, path: Path) -> Values:
        """All keys, for a run directory at ``path`` beside the data.

        Policies differ in ``scheduler.policy`` and their options alone.
        """
        name, *options = policy.split(maxsplit=1)
        data = data_folder(path.parent, seed)
        ours: Values = {
            "num-server-rounds": self.rounds,
            "seed": seed,
            "output-dir": str(path.parent),
            "run-name": path.name,
            "checkpoint-every": 0,
            "data.task": "classification",
            "data.train": str(data / "train.jsonl"),
            "data.test": str(data / "test.jsonl"),
            "data.vocab-size": VOCABULARY,
            "model.type": "bert",
            "model.overrides": " ".join(f"{key}={value}" for key, value in MODEL.items()),
            "train.learning-rate": self.learning_rate,
            "train.decay": "none",
            "train.examples-per-round": self.examples,
            "train.timeline": self.timeline,
            "scheduler.policy": name,
            "scheduler.micro-batch-sizes": GRID,
            "scheduler.micro-batches": GRID,
            "world.channel": "static",  # cables
            "world.energy-share": self.energy_share,
            "edge.timeout-s": 120.0,
            "edge.heartbeat-s": 10.0,
        }
        declared = {**flatten(AppConfig()), **ours}
        asked = [words for words in (self.options, *options) if words]
        values = override(declared, read_overrides(asked, declared))
        drawn = values["lora.rank"] and not values["model.pretrained"]
        return {**values, "model.pretrained": str(data / BASE)} if drawn else values


def read_policies(text: str, options: str = "") -> tuple[str, ...]:
    """Policies with ``,`` between them; raises ConfigError for unknown ones and wrong options.

    ``options`` are those of all.
    """
    policies = tuple(policy.strip() for policy in text.split(","))
    for policy in policies:
        name = policy.partition(" ")[0]
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ConfigError(f"--policies: unknown policy {name!r}, choose some of {known}")
        parse(Training(options=options).run_config(policy, 0, Path("FOLDER/RUN")))
    return policies


def turns(training: Training) -> Iterator[tuple[str, int]]:
    """Policy and seed; every repetition begins with another policy, so that none always follows."""
    for repetition, seed in enumerate(training.seeds):
        at = repetition % len(training.policies)
        for policy in (*training.policies[at:], *training.policies[:at]):
            yield policy, seed


def data_folder(folder: Path, seed: int) -> Path:
    """Where `write_data` puts the rows of a seed."""
    return folder / "data" / str(seed)


def write_data(seeds: Sequence[int], folder: Path) -> None:
    """The task of every seed: lists of numbers in words, which all begin with the same digit.

    Beside it is a drawn model for adapters, which need a checkpoint.
    """
    import torch
    from transformers import BertConfig, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for seed in seeds:
        data_folder(folder, seed).mkdir(parents=True)
        torch.manual_seed(seed)
        BertModel(BertConfig(vocab_size=VOCABULARY, **MODEL)).save_pretrained(
            data_folder(folder, seed) / BASE
        )
        rng = random.Random(seed)
        by_digit = [
            rng.sample(range(first, first + 1000), 1000) for first in range(0, 10_000, 1000)
        ]
        held_out = slice(None, 100), slice(100, None)  # numbers of the test are in no training text
        for name, count, part in zip(
            ("test", "train"), (TEST_ROWS, TRAIN_ROWS), held_out, strict=True
        ):
            parts = [numbers[part] for numbers in by_digit]
            rows = [_row(rng, parts) for _ in range(count)]
            path = data_folder(folder, seed) / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _row(rng: random.Random, by_digit: Sequence[Sequence[int]]) -> dict[str, str]:
    digit = rng.randrange(10)
    numbers = rng.sample(by_digit[digit], NUMBERS)
    return {"text": ", ".join(map(spell, numbers)), "label": f"d{digit}"}
