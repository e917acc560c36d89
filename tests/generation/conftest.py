"""Run directories with small models that write text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.data.tokenizer import train_tokenizer
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.saving import save_whole
from collapipe_flwr.models.splitter import Splitter
from tests.chats import chat_tokenizer
from tests.generation.test_backends import GPT2, SEQ2SEQ, lively

TEXTS = ["the cat sat", "on a mat", "and saw a bird — ünïcödé"]


def save(
    folder: Path, task: str, model_type: str, overrides: dict[str, Any], tokenizer: Any = None
) -> Path:
    """A run directory with a model of lively weights and its own tokenizer."""
    tokenizer = tokenizer or train_tokenizer(TEXTS * 3, vocab_size=280, starts_with_bos=False)
    spec = make_spec(
        task,
        model_type=model_type,
        overrides=overrides,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id if task == "seq2seq" else None,
    )
    first = Splitter(spec).initial_weights(5)
    save_whole(spec, {k: lively(t) for k, t in first.items()}, folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="session")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("marian"), "seq2seq", "marian", SEQ2SEQ)


@pytest.fixture(scope="session")
def storyteller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("gpt2"), "causal-lm", "gpt2", GPT2)


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers messages, at length."""
    folder = tmp_path_factory.mktemp("talker")
    return save(folder, "causal-lm", "gpt2", {**GPT2, "n_positions": 256}, chat_tokenizer())
