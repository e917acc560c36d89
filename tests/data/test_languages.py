"""Tokenizers that write a language into every text: targets get theirs, sources theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import MBart50Tokenizer, MBartTokenizer, NllbTokenizer

from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.seq2seq import Translation
from collapipe_flwr.data.tasks import load_task
from collapipe_flwr.data.tokenizer import (
    Vocabulary,
    load_tokenizer,
    tokenizer_from_json,
    tokenizer_to_json,
    train_tokenizer,
)
from collapipe_flwr.federation.run.learner import make_learner

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
LETTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
SCORED = [(piece, -1.0) for piece in (*SPECIAL, *LETTERS)]
COUNTED = {piece: index for index, piece in enumerate((*SPECIAL, *LETTERS))}
KINDS: dict[str, tuple[Any, str, str]] = {
    "mbart": (lambda: MBartTokenizer(vocab=SCORED), "en_XX", "ro_RO"),
    "mbart-50": (lambda: MBart50Tokenizer(vocab=SCORED), "en_XX", "ro_RO"),
    "nllb": (lambda: NllbTokenizer(vocab=COUNTED), "eng_Latn", "ron_Latn"),
}
MBART = (
    "d_model=8 encoder_layers=4 decoder_layers=1 encoder_attention_heads=2 "
    "decoder_attention_heads=2 encoder_ffn_dim=8 decoder_ffn_dim=8 max_position_embeddings=64"
)


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def saved(kind: str, folder: Path) -> Path:
    KINDS[kind][0]().save_pretrained(folder / kind)
    return folder / kind


def pairs(folder: Path) -> Path:
    path = folder / "pairs.csv"
    path.write_text("source,target\n" + "good day,buna ziua\nyes,da\n" * 10)
    return path


def translation(kind: str, folder: Path, **changes: Any) -> Translation:
    _, source, target = KINDS[kind]
    values = {"source_language": source, "target_language": target, **changes}
    train, tokenizer = str(pairs(folder)), str(saved(kind, folder))
    task = load_task(DataConfig(task="translation", train=train, tokenizer=tokenizer, **values))
    assert isinstance(task, Translation)
    return task


def test_sources_and_targets_are_encoded_as_the_library_does(kind: str, tmp_path: Path) -> None:
    make, source, target = KINDS[kind]
    task = translation(kind, tmp_path)
    theirs = make()
    theirs.src_lang, theirs.tgt_lang = source, target
    wanted = theirs("good day", text_target="buna ziua")
    unit = load_task(task.settings, Vocabulary.from_json(task.vocabulary.to_json()))
    for each in (task, unit):
        batch = each.collate([{"source": "good day", "target": "buna ziua"}])
        assert batch["input_ids"][0].tolist() == wanted["input_ids"]
        assert batch["labels"][0].tolist() == wanted["labels"]
        assert theirs.convert_tokens_to_ids(target) in wanted["labels"]
        assert each.read(batch["labels"], batch) == ["buna ziua"]


def test_a_saved_model_keeps_the_languages(kind: str, tmp_path: Path) -> None:
    task = translation(kind, tmp_path)
    task.save_inputs(tmp_path / "model")
    again = load_tokenizer(str(tmp_path / "model"))
    settings = DataConfig(
        task="translation", train=task.settings.train, tokenizer=str(tmp_path / "model")
    )
    assert load_task(settings).vocabulary == task.vocabulary
    assert again("good day")["input_ids"] == task.tokenizer("good day")["input_ids"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_language": ""}, r"targets in data\.target-language, such as "),
        ({"source_language": ""}, r"sources in data\.source-language, such as "),
        ({"target_language": "xx_XX"}, r'^data\.target-language "xx_XX" is not a language of .*'),
        ({"target_language": "</s>"}, r'^data\.target-language "</s>" is not a language of '),
    ],
)
def test_languages_that_are_missing_or_unknown_are_refused(
    kind: str, changes: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=sentence):
        _ = translation(kind, tmp_path, **changes).vocabulary


def test_languages_are_refused_where_no_tokenizer_writes_them(tmp_path: Path) -> None:
    plain = train_tokenizer(["good day"] * 3, vocab_size=300, starts_with_bos=False)
    plain.save_pretrained(tmp_path / "plain")
    for tokenizer in ("train", str(tmp_path / "plain")):
        settings = DataConfig(
            task="translation",
            train=str(pairs(tmp_path)),
            tokenizer=tokenizer,
            target_language="ro_RO",
        )
        with pytest.raises(DataError, match=r'^data\.target-language is "ro_RO", but .* empty$'):
            _ = load_task(settings).vocabulary


@pytest.mark.parametrize("kind", ["mbart", "mbart-50"], indirect=True)
def test_generation_starts_as_training_does(kind: str, tmp_path: Path) -> None:
    """mBART's decoder reads the last token of the labels first: the language, or the end."""
    task = translation(kind, tmp_path)
    learner = make_learner(
        parse(
            {
                "data.task": "translation",
                "data.train": task.settings.train,
                "data.tokenizer": task.settings.tokenizer,
                "data.source-language": "en_XX",
                "data.target-language": "ro_RO",
                "model.type": "mbart",
                "model.overrides": MBART,
            }
        )
    )
    labels = task.collate([{"source": "yes", "target": "da"}])["labels"]
    assert learner.splitter.config.decoder_start_token_id == labels[0, -1]


def test_a_tokenizer_without_languages_reads_targets_as_sources() -> None:
    plain = train_tokenizer(["good day"] * 3, vocab_size=300, starts_with_bos=False)
    text = tokenizer_to_json(plain)
    assert tokenizer_from_json(text, of_targets=True)("a b") == tokenizer_from_json(text)("a b")
