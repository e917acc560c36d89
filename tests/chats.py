"""Conversations and a small tokenizer with a chat template, for tests of instruct models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from collapipe_flwr.data.tokenizer import train_tokenizer

TURN = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for message in messages %}" + TURN + "{% endfor %}" + PROMPT
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
)
WORDS = ["it", "was", "the", "best", "of", "times", "it", "was", "the", "worst", "of", "times"]


def chat_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Bytes and some merges, two special tokens around turns, the second one ending texts."""
    tokenizer = train_tokenizer(
        ["it was the best of times", "user assistant system"] * 3,
        vocab_size=300,
        starts_with_bos=False,
    )
    tokenizer.add_special_tokens(
        {"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    )
    tokenizer.chat_template = template
    return tokenizer


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversations(count: int) -> list[dict[str, Any]]:
    """Rows of one or two turns with questions and answers of 1 .. 12 words."""
    rows = []
    for row in range(count):
        turns = [
            message("user", " ".join(WORDS[: 1 + 5 * row % 12])),
            message("assistant", " ".join(WORDS[row % 7 :])),
        ]
        again = [message("user", "and then"), message("assistant", WORDS[row % 12])]
        rows.append({"messages": turns + again * (row % 2)})
    return rows


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)
