"""What a user says about the data: one frozen value, checked once.

Field ``text_column`` is the run-config key ``data.text-column``, and so on; messages use the key.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from collapipe_flwr.core.config import DataConfig
from collapipe_flwr.core.errors import ConfigError

PARTITIONS = ("auto", "iid", "dirichlet", "natural")
TRAIN_TOKENIZER = "train"
SMALLEST_VOCABULARY = 260  # 256 bytes and 4 special tokens


def key_of(field: str) -> str:
    """The run-config key of a field: ``text_column`` -> ``data.text-column``."""
    return f"data.{field.replace('_', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Which data, how it is read, cut into clusters, and turned into tokens.

    Raises ConfigError, naming the key, for a value that cannot be used.
    """

    task: str = "number-words"
    train: str = ""  # a local file or directory, or hub "name", "name:config", "name:config:split"
    test: str = ""  # the same; empty: a seeded share of train is held out
    text_column: str = "text"
    label_column: str = "label"
    source_column: str = "source"
    target_column: str = "target"
    partition: str = "auto"  # number-words: natural; others: iid
    partition_column: str = ""  # what dirichlet and natural go by; empty: the label or leading word
    alpha: float = 0.5  # of the Dirichlet distribution; small is uneven
    tokenizer: str = TRAIN_TOKENIZER  # "train", or a name or directory of a pretrained one
    vocab_size: int = 512  # upper bound of a trained tokenizer; 260 is pure bytes
    max_source_length: int = 64  # tokens, special ones included; longer texts are cut
    max_target_length: int = 64
    train_examples: int = 0  # 0: all (number-words: 6,000)
    test_examples: int = 0  # 0: all (number-words: 500; held out: a tenth)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.partition not in PARTITIONS:
            raise ConfigError(
                f'data.partition must be one of {", ".join(PARTITIONS)}, got "{self.partition}"'
            )
        self._check_at_least("vocab_size", SMALLEST_VOCABULARY)
        self._check_at_least("max_source_length", 2)
        self._check_at_least("max_target_length", 2)
        for field in ("train_examples", "test_examples", "seed"):
            self._check_at_least(field, 0)
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"data.alpha must be > 0, got {self.alpha}")
        if not self.tokenizer:
            raise ConfigError('data.tokenizer is empty: write "train", a name or a directory')

    def _check_at_least(self, field: str, least: int) -> None:
        value = getattr(self, field)
        if value < least:
            raise ConfigError(f"{key_of(field)} must be >= {least}, got {value}")


def settings_of(config: DataConfig, seed: int) -> DataSettings:
    """The settings that a run-config asks for."""
    return DataSettings(**asdict(config), seed=seed)
