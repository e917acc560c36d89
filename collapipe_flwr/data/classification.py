"""Classification of texts, of the words in them (named entities, parts of speech), and of pictures.

A word's tag is at its first token; its other tokens, special tokens and padding are no
targets. A word that was cut off counts as tagged O. A word with the tag -100 is read but is no
target: it takes no part in the loss, the metrics or the list of classes.

A picture comes as a file in a folder of its label, as a column of a data set, as a file name in a
table, or as nested lists of gray or color values 0 .. 255. It is resized with Pillow; the model
is built for the size and the channels that the run-config names.
"""

from __future__ import annotations

import io
import json
import struct
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import ConfigError, DataError, name_extra
from collapipe_flwr.core.hub import expand_home
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.metrics import (
    OUTSIDE,
    Measure,
    Tally,
    entity_f1,
    match_rate,
    word_accuracy,
)
from collapipe_flwr.data.reader import ReadColumn, read_class_names, read_lists, require_column
from collapipe_flwr.data.tasks import Batch, Task
from collapipe_flwr.data.tokenizer import IGNORED_TAG, encode_words

with name_extra("data"):
    from datasets import Dataset, Image
    from PIL import Image as Pictures
    from PIL import ImageOps

_FEW_ROWS = 10
_MISSING = frozenset({"nan", "na", "n/a", "#n/a", "null", "none", "nil", "undefined", "unknown"})
_MODES = {1: "L", 3: "RGB"}  # by channels


class LabelTask(Task):
    """A task whose examples have one ``label`` each, a number or a name.

    Raises DataError for a label that the vocabulary does not have.
    """

    metric_name: ClassVar[str] = "accuracy"
    measures: ClassVar[Mapping[str, Measure]] = {"accuracy": match_rate}
    group_column: ClassVar[str] = "label"

    @abstractmethod
    def make_inputs(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return the model's inputs for a micro-batch, without labels."""

    def find_labels(self) -> tuple[str, ...]:
        declared = read_class_names(self.training_table, self.settings.label_column)
        if len(declared) > 1:
            return declared
        counts = Counter(self.every_row["label"])
        labels = sorted(counts)
        holds = f'data.label-column "{self.settings.label_column}" holds'
        if IGNORED_TAG in labels:
            raise DataError(
                f"{holds} the label {IGNORED_TAG}, which marks what has no label: remove these "
                "rows, or rename the class"
            )
        if all(label.isdecimal() for label in labels):
            labels.sort(key=int)
        if fraction := _find_fraction(labels):
            raise DataError(
                f"{holds} numbers such as {fraction}, but classification sorts into classes and "
                'does not estimate quantities: write classes as names, such as "high"'
            )
        if len(labels) < 2:
            raise DataError(
                f'{holds} only the label "{labels[0]}": classification needs at least two'
            )
        if len(labels) == len(self.every_row) >= _FEW_ROWS:
            raise DataError(
                f"{holds} another label in each of {len(labels)} rows: name the column of the "
                "classes, several rows of each"
            )
        self.warnings += [f"{holds} {odd}" for odd in find_odd_labels(counts)]
        return tuple(labels)

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        ids = [self.label_ids[example["label"]] for example in examples]
        return {**self.make_inputs(examples), "labels": torch.tensor(ids)}

    def read(self, guesses: Tensor, batch: Batch) -> list[str]:
        del batch
        return [self.labels[index] for index in guesses.tolist()]

    def select_usable(self, examples: Dataset, key: str) -> Dataset:
        unknown = sorted(set(examples["label"]) - set(self.labels))
        if unknown:
            raise DataError(
                f"{key} has {len(unknown)} labels that the training data lacks, such as "
                f'"{unknown[0]}": add training examples of them, or remove their rows'
            )
        return examples


def find_odd_labels(counts: Mapping[str, int]) -> list[str]:
    """Describe what may be a mistake in labels, which come with their numbers of rows."""
    found, alike = [], dict[str, list[str]]()
    for label in counts:
        alike.setdefault(" ".join(label.casefold().split()), []).append(label)
    if twins := next((each for each in alike.values() if len(each) > 1), None):
        shown = " and ".join(f'"{label}"' for label in sorted(twins))
        found.append(
            f"{shown}, which differ only in blanks or capitals: they are classes of their own; "
            "write them alike if they should be one"
        )
    for name in sorted(_MISSING.intersection(alike)):
        label = alike[name][0]
        found.append(
            f'the label "{label}" in {counts[label]} rows: it is a class like any other; remove '
            "these rows if it means that there is none"
        )
    total = sum(counts.values())
    if total >= _FEW_ROWS and 2 * len(counts) > total:
        found.append(
            f"{len(counts)} labels in {total} rows: a class with a single row cannot be learned"
        )
    return found


def _find_fraction(labels: Sequence[str]) -> str:
    """Return the first label that is not an integer, if all are numbers; else an empty text."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return ""
    pairs = zip(labels, numbers, strict=True)
    return next((t for t, n in pairs if isfinite(n) and not n.is_integer()), "")


class Classification(LabelTask):
    """A text and a label column of the user's data."""

    columns: ClassVar[tuple[str, ...]] = ("text", "label")
    model_task: ClassVar[str] = "sequence-classification"
    text_columns: ClassVar[tuple[str, ...]] = ("text",)
    starts_with_bos: ClassVar[bool] = True

    def make_inputs(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        return self.encode_column(examples, "text", self.settings.max_source_length)


class TokenClassification(Task):
    """A column of words and a column of tags, each a list per row, of the user's data.

    Rows without any word are skipped. Raises DataError where a row has not as many tags as words,
    or a tag that training lacks.
    """

    model_task: ClassVar[str] = "token-classification"
    metric_name: ClassVar[str] = "f1"
    measures: ClassVar[Mapping[str, Measure]] = {"f1": entity_f1, "accuracy": word_accuracy}
    text_columns: ClassVar[tuple[str, ...]] = ("tokens",)
    starts_with_bos: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("tokens", "tags")
    readers: ClassVar[Mapping[str, ReadColumn]] = {"tokens": read_lists, "tags": read_lists}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The vocabulary's tokenizer; of long texts it keeps the first words, where tags begin."""
        tokenizer = super().tokenizer
        tokenizer.truncation_side = "right"
        return tokenizer

    def find_labels(self) -> tuple[str, ...]:
        found = set(chain.from_iterable(self.every_row["tags"])) - {IGNORED_TAG}
        spaced = sorted(tag for tag in found if len(tag.split()) != 1)
        if spaced:
            raise DataError(f'data.tags-column has the tag "{spaced[0]}": tags hold no spaces')
        if len(found) < 2:
            raise DataError(
                f'data.tags-column "{self.settings.tags_column}" holds only one tag: at least two '
                "are needed"
            )
        if declared := read_class_names(self.training_table, self.settings.tags_column):
            return tuple(name for name in declared if name != IGNORED_TAG)
        return tuple(sorted(found, key=lambda tag: (tag != OUTSIDE, tag)))

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        words = [example["tokens"] for example in examples]
        inputs, first_tokens = encode_words(self.tokenizer, words, self.settings.max_source_length)
        labels = torch.full_like(inputs["input_ids"], IGNORED_LABEL)
        for row, (example, places) in enumerate(zip(examples, first_tokens, strict=True)):
            tags = example["tags"][: len(places)]
            labels[row, places] = torch.tensor([self.label_ids[tag] for tag in tags])
        return {**inputs, "labels": labels}

    def read(self, guesses: Tensor, batch: Batch) -> list[str]:
        return [
            " ".join(self.labels[index] for index in row[label != IGNORED_LABEL].tolist())
            for row, label in zip(guesses, batch["labels"], strict=True)
        ]

    def references(self, examples: Sequence[Example], batch: Batch) -> list[str]:
        del batch
        wanted = [[t for t in example["tags"] if t != IGNORED_TAG] for example in examples]
        return [" ".join(tags) for tags in wanted]

    def count(self, predictions: Sequence[str], references: Sequence[str]) -> Tally:
        """Count as always, with O for every word that was cut off."""
        ours = []
        for predicted, reference in zip(predictions, references, strict=True):
            pairs = zip_longest(predicted.split(), reference.split())
            ours.append(" ".join(tag or OUTSIDE for tag, word in pairs if word is not None))
        return super().count(ours, references)

    def find_bad_rows(self, found: Mapping[str, Sequence[Any]]) -> dict[str, list[int]]:
        rows = list(enumerate(zip(found["tokens"], found["tags"], strict=True)))
        odd = [row for row, (row_words, row_tags) in rows if len(row_words) != len(row_tags)]
        empty = [row for row, (row_words, _) in rows if not all(w.strip() for w in row_words)]
        words, tags = self.settings.tokens_column, self.settings.tags_column
        bad = {
            f'data.tags-column "{tags}" has not as many tags as words': odd,
            f'data.tokens-column "{words}" has an empty word': empty,
        }
        return {**super().find_bad_rows(found), **bad}

    def select_usable(self, examples: Dataset, key: str) -> Dataset:
        rows = zip(examples["tokens"], examples["tags"], strict=True)
        examples = examples.select([row for row, pair in enumerate(rows) if any(pair)])
        for tags in examples["tags"]:
            unknown = set(tags).difference(self.label_ids)
            if unknown:
                raise DataError(
                    f'{key} has the tag "{min(unknown)}" that the training data lacks: add '
                    "training examples of it, or remove its rows"
                )
        return examples


def read_pictures(table: Dataset, name: str, *, key: str, of: str) -> list[Any]:
    """Read a column of pictures, not opened yet, and None where a row has none.

    Raises DataError, naming ``key``.
    """
    require_column(table, name, key=key, of=of)
    if isinstance(table.features[name], Image):
        table = table.cast_column(name, Image(decode=False))
    values = table[name][:]
    if isinstance(next((value for value in values if value is not None), None), str):
        folder = expand_home(of).parent
        return [{"bytes": None, "path": str(folder / v)} if v else None for v in values]
    return list(values)


class ImageClassification(LabelTask):
    """A picture and a label column, or a folder with a folder of pictures per label."""

    columns: ClassVar[tuple[str, ...]] = ("image", "label")
    readers: ClassVar[Mapping[str, ReadColumn]] = {"image": read_pictures}
    model_task: ClassVar[str] = "image-classification"
    text_columns: ClassVar[tuple[str, ...]] = ()
    starts_with_bos: ClassVar[bool] = False

    def make_inputs(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        pictures = [self._read_pixels(example["image"]) for example in examples]
        return {"pixel_values": torch.from_numpy(np.stack(pictures))}

    def find_bad_rows(self, found: Mapping[str, Sequence[Any]]) -> dict[str, list[int]]:
        rows = list(enumerate(found["image"]))
        empty = [row for row, picture in rows if picture is None]
        other = [
            row for row, picture in rows if isinstance(picture, dict) and not _is_picture(picture)
        ]
        what = f'data.image-column "{self.settings.image_column}"'
        bad = {f"{what} is empty": empty, f"{what} is not a picture that Pillow opens": other}
        return {**super().find_bad_rows(found), **bad}

    def save_inputs(self, directory: Path) -> None:
        """Write the preprocessor's file: transformers then prepares pictures as done here."""
        size, channels = self.settings.image_size, self.settings.image_channels
        mean, std = ((number.tolist() * channels)[:channels] for number in self._scale)
        record = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": size, "width": size},
            "resample": int(Pictures.Resampling.BILINEAR),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": mean,
            "image_std": std,
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(record, indent=2) + "\n")

    def _read_pixels(self, picture: Any) -> NDArray[np.float32]:
        """Return a picture's channels, height and width, scaled by mean and deviation."""
        size = self.settings.image_size
        opened = open_picture(picture).convert(_MODES[self.settings.image_channels])
        if opened.size != (size, size):
            opened = opened.resize((size, size), Pictures.Resampling.BILINEAR)
        pixels = np.asarray(opened, dtype=np.float32).reshape(size, size, -1).transpose(2, 0, 1)
        mean, std = (number[:, None, None] for number in self._scale)
        return np.ascontiguousarray((pixels / 255.0 - mean) / std, dtype=np.float32)

    @cached_property
    def _scale(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Mean and deviation, one number or one per channel."""
        channels = self.settings.image_channels
        scale = (self.settings.image_mean, self.settings.image_std)
        for key, values in zip(("image-mean", "image-std"), scale, strict=True):
            if len(values) not in (1, channels):
                text = ",".join(f"{value:g}" for value in values)
                raise ConfigError(
                    f"data.{key} must hold one number, or one for each of {channels} channels, "
                    f'got "{text}"'
                )
        mean, std = (np.array(values, dtype=np.float32) for values in scale)
        return mean, std


_UNREADABLE = (
    *(OSError, ValueError, TypeError, KeyError, SyntaxError, EOFError, OverflowError, struct.error),
    Pictures.DecompressionBombError,
)


def _is_picture(picture: Mapping[str, Any]) -> bool:
    """Check whether a file or its bytes begin as a picture does; the rest is read later."""
    try:
        Pictures.open(_source_of(picture)).close()
    except _UNREADABLE:
        return False
    return True


def _source_of(picture: Mapping[str, Any]) -> Any:
    return picture["path"] if picture["bytes"] is None else io.BytesIO(picture["bytes"])


def open_picture(value: Any) -> Pictures.Image:
    """Open a picture: a file name, bytes, or nested lists; raises DataError if it cannot."""
    try:
        if not isinstance(value, dict):
            return Pictures.fromarray(_convert_to_bytes(np.asarray(value)))
        with Pictures.open(_source_of(value)) as picture:
            picture.load()
            return _reduce_to_bytes(ImageOps.exif_transpose(picture))
    except _UNREADABLE as error:
        shown = value.get("path") if isinstance(value, dict) else "the row's numbers"
        raise DataError(
            f"data.image-column: {shown or 'a row'} is not a picture that Pillow reads ({error})"
        ) from error


def _reduce_to_bytes(picture: Pictures.Image) -> Pictures.Image:
    """Reduce more than 8 bits to 8, which Pillow would cut off at 255; keep other pictures."""
    if picture.mode == "P" and "transparency" in picture.info:
        return picture.convert("RGBA")  # Pillow asks for it
    if picture.mode.startswith("I;16"):
        return Pictures.fromarray(np.rint(np.asarray(picture) / 257.0).astype(np.uint8))
    if picture.mode in ("I", "F"):
        return Pictures.fromarray(_convert_to_bytes(np.asarray(picture)))
    return picture


def _convert_to_bytes(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    pixels = numbers.astype(np.uint8)
    if not np.array_equal(pixels, numbers):
        raise ValueError("its numbers must be whole ones from 0 to 255")
    return pixels
