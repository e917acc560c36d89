"""Laws of the tokenizer: lossless, repeatable, bounded, and the same after its journey."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.tokenizer import (
    load_tokenizer,
    tokenizer_from_json,
    tokenizer_to_json,
    train_tokenizer,
)
from tests.thorough import examples

TEXTS = ["four thousand two hundred seven", "4207", "four hundred", "400", "Straße, naïve; \n"] * 5
SOME_TEXTS = ["", "four", "x 2024 y", "日本 €", "  two  spaces "]


def small(*, starts_with_bos: bool = False, vocab_size: int = 300) -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocab_size=vocab_size, starts_with_bos=starts_with_bos)


TOKENIZER = small()


@examples(30, 100)
@given(st.text())
def test_any_text_survives(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.unk_token_id not in ids
    kept = TOKENIZER.decode(ids, skip_special_tokens=True)
    if not any(token in text for token in TOKENIZER.all_special_tokens):
        assert kept == text


def test_digits_are_single_tokens() -> None:
    assert TOKENIZER.tokenize("4207") == ["4", "2", "0", "7"]


def test_special_ids_are_fixed() -> None:
    ids = (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.bos_token_id)
    assert (*ids, TOKENIZER.unk_token_id) == (0, 1, 2, 3)


def test_texts_end_with_eos_and_begin_with_bos_on_demand() -> None:
    assert TOKENIZER("4")["input_ids"][-1] == TOKENIZER.eos_token_id
    assert TOKENIZER("4")["input_ids"][0] != TOKENIZER.bos_token_id
    assert small(starts_with_bos=True)("4")["input_ids"][0] == TOKENIZER.bos_token_id


@pytest.mark.parametrize("vocab_size", [260, 270, 300])
def test_vocabulary_is_bounded_and_the_smallest_is_bytes(vocab_size: int) -> None:
    tokenizer = small(vocab_size=vocab_size)
    assert len(tokenizer) <= vocab_size
    if vocab_size == 260:
        assert len(tokenizer("four é")["input_ids"]) == len("four é".encode()) + 1


def test_training_is_repeatable() -> None:
    assert tokenizer_to_json(small()) == tokenizer_to_json(small())


@pytest.mark.parametrize("starts_with_bos", [False, True])
def test_json_journey_changes_nothing(starts_with_bos: bool) -> None:
    tokenizer = small(starts_with_bos=starts_with_bos)
    before = tokenizer_to_json(tokenizer)
    tokenizer(["a b c"], padding=True, truncation=True, max_length=3)  # leaves state behind
    arrived = tokenizer_from_json(tokenizer_to_json(tokenizer))
    assert tokenizer_to_json(arrived) == before
    assert arrived.special_tokens_map == tokenizer.special_tokens_map
    for text in SOME_TEXTS:
        assert arrived(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_saved_tokenizer_loads_by_directory(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    for text in SOME_TEXTS:
        assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]


def test_a_saved_tokenizer_loads_from_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    TOKENIZER.save_pretrained(tmp_path / "mine")
    assert load_tokenizer("~/mine")("four")["input_ids"] == TOKENIZER("four")["input_ids"]


@pytest.mark.parametrize("name", ["{}/absent", "~nobody-here/absent"])
def test_a_missing_tokenizer_names_the_key(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer .*absent"):
        load_tokenizer(name.format(tmp_path))


def test_a_damaged_tokenizer_names_the_key(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"BPE"', '"no model"'))
    with pytest.raises(DataError, match=r"data\.tokenizer .* could not be loaded: give"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("damaged", ["", "{}", "[]", '{"tokenizer": 1}'])
def test_damaged_json_is_an_error(damaged: str) -> None:
    with pytest.raises(DataError, match="damaged"):
        tokenizer_from_json(damaged)
