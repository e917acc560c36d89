"""What a user says about the data: the run-config's ``data.*`` keys, and the run's seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from collapipe_flwr.core.config import DataConfig
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.parsing import check_section

TRAIN_TOKENIZER = "train"


def key_of(field: str) -> str:
    """The run-config key of a field: ``text_column`` -> ``data.text-column``."""
    return f"data.{field.replace('_', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings(DataConfig):
    """The data section with its seed; raises ConfigError, naming the key, for unusable values."""

    seed: int = 0

    def __post_init__(self) -> None:
        check_section(self, "data.")
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, got {self.seed}")
        if not self.tokenizer:
            raise ConfigError('data.tokenizer is empty: write "train", a name or a directory')


def settings_of(config: DataConfig, seed: int) -> DataSettings:
    """The settings that a run-config asks for."""
    return DataSettings(**asdict(config), seed=seed)
