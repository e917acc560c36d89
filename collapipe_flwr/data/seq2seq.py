"""Text to text: translation and summaries of the user's data, and the built-in number words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from collapipe_flwr.data import number_words
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.encoding import IGNORED_LABEL, encode
from collapipe_flwr.data.metrics import Measure, bleu, chrf, match_rate
from collapipe_flwr.data.reader import Reader
from collapipe_flwr.data.rouge import ROUGE
from collapipe_flwr.data.tasks import Batch, Task
from collapipe_flwr.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    from datasets import Dataset

_COLUMNS = {"source": "source_column", "target": "target_column"}


class Seq2Seq(Task):
    """Examples with a source and a target text; labels are the target's tokens."""

    model_task: ClassVar[str] = "seq2seq"
    text_columns: ClassVar[tuple[str, ...]] = ("source", "target")
    starts_with_bos: ClassVar[bool] = False

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        sources = [example["source"] for example in examples]
        inputs = encode(self.tokenizer, sources, self.settings.max_source_length)
        wanted = [example["target"] for example in examples]
        targets = encode(self.tokenizer, wanted, self.settings.max_target_length)
        padding = targets["attention_mask"] == 0
        return {**inputs, "labels": targets["input_ids"].masked_fill(padding, IGNORED_LABEL)}

    def read_file(self, name: str) -> Dataset:
        return Reader(self.settings, _COLUMNS).file(name)

    def decode(self, outputs: Tensor, batch: Batch) -> list[str]:
        return self.read(outputs, batch)

    def read(self, guesses: Tensor, batch: Batch) -> list[str]:
        del batch
        texts: list[str] = self.tokenizer.batch_decode(guesses, skip_special_tokens=True)
        return texts

    def references(self, examples: Sequence[Example], batch: Batch) -> list[str]:
        del batch
        return [example["target"] for example in examples]


class NumberWords(Seq2Seq):
    """English number words to digits; see ``number_words``."""

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
        return number_words.generate(
            train=self.settings.train_examples,
            test=self.settings.test_examples,
            seed=self.settings.seed,
        )


class Pairs(Seq2Seq):
    """A source and a target column of the user's data."""

    usual_partition: ClassVar[str] = "iid"
    group_column: ClassVar[str] = ""

    def __init__(self, settings: DataConfig, vocabulary: Vocabulary | None = None) -> None:
        super().__init__(settings, vocabulary)
        self._reader = Reader(settings, _COLUMNS)

    @cached_property
    def train(self) -> Dataset:
        return self._reader.train

    @cached_property
    def test(self) -> Dataset:
        return self._reader.test


class Translation(Pairs):
    """Scored by chrF and BLEU."""

    metric_name: ClassVar[str] = "chrf"
    measures: ClassVar[Mapping[str, Measure]] = {
        "chrf": chrf,
        "bleu": bleu,
        "exact_match": match_rate,
    }


class Summarisation(Pairs):
    """Scored by our own ROUGE."""

    metric_name: ClassVar[str] = "rougeL"
    measures: ClassVar[Mapping[str, Measure]] = ROUGE
