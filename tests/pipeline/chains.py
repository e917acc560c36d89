"""Small models cut into parts, and chains of stages in threads, for the laws of the pipeline."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import CollaPipeError
from collapipe_flwr.pipeline.config import StageConfig
from collapipe_flwr.pipeline.link import Link, make_memory_pair
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.roles import FirstStage, LastStage, MiddleStage
from collapipe_flwr.pipeline.stage import Stage
from collapipe_flwr.pipeline.step import MicroBatch

WIDTH, CLASSES, VOCABULARY = 16, 5, 23
DEADLINE_S = 120.0  # long: whatever ends within half of it was not ended by it
SGD = OptimizerConfig(name="sgd", learning_rate=0.5, weight_decay=0.0)
# The true gradient of attention key biases is 0; a large eps keeps Adam from scaling its noise up.
ADAMW = OptimizerConfig(learning_rate=1e-2, eps=1e-3)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.table(inputs["input_ids"])


class Segment(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.load_state_dict(weights)

    def forward(self, hidden_BTD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        padding = context["attention_mask"] == 0
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD, src_key_padding_mask=padding)
        return hidden_BTD


class Head(nn.Module):
    """Token classification: the mean runs over labelled tokens, so weights differ."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden_BTD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        logits = self.out(hidden_BTD)
        return nn.functional.cross_entropy(logits.flatten(0, 1), context["labels"].flatten())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.load_state_dict(weights)

    def weight_of(self, context: Mapping[str, Tensor]) -> int:
        return int((context["labels"] != -100).sum())


def make_blocks(count: int) -> list[nn.Module]:
    return [
        nn.TransformerEncoderLayer(
            WIDTH, 2, dim_feedforward=32, dropout=0.0, batch_first=True, activation="gelu"
        )
        for _ in range(count)
    ]


def make_parts(cut: Sequence[int], seed: int = 0) -> list[nn.Module]:
    """Embedding, one segment per entry of `cut` (its number of blocks), head."""
    torch.manual_seed(seed)
    return [Embedding(), *(Segment(make_blocks(n)) for n in cut), Head()]


def make_batch(sizes: Sequence[int], seed: int = 1) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    return [_micro_batch(size, generator) for size in sizes]


def _micro_batch(size: int, generator: torch.Generator) -> MicroBatch:
    ids = torch.randint(0, VOCABULARY, (size, 7), generator=generator)
    labels = torch.randint(0, CLASSES, (size, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    labels[mask == 0] = -100
    context = {"attention_mask": mask, "labels": labels}
    return MicroBatch(
        inputs={"input_ids": ids}, context=context, weight=int((labels != -100).sum())
    )


def joined(batch: Sequence[MicroBatch]) -> MicroBatch:
    def cat(which: str, name: str) -> Tensor:
        return torch.cat([getattr(m, which)[name] for m in batch])

    return MicroBatch(
        inputs={"input_ids": cat("inputs", "input_ids")},
        context={n: cat("context", n) for n in ("attention_mask", "labels")},
        weight=sum(m.weight for m in batch),
    )


def whole_loss(parts: Sequence[nn.Module], batch: Sequence[MicroBatch]) -> Tensor:
    """The unsplit model on the whole batch in one pass."""
    one = joined(batch)
    hidden = parts[0](one.inputs)
    for part in parts[1:]:
        hidden = part(hidden, one.context)
    return hidden


def settings(name: str, schedule: str = "gpipe", depth: int = 1, **more: float) -> StageConfig:
    return StageConfig(
        name=name,
        schedule=schedule,
        depth=depth,
        **{"deadline_s": DEADLINE_S, "idle_s": DEADLINE_S, **more},
    )


class Chain:
    """Control unit in the calling thread, all other stages in threads."""

    def __init__(self, parts: Sequence[nn.Module], make_settings, rule=SGD) -> None:
        self.failures: dict[str, BaseException] = {}
        names = ["control unit", *(f"device {i}" for i in range(1, len(parts) - 1)), "edge"]
        pairs = [make_memory_pair(a, b) for a, b in itertools.pairwise(names)]
        self.links: list[Link] = [end for pair in pairs for end in pair]
        stages: list[Stage] = []
        for i, part in enumerate(parts):
            up = pairs[i - 1][1] if i else None
            down = pairs[i][0] if i < len(pairs) else None
            role = {None: LastStage}.get(down, MiddleStage) if up else FirstStage
            links = {"upstream": up, "downstream": down}
            kept = {k: v for k, v in links.items() if v is not None}
            optimizer = Optimizer(rule, part.named_parameters())
            stages.append(role(part, optimizer, make_settings(names[i], i, len(parts)), **kept))
        self.first: FirstStage = stages[0]  # type: ignore[assignment]
        self.stages = stages
        self.threads = [threading.Thread(target=self._serve, args=(s,)) for s in stages[1:]]

    def _serve(self, stage) -> None:
        try:
            stage.serve()
        except (CollaPipeError, RuntimeError) as error:
            self.failures[stage.settings.name] = error

    @contextmanager
    def running(self) -> Iterator[FirstStage]:
        for thread in self.threads:
            thread.start()
        try:
            yield self.first
            self.first.finish()
            self.join()
        finally:
            for link in self.links:
                link.close()
            self.join()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(timeout=DEADLINE_S)
            assert not thread.is_alive()


def classic(schedule: str):
    """Settings with the classic warm-up depth of 1F1B: stages minus index."""
    return lambda name, index, stages: settings(name, schedule, stages - index)
