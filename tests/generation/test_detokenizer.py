"""Law: text that is decoded as it comes is the text of all tokens decoded together."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from collapipe_flwr.data.tokenizer import train_tokenizer
from collapipe_flwr.generation.text_generator import Detokenizer

TEXTS = [
    "the cat sat on a mat, and didn't the bird see it ?",
    "  zwei  Leerzeichen, Ünïcödé — und ein Gedankenstrich",
    "日本語の文章と한국어 mixed with English.",
    "👩‍👩‍👧 family, 🏳️‍🌈 flag and e\u0301 accent\n\tnew line",
]
KNOWN = [text for text in TEXTS if text.isascii()] * 3
SPECIAL = ["<pad>", "</s>", "<s>", "<unk>"]


def byte_level() -> Any:
    return train_tokenizer(KNOWN, vocab_size=280, starts_with_bos=False)


def with_byte_fallback() -> Any:
    """As Llama's: spaces are part of the words, unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    spaces: list[Any] = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.train_from_iterator(KNOWN, trainers.BpeTrainer(special_tokens=SPECIAL))
    record = json.loads(tokenizer.to_str())
    vocabulary = record["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    record["model"]["byte_fallback"] = True
    return _fast(Tokenizer.from_str(json.dumps(record)))


def with_metaspace() -> Any:
    """As T5's: the first word loses its space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(special_tokens=SPECIAL, unk_token="<unk>")
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return _fast(tokenizer)


def word_pieces() -> Any:
    """As BERT's: what goes on a word is marked, and spaces before punctuation are removed."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(TEXTS * 3, trainers.WordPieceTrainer(special_tokens=SPECIAL))
    return _fast(tokenizer)


def _fast(tokenizer: Tokenizer) -> Any:
    names = ("pad_token", "eos_token", "bos_token", "unk_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(names, SPECIAL, strict=True))
    )


@pytest.fixture(
    scope="module", params=[byte_level, with_byte_fallback, with_metaspace, word_pieces]
)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.param()


def all_anew(tokenizer: Any, steps: Sequence[Sequence[int]], skip: bool) -> list[str]:
    """What comes out with every step, then the rest, when all tokens are decoded every time."""
    found, tokens, shown = [], list[int](), 0
    for step in steps:
        tokens += step
        text = tokenizer.decode(tokens, skip_special_tokens=skip)
        ready = not text.endswith("\ufffd") and len(text) > shown
        found.append(text[shown:] if ready else "")
        shown = len(text) if ready else shown
    return [*found, tokenizer.decode(tokens, skip_special_tokens=skip)[shown:]]


def in_windows(tokenizer: Any, steps: Sequence[Sequence[int]], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.add(step) for step in steps), detokenizer.pending]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_out_as_they_would_all_anew(tokenizer: Any, text: str, skip: bool) -> None:
    ids = tokenizer(text + " " + text)["input_ids"]
    steps = [[token] for token in ids]
    found = in_windows(tokenizer, steps, skip)
    assert found == all_anew(tokenizer, steps, skip)
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert len([piece for piece in found if piece]) > 3


@pytest.mark.parametrize("seed", range(30))
def test_whatever_a_model_writes_comes_out_as_it_would_all_anew(tokenizer: Any, seed: int) -> None:
    """Random tokens: broken characters, special and unknown tokens, odd spaces."""
    chance = random.Random(seed)
    steps = [
        [chance.randrange(len(tokenizer) + 9) for _ in range(chance.choice([1, 1, 1, 0, 3]))]
        for _ in range(120)
    ]
    for skip in (True, False):
        assert in_windows(tokenizer, steps, skip) == all_anew(tokenizer, steps, skip)


def test_the_work_per_token_does_not_grow_with_the_text(tokenizer: Any) -> None:
    decoded = 0

    class Counting:
        convert_ids_to_tokens = staticmethod(tokenizer.convert_ids_to_tokens)

        @staticmethod
        def decode(tokens: list[int], **options: Any) -> str:
            nonlocal decoded
            decoded += len(tokens)
            text: str = tokenizer.decode(tokens, **options)
            return text

    ids = tokenizer(TEXTS[0] * 40)["input_ids"]
    in_windows(Counting, [[token] for token in ids], skip=True)
    assert decoded < 8 * len(ids)
