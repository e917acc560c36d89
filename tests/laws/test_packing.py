"""Law: conversations that share rows are learned as if each had its own, however they are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.instruct import Instruct
from collapipe_flwr.models.splitter import Splitter
from tests.closeness import assert_near, near
from tests.generation.test_backends import lively
from tests.models.conftest import Tiny
from tests.rounds import SGD, Cut, largest_difference, train_split, train_whole
from tests.thorough import few

LENGTHS = (9, 3, 5, 4, 7, 2)
LIMIT = 12  # the windows of the models are shorter than a conversation
CUT = Cut(stops=(1, 4), micro_batches=(4, 2))
TYPES = ("gpt2", "llama", "gemma", "olmo2", "mistral", "phi3", "qwen2", "qwen3", "smollm3")


def conversations() -> list[dict[str, list[int]]]:
    """A question and its answer each; the first token of the last one would be a target, too."""
    random = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 50, (length,), generator=random).tolist() for length in LENGTHS]
    asked = [[-100] * (len(ids) // 2) + ids[len(ids) // 2 :] for ids in rows[:-1]]
    return [{"ids": i, "labels": n} for i, n in zip(rows, [*asked, rows[-1]], strict=True)]


def collate(examples: list[Any], *, pack: bool) -> dict[str, Tensor]:
    task = Instruct(DataConfig(task="instruct", tokenizer="-", max_source_length=LIMIT, pack=pack))
    task.__dict__["tokenizer"] = SimpleNamespace(pad_token_id=0)
    return task.collate_for(examples, 0)


def test_every_token_and_target_is_in_the_rows_once() -> None:
    examples = conversations()
    packed, padded = collate(examples, pack=True), collate(examples, pack=False)
    assert packed["input_ids"].shape == (3, 11) and padded["input_ids"].shape == (6, 9)
    shown = packed["input_ids"][packed["input_ids"] > 0]
    assert sorted(shown.tolist()) == sorted(id for each in examples for id in each["ids"])
    targets = [batch["labels"][:, 1:] for batch in (packed, padded)]
    assert len({int((labels != -100).sum()) for labels in targets}) == 1
    starts = packed["position_ids"] == 0
    assert (packed["labels"][starts] == -100).all()
    assert int((starts & (packed["input_ids"] > 0)).sum()) == len(LENGTHS)


@pytest.mark.parametrize("model_type", few([*TYPES, "gemma3_text"], 0, 1, 5, 8, 9))
def test_a_step_of_packed_conversations_is_that_of_padded_ones(model_type: str) -> None:
    splitter = Splitter(Tiny().spec(model_type, "causal-lm"))
    first = splitter.initial_weights(seed=1)
    weights = {key: lively(tensor) for key, tensor in first.items()}
    examples = conversations()
    losses, expected = train_whole(splitter, weights, [[collate(examples, pack=False)]], SGD)
    parts = [collate(part, pack=True) for part in (examples[:4], examples[4:])]
    assert len(parts[0]["input_ids"]) < 4
    found, learned = train_split(splitter, weights, CUT, [parts], SGD)
    assert found == near(losses)
    assert_near(learned, expected)
    for part in parts:
        del part["position_ids"]  # so each reads those before it in its row
    _, wrong = train_split(splitter, weights, CUT, [parts], SGD)
    assert largest_difference(wrong, expected) > 1e-2
