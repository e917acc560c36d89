"""Pictures to one of several labels.

A picture comes as a file in a folder of its label, as a column of a data set, as a file name in a
table, or as nested lists of grey or colour values 0 .. 255. It is resized with Pillow; the model
is built for the size and the channels that the run-config names.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from collapipe_flwr.core.errors import ConfigError, DataError, extra
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.classification import Labelled
from collapipe_flwr.data.columns import require_column
from collapipe_flwr.data.reader import ReadColumn

with extra("data"):
    from datasets import Dataset, Image
    from PIL import Image as Pictures
    from PIL import UnidentifiedImageError

_MODES = {1: "L", 3: "RGB"}


def picture_column(table: Dataset, name: str, *, key: str, of: str) -> list[Any]:
    """A column of pictures, not opened yet; raises DataError, naming ``key``."""
    require_column(table, name, key=key, of=of)
    if isinstance(table.features[name], Image):
        table = table.cast_column(name, Image(decode=False))
    values = table[name][:]
    if isinstance(values[0], str):
        folder = Path(of).expanduser().parent
        return [{"bytes": None, "path": str(folder / value)} for value in values]
    return list(values)


class ImageClassification(Labelled):
    """A picture and a label column, or a folder with a folder of pictures per label."""

    columns: ClassVar[Mapping[str, str]] = {"image": "image_column", "label": "label_column"}
    readers: ClassVar[Mapping[str, ReadColumn]] = {"image": picture_column}
    model_task: ClassVar[str] = "image-classification"
    text_columns: ClassVar[tuple[str, ...]] = ()
    starts_with_bos: ClassVar[bool] = False

    def inputs(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        pictures = [self._pixels(example["image"]) for example in examples]
        return {"pixel_values": torch.from_numpy(np.stack(pictures))}

    def save_inputs(self, directory: Path) -> None:
        """The preprocessor's file: transformers feeds the model as it was fed here."""
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

    def _pixels(self, picture: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Channels, height, width; scaled by mean and deviation."""
        size = self.settings.image_size
        opened = open_picture(picture).convert(_MODES[self.settings.image_channels])
        if opened.size != (size, size):
            opened = opened.resize((size, size), Pictures.Resampling.BILINEAR)
        pixels = np.asarray(opened, dtype=np.float32).reshape(size, size, -1).transpose(2, 0, 1)
        mean, std = (number[:, None, None] for number in self._scale)
        return np.ascontiguousarray((pixels / 255.0 - mean) / std, dtype=np.float32)

    @cached_property
    def _scale(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        mean = self._per_channel("image-mean", self.settings.image_mean)
        return mean, self._per_channel("image-std", self.settings.image_std)

    def _per_channel(self, key: str, values: Sequence[float]) -> np.ndarray[Any, Any]:
        text = ",".join(f"{value:g}" for value in values)
        if len(values) not in (1, self.settings.image_channels):
            raise ConfigError(
                f"data.{key} must hold one number, or one for each of "
                f'{self.settings.image_channels} channels, got "{text}"'
            )
        return np.array(values, dtype=np.float32)


def open_picture(value: Any) -> Pictures.Image:
    """A picture from a file name, bytes, or nested lists; raises DataError if it is none."""
    try:
        if not isinstance(value, dict):
            return Pictures.fromarray(_whole_bytes(np.asarray(value)))
        source = value["path"] if value["bytes"] is None else io.BytesIO(value["bytes"])
        with Pictures.open(source) as picture:
            picture.load()
            return picture
    except (OSError, UnidentifiedImageError, ValueError, TypeError, KeyError) as error:
        shown = value.get("path") if isinstance(value, dict) else "the row's numbers"
        raise DataError(
            f"data.image-column: {shown or 'a row'} is no picture that Pillow reads ({error})"
        ) from error


def _whole_bytes(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    pixels = numbers.astype(np.uint8)
    if not np.array_equal(pixels, numbers):
        raise ValueError("its numbers must be whole ones from 0 to 255")
    return pixels
