"""Text to text: translation and summaries of the user's data, and the built-in number words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import DataError, name_extra
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.metrics import ROUGE, Measure, bleu, chrf, match_rate
from collapipe_flwr.data.tasks import Batch, Task
from collapipe_flwr.data.tokenizer import encode, tokenizer_from_json

with name_extra("data"):
    from datasets import Dataset

NUMBERS = 100_000  # 0 .. 99,999
DEFAULT_TRAIN_EXAMPLES = 6_000
DEFAULT_TEST_EXAMPLES = 500

# fmt: off
_UNITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
_TENS = [
    "", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
]
# fmt: on


def spell(number: int) -> str:
    """Spell a number in 0 .. 999,999, without "and" and hyphens."""
    if number < 20:
        return _UNITS[number]
    if number < 100:
        return _join_words(_TENS[number // 10], number % 10)
    if number < 1_000:
        return _join_words(f"{_UNITS[number // 100]} hundred", number % 100)
    return _join_words(f"{spell(number // 1_000)} thousand", number % 1_000)


def _join_words(words: str, rest: int) -> str:
    return f"{words} {spell(rest)}" if rest else words


def generate_number_words(*, train: int, test: int, seed: int) -> tuple[Dataset, Dataset]:
    """Make training and test examples with columns source, target and group (first word).

    Sizes of 0 mean the defaults. The same seed gives the same numbers, none of them twice.
    Raises DataError if more numbers are asked for than there are.
    """
    train, test = train or DEFAULT_TRAIN_EXAMPLES, test or DEFAULT_TEST_EXAMPLES
    if train + test > NUMBERS:
        raise DataError(
            f"data.train-examples + data.test-examples must be <= {NUMBERS} for number-words, "
            f"got {train} + {test}"
        )
    numbers = np.random.default_rng(seed).permutation(NUMBERS).tolist()
    return _make_table(numbers[test : test + train]), _make_table(numbers[:test])


def _make_table(numbers: list[int]) -> Dataset:
    sources = [spell(number) for number in numbers]
    return Dataset.from_dict(
        {
            "source": sources,
            "target": [str(number) for number in numbers],
            "group": [source.split(maxsplit=1)[0] for source in sources],
        }
    )


class Seq2Seq(Task):
    """Examples with a source and a target text; labels are the target's tokens."""

    columns: ClassVar[tuple[str, ...]] = ("source", "target")
    text_columns: ClassVar[tuple[str, ...]] = ("source", "target")
    model_task: ClassVar[str] = "seq2seq"
    starts_with_bos: ClassVar[bool] = False

    @cached_property
    def target_tokenizer(self) -> PreTrainedTokenizerFast:
        """The vocabulary's tokenizer for targets, which may be in another language."""
        return tokenizer_from_json(self.vocabulary.tokenizer_json, of_targets=True)

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        inputs = self.encode_column(examples, "source", self.settings.max_source_length)
        texts = [example["target"] for example in examples]
        targets = encode(self.target_tokenizer, texts, self.settings.max_target_length)
        padding = targets["attention_mask"] == 0
        return {**inputs, "labels": targets["input_ids"].masked_fill(padding, IGNORED_LABEL)}

    def read(self, guesses: Tensor, batch: Batch) -> list[str]:
        del batch
        texts: list[str] = self.tokenizer.batch_decode(guesses, skip_special_tokens=True)
        return texts


class NumberWords(Seq2Seq):
    """The built-in task: English number words to digits.

    "forty two thousand seven" -> "42007": every word's digit depends on the words that follow it,
    and absent places must be filled with zeros. The numbers of the test set occur in no training
    set. Clusters get the numbers by their leading word, so that no cluster sees the whole task.
    """

    metric_name: ClassVar[str] = "exact_match"
    measures: ClassVar[Mapping[str, Measure]] = {"exact_match": match_rate}
    usual_partition: ClassVar[str] = "natural"
    group_column: ClassVar[str] = "group"

    @cached_property
    def train(self) -> Dataset:
        return self._splits[0]

    @cached_property
    def test(self) -> Dataset:
        return self._splits[1]

    @cached_property
    def _splits(self) -> tuple[Dataset, Dataset]:
        return generate_number_words(
            train=self.settings.train_examples,
            test=self.settings.test_examples,
            seed=self.settings.seed,
        )


class Translation(Seq2Seq):
    """Scored by chrF and BLEU."""

    metric_name: ClassVar[str] = "chrf"
    measures: ClassVar[Mapping[str, Measure]] = {
        "chrf": chrf,
        "bleu": bleu,
        "exact_match": match_rate,
    }


class Summarisation(Seq2Seq):
    """Scored by ROUGE."""

    metric_name: ClassVar[str] = "rougeL"
    measures: ClassVar[Mapping[str, Measure]] = ROUGE
