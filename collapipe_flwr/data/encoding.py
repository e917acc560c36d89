"""Texts to padded token tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerFast


def encode(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], max_length: int
) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` (B, T), padded at the right to the longest text.

    Texts beyond ``max_length`` tokens are cut; their special tokens are kept.
    """
    encoded = tokenizer(
        list(texts),
        truncation=True,
        max_length=max_length,
        padding=True,
        padding_side="right",
        return_attention_mask=True,
        return_token_type_ids=False,
        return_tensors="pt",
    )
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
