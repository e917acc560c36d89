"""The tokenizer: trained on the examples or loaded, and serialized to travel with the model.

Trained ones are byte-level BPE without unknown tokens; digits are split one by one, so that a
number is spelled rather than looked up. With the smallest vocabulary there are no merges, and the
tokens are the bytes themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import DataError
from collapipe_flwr.core.hub import expand_home, explain_unreachable, is_folder_only

PAD, EOS, BOS, UNK, MASK = "<pad>", "</s>", "<s>", "<unk>", "<mask>"
_KEPT_SETTINGS = ("model_max_length", "padding_side", "truncation_side", "model_input_names")
_TARGETS = "target_post_processor"  # in a saved tokenizer: the special tokens around targets
_MOST_LANGUAGES = 6  # in a sentence


def train_tokenizer(
    texts: Sequence[str], *, vocab_size: int, starts_with_bos: bool, with_mask: bool = False
) -> PreTrainedTokenizerFast:
    """Train byte-level BPE of at most ``vocab_size`` tokens; equal texts, equal tokenizers.

    Every text ends with EOS (in a pair: each of the two); with ``starts_with_bos`` it begins with
    BOS, the token that BERT-type classifiers pool; ``with_mask`` adds a mask token.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[PAD, EOS, BOS, UNK, *([MASK] if with_mask else [])],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    single = f"{BOS} $A {EOS}" if starts_with_bos else f"$A {EOS}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B:1 {EOS}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)],
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNK,
        mask_token=MASK if with_mask else None,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Languages:
    """What a tokenizer such as mBART's writes into texts; empty: what it was saved with.

    With ``of_pairs`` texts come in pairs of source and target, and both must be known.
    """

    source: str = ""
    target: str = ""
    of_pairs: bool = False

    def refuse(self, why: str) -> None:
        """Raise DataError if a language is named."""
        for side in ("source", "target"):
            if given := getattr(self, side):
                raise DataError(f'data.{side}-language is "{given}", but {why}: leave it empty')

    def apply_to(self, tokenizer: Any, name: str) -> None:
        """Let ``tokenizer`` write these languages; raises DataError where it cannot."""
        what = f'data.tokenizer "{name}"'
        if not hasattr(tokenizer, "set_tgt_lang_special_tokens"):
            return self.refuse(f"{what} has no languages to choose from")
        added = (
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        )
        known = [token for token in added if token not in tokenizer.special_tokens_map.values()]
        for side, ours in (("source", "src_lang"), ("target", "tgt_lang")):
            language = getattr(self, side)
            near = get_close_matches(language, known, n=_MOST_LANGUAGES, cutoff=0.4)
            such = ", ".join(near or known[:_MOST_LANGUAGES])
            if language and language not in known:
                raise DataError(
                    f'data.{side}-language "{language}" is not a language of {what}: choose one '
                    f"such as {such}"
                )
            if language:
                setattr(tokenizer, ours, language)
            elif self.of_pairs and not tokenizer.init_kwargs.get("tgt_lang"):
                raise DataError(  # a saved source may be its library's default, en_XX
                    f"{what} writes a language into every text: name that of the {side}s in "
                    f"data.{side}-language, such as {such}"
                )
        return None


def load_tokenizer(name: str, languages: Languages = Languages()) -> PreTrainedTokenizerFast:
    """Load a pretrained tokenizer, by hub name or directory, that writes these languages.

    Raises DataError if it cannot be loaded or is not one of the ``tokenizers`` library.
    """
    folder = expand_home(name)
    if not folder.is_dir() and is_folder_only(name):
        raise DataError(
            f'data.tokenizer "{name}" does not exist (looked for {folder.absolute()}): give the '
            'directory of a saved tokenizer, a hub name such as owner/model, or "train"'
        )
    offline = "" if folder.is_dir() else explain_unreachable(name)
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name)
    except Exception as error:  # tokenizers raises nothing narrower for a damaged file
        why = f" ({offline})" if offline else ""
        raise DataError(
            f'data.tokenizer "{name}" could not be loaded{why}: give the directory of a saved '
            'tokenizer, a hub name that this machine can reach, or "train"'
        ) from error
    if not loaded.is_fast:
        raise DataError(
            f'data.tokenizer "{name}" has no fast version and so cannot travel with the model: '
            'choose one with a tokenizer.json, or "train"'
        )
    if set(loaded.get_vocab()) <= set(loaded.all_special_tokens):  # made up by its library
        raise DataError(
            f'data.tokenizer "{name}" holds no tokenizer: give the directory of a saved tokenizer, '
            'a hub name that this machine can reach, or "train"'
        )
    if loaded.pad_token is None:
        if loaded.eos_token is None:
            raise DataError(
                f'data.tokenizer "{name}" has neither a padding nor an end token: add a pad_token'
            )
        loaded.pad_token = loaded.eos_token  # any token serves, since it is masked
    languages.apply_to(loaded, name)
    return cast(PreTrainedTokenizerFast, loaded)


def tokenizer_to_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """Write all that ``tokenizer_from_json`` needs, special tokens included, as one JSON object."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["truncation"] = backend["padding"] = None  # left there by the last call, if any
    special = tokenizer.special_tokens_map
    record = {
        "tokenizer": backend,
        "special_tokens": {
            name: token
            for name, token in special.items()
            if name.endswith("_token") and token is not None
        },
        "settings": {name: getattr(tokenizer, name) for name in _KEPT_SETTINGS},
    }
    if tokenizer.chat_template:
        record["settings"]["chat_template"] = tokenizer.chat_template
    if (targets := _find_target_processor(tokenizer)) is not None:
        record["settings"][_TARGETS] = targets
    return json.dumps(record, ensure_ascii=False, sort_keys=True)


def _find_target_processor(tokenizer: Any) -> dict[str, Any] | None:
    """Return how targets get their special tokens; None if as sources do."""
    if not getattr(tokenizer, "tgt_lang", None):
        saved: dict[str, Any] | None = tokenizer.init_kwargs.get(_TARGETS)
        return saved
    tokenizer.set_tgt_lang_special_tokens(tokenizer.tgt_lang)
    found: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())["post_processor"]
    tokenizer.set_src_lang_special_tokens(tokenizer.src_lang)
    return found


def tokenizer_from_json(text: str, *, of_targets: bool = False) -> PreTrainedTokenizerFast:
    """Read the tokenizer that ``tokenizer_to_json`` wrote, of sources or ``of_targets``.

    Raises DataError for anything else.
    """
    try:
        record = json.loads(text)
        if of_targets and _TARGETS in record["settings"]:
            record["tokenizer"]["post_processor"] = record["settings"][_TARGETS]
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=Tokenizer.from_str(json.dumps(record["tokenizer"])),
            clean_up_tokenization_spaces=False,
            **record["special_tokens"],
            **record["settings"],
        )
    except Exception as error:  # tokenizers raises nothing narrower
        raise DataError(
            "the tokenizer that came with the model is damaged: train the model again, or copy its "
            "whole directory"
        ) from error


IGNORED_TAG = str(IGNORED_LABEL)  # the same mark in the user's data


def encode(tokenizer: PreTrainedTokenizerFast, texts: Any, max_length: int, **options: bool) -> Any:
    """Tokenize texts as ``input_ids`` and ``attention_mask`` (B, T), padded at the right.

    They are padded to the longest, and truncated to ``max_length`` tokens with the special ones.
    """
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


def encode_words(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[Sequence[str]], max_length: int
) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Tokenize texts that are split into words, and find the position of each word's first token.

    A word without tokens (an odd control character) is read as the unknown token, so that every
    word has a position until the text is truncated.
    """
    spaced = [[word if i == 0 else f" {word}" for i, word in enumerate(row)] for row in rows]
    encoded = encode(tokenizer, spaced, max_length, is_split_into_words=True)
    if any(_has_gap(encoded.word_ids(row)) for row in range(len(rows))):
        unknown = tokenizer.unk_token or "?"
        kept = [[w if tokenizer.tokenize(w) else unknown for w in row] for row in spaced]
        encoded = encode(tokenizer, kept, max_length, is_split_into_words=True)
    return dict(encoded), [_find_first_places(encoded.word_ids(row)) for row in range(len(rows))]


def _find_first_places(words: Sequence[int | None]) -> list[int]:
    first = {word: place for place, word in reversed(list(enumerate(words))) if word is not None}
    return [first[word] for word in sorted(first)]


def _has_gap(words: Sequence[int | None]) -> bool:
    found = {word for word in words if word is not None}
    return bool(found) and max(found) + 1 != len(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer as JSON, and for classification the label names in the order of their ids.

    The server makes it once and sends it along; a control unit's local data may lack a label or
    spell words differently.
    """

    tokenizer_json: str
    labels: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write one JSON string, for a record or a file."""
        return json.dumps({"tokenizer": self.tokenizer_json, "labels": self.labels})

    @staticmethod
    def from_json(text: str) -> Vocabulary:
        """Read what ``to_json`` wrote. Raises DataError for anything else."""
        try:
            record = json.loads(text)
            return Vocabulary(tokenizer_json=record["tokenizer"], labels=tuple(record["labels"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                "the vocabulary that came with the model is damaged: send it again"
            ) from error
