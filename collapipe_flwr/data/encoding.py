"""Texts to padded token tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerFast

IGNORED_LABEL = -100  # transformers' mark for positions without a target
IGNORED_TAG = str(IGNORED_LABEL)  # the same mark in the user's data


def encode(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], max_length: int
) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` (B, T), padded at the right to the longest text.

    Texts beyond ``max_length`` tokens are cut; their special tokens are kept.
    """
    return _tensors(_encoded(tokenizer, list(texts), max_length))


def encode_words(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[Sequence[str]], max_length: int
) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The same for texts that are cut into words, and for each the place of every word's first
    token.

    A word that leaves no token (an odd control character) is read as the unknown token, so that
    the places are those of the first words of the row, none left out.
    """
    spaced = [[word if i == 0 else f" {word}" for i, word in enumerate(row)] for row in rows]
    encoded = _encoded(tokenizer, spaced, max_length, is_split_into_words=True)
    if any(_has_gap(encoded.word_ids(row)) for row in range(len(rows))):
        unknown = tokenizer.unk_token or "?"
        kept = [[w if tokenizer.tokenize(w) else unknown for w in row] for row in spaced]
        encoded = _encoded(tokenizer, kept, max_length, is_split_into_words=True)
    return _tensors(encoded), [_first_places(encoded.word_ids(row)) for row in range(len(rows))]


def _encoded(
    tokenizer: PreTrainedTokenizerFast, texts: Any, max_length: int, **options: bool
) -> Any:
    return tokenizer(
        texts,
        truncation=True,
        max_length=max_length,
        padding=True,
        padding_side="right",
        return_attention_mask=True,
        return_token_type_ids=False,
        return_tensors="pt",
        **options,
    )


def _tensors(encoded: Any) -> dict[str, Tensor]:
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def _first_places(words: Sequence[int | None]) -> list[int]:
    seen: dict[int, int] = {}
    for place, word in enumerate(words):
        if word is not None:
            seen.setdefault(word, place)
    return [seen[word] for word in sorted(seen)]


def _has_gap(words: Sequence[int | None]) -> bool:
    found = {word for word in words if word is not None}
    return bool(found) and max(found) + 1 != len(found)
