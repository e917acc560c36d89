"""Language models: the next token of blocks of text, or tokens that were masked."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import DataError, name_extra
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.files import drop_empty_rows
from collapipe_flwr.data.metrics import Measure, word_accuracy
from collapipe_flwr.data.reader import ReadColumn, read_column
from collapipe_flwr.data.tasks import Batch, Task

with name_extra("data"):
    from datasets import Dataset

_CHOSEN_MASKED, _CHOSEN_RANDOM = 0.8, 0.1  # of the chosen tokens; the rest stays as it is
_LARGEST_EXPONENT = 700.0  # exp overflows beyond it


class LanguageModel(Task):
    """A text column (or the lines of a text file); perplexity, and the accuracy of tokens.

    Empty rows are skipped. Predictions and references are token ids, joined by spaces.
    """

    metric_name: ClassVar[str] = "perplexity"  # lower is better
    measures: ClassVar[Mapping[str, Measure]] = {"accuracy": word_accuracy}
    text_columns: ClassVar[tuple[str, ...]] = ("text",)
    columns: ClassVar[tuple[str, ...]] = ("text",)
    readers: ClassVar[Mapping[str, ReadColumn]] = {"text": read_column}

    def read_file(self, name: str) -> Dataset:
        return self.read_rows(name)  # a stream's place counts empty rows, too

    def make_examples(self, rows: Dataset) -> Dataset:
        return drop_empty_rows(rows)

    def select_usable(self, examples: Dataset, key: str) -> Dataset:
        kept = drop_empty_rows(examples)
        if not len(kept):
            raise DataError(
                f'{key} has only empty texts in data.text-column "{self.settings.text_column}": '
                "give texts, or name another column"
            )
        return kept

    def score_loss(self, loss: float) -> dict[str, float]:
        return {"perplexity": math.exp(min(loss, _LARGEST_EXPONENT))}


class MaskedLM(LanguageModel):
    """Predict masked tokens (15 %), as in BERT.

    The choice of tokens depends on the run's seed, the round and the example alone, not on the cut
    into micro-batches or the machine; it is always the same in the test.
    """

    model_task: ClassVar[str] = "masked-lm"
    starts_with_bos: ClassVar[bool] = True
    needs_mask_token: ClassVar[bool] = True

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        return self._mask(examples, draw=0)

    def collate_for(self, examples: Sequence[Example], round_index: int) -> dict[str, Tensor]:
        return self._mask(examples, draw=1 + round_index)

    def read(self, guesses: Tensor, batch: Batch) -> list[str]:
        return _join_targets(guesses, batch["labels"])

    def references(self, examples: Sequence[Example], batch: Batch) -> list[str]:
        del examples
        return _join_targets(batch["labels"], batch["labels"])

    def _mask(self, examples: Sequence[Example], draw: int) -> dict[str, Tensor]:
        inputs = self.encode_column(examples, "text", self.settings.max_source_length)
        labels = torch.full_like(inputs["input_ids"], IGNORED_LABEL)
        for row, mask in enumerate(inputs["attention_mask"]):
            ids = inputs["input_ids"][row, : int(mask.sum())]
            chosen, shown = self._choose_tokens(ids.numpy(), draw)
            labels[row, chosen] = ids[chosen]
            inputs["input_ids"][row, chosen] = torch.from_numpy(shown)
        return {**inputs, "labels": labels}

    def _choose_tokens(
        self, ids: NDArray[np.int64], draw: int
    ) -> tuple[list[int], NDArray[np.int64]]:
        """Choose tokens of one example, at least one; return their places and what is shown."""
        rng = np.random.default_rng([self.settings.seed, draw, zlib.crc32(ids.tobytes())])
        places = np.flatnonzero(~np.isin(ids, self.tokenizer.all_special_ids))
        count = min(len(places), max(1, round(self.settings.mask_share * len(places))))
        chosen = np.sort(rng.permutation(places)[:count])
        fate = rng.random(count)
        shown = np.where(
            fate < _CHOSEN_MASKED + _CHOSEN_RANDOM,
            rng.integers(len(self.tokenizer), size=count),
            ids[chosen],
        )
        shown[fate < _CHOSEN_MASKED] = self._mask_id
        return chosen.tolist(), shown

    @cached_property
    def _mask_id(self) -> int:
        found = self.tokenizer.mask_token_id
        if found is None:
            raise DataError(
                f'data.tokenizer "{self.settings.tokenizer}" has no mask token, which masked-lm '
                'needs: choose the tokenizer of a masked model, or "train"'
            )
        return int(found)


class CausalLM(LanguageModel):
    """Guess every next token of blocks of ``data.max-source-length`` tokens.

    Texts are joined, each with the end token after it, and cut into blocks; with a
    ``data.partition-column`` no block holds texts of two of its values.
    """

    model_task: ClassVar[str] = "causal-lm"
    starts_with_bos: ClassVar[bool] = False

    def make_examples(self, rows: Dataset) -> Dataset:
        rows = super().make_examples(rows)
        texts, length = rows["text"][:], self.settings.max_source_length
        groups = rows["group"][:] if "group" in rows.column_names else [""] * len(texts)
        order = sorted(range(len(texts)), key=lambda row: groups[row])
        blocks: list[list[int]] = []
        for _, members in groupby(order, key=lambda row: groups[row]):
            tokens = [
                token for ids in self._encode_texts([texts[r] for r in members]) for token in ids
            ]
            cut = (tokens[start : start + length] for start in range(0, len(tokens), length))
            blocks += [block for block in cut if len(block) > 1]  # it has a token to predict
        if not blocks:
            raise DataError(
                f'data.text-column "{self.settings.text_column}" has no text of two tokens or more '
                "to learn from: give longer texts"
            )
        return Dataset.from_dict({"ids": blocks})

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        rows = [example["ids"] for example in examples]
        mask = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        ids = torch.full_like(mask, self.tokenizer.pad_token_id)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def read(self, guesses: Tensor, batch: Batch) -> list[str]:
        return _join_targets(guesses[:, :-1], batch["labels"][:, 1:])

    def references(self, examples: Sequence[Example], batch: Batch) -> list[str]:
        del examples
        return _join_targets(batch["labels"][:, 1:], batch["labels"][:, 1:])

    def _encode_texts(self, texts: list[str]) -> Iterable[list[int]]:
        end = self.tokenizer.eos_token_id
        if end is None:
            raise DataError(
                f'data.tokenizer "{self.settings.tokenizer}" has no end token to put between '
                'texts: choose the tokenizer of a decoder-only model, or "train"'
            )
        for ids in self.tokenizer(texts, return_attention_mask=False)["input_ids"]:
            yield ids if ids and ids[-1] == end else [*ids, end]


def _join_targets(ids_BT: Tensor, labels_BT: Tensor) -> list[str]:
    wanted = labels_BT != IGNORED_LABEL
    return [
        " ".join(map(str, row[mask].tolist())) for row, mask in zip(ids_BT, wanted, strict=True)
    ]
