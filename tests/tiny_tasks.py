"""Every task as a run-config over a tiny data set and a tiny model, for tests of all of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from collapipe_flwr.core.keys import Value
from tests.chats import chat_tokenizer, conversations

BERT = (
    "hidden_size=16 num_hidden_layers=5 num_attention_heads=2 intermediate_size=24 "
    "max_position_embeddings=64 hidden_dropout_prob=0.0 attention_probs_dropout_prob=0.0"
)
GPT2 = "n_embd=16 n_layer=6 n_head=2 n_positions=64 resid_pdrop=0.0 embd_pdrop=0.0 attn_pdrop=0.0"
MARIAN = (
    "d_model=16 encoder_layers=5 decoder_layers=1 encoder_attention_heads=2 dropout=0.0 "
    "decoder_attention_heads=2 encoder_ffn_dim=24 decoder_ffn_dim=24 max_position_embeddings=64"
)
VIT = (
    "hidden_size=16 num_hidden_layers=5 num_attention_heads=2 intermediate_size=24 patch_size=4 "
    "hidden_dropout_prob=0.0 attention_probs_dropout_prob=0.0"
)
WORDS = ["it", "was", "the", "best", "of", "times", "it", "was", "the", "worst", "of", "times"]


TASKS = [
    "classification",
    "token-classification",
    "image-classification",
    "masked-lm",
    "causal-lm",
    "instruct",
    "translation",
    "summarisation",
]


def task_values(task: str, folder: Path) -> dict[str, Value]:
    """A run-config for the task over a tiny data set with examples of 1 .. 12 words."""
    rows = [
        {
            "text": " ".join(WORDS[: 1 + 5 * row % 12]),
            "source": " ".join(WORDS[: 1 + 5 * row % 12]),
            "target": " ".join(WORDS[row % 7 :]),
            "tokens": WORDS[: 1 + 5 * row % 12],
            "tags": ["B-X", *["O"] * (5 * row % 12)],
            "label": ["calm", "wild"][row % 2],
            "image": f"{row % 2}.png",
            "who": f"s{row}",
            **conversations(20)[row],
        }
        for row in range(20)
    ]
    if task == "instruct":
        chat_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for row in range(2):
        grey = np.full((8, 8), 60 + 120 * row, dtype=np.uint8)
        Image.fromarray(grey).save(folder / f"{row}.png")
    model = {
        "causal-lm": ("gpt2", GPT2),
        "instruct": ("gpt2", GPT2),
        "image-classification": ("vit", VIT),
        "translation": ("marian", MARIAN),
        "summarisation": ("marian", MARIAN),
    }.get(task, ("bert", BERT))
    return {
        "data.task": task,
        "data.train": str(folder / "rows.jsonl"),
        "data.test-examples": 2,
        "data.image-size": 8,
        "data.partition-column": "who" if task == "causal-lm" else "",
        "data.mask-share": 0.4,
        "model.type": model[0],
        "model.overrides": model[1],
        "data.tokenizer": str(folder / "tokenizer") if task == "instruct" else "train",
        "model.edge-blocks": 1 if task in ("causal-lm", "instruct") else 0,
    }


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` has prepared stays with the test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
