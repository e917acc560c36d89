"""The second task of the ablation: which digit a number in words begins with."""

from __future__ import annotations

import json
import random
from pathlib import Path

from collapipe_flwr.data.seq2seq import spell

TRAIN_ROWS, TEST_ROWS = 4000, 128


def leading_digits(folder: Path, seed: int) -> tuple[Path, Path]:
    """Numbers below ten thousand in words, and the digit of their thousands: the first word, if
    "thousand" follows."""
    drawn = random.Random(seed).sample(range(10_000), TRAIN_ROWS + TEST_ROWS)
    paths = folder / "train.jsonl", folder / "test.jsonl"
    for path, numbers in zip(paths, (drawn[TEST_ROWS:], drawn[:TEST_ROWS]), strict=True):
        rows = ({"text": spell(n), "label": f"d{n // 1000}"} for n in numbers)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths
