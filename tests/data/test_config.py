"""Every unusable setting is refused by the name of its run-config key."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.data.config import DataConfig, key_of
from collapipe_flwr.data.tasks import load_task


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("partition", "random"),
        ("alpha", 0.0),
        ("alpha", float("nan")),
        ("vocab_size", 259),
        ("max_source_length", 1),
        ("max_target_length", 1),
        ("train_examples", -1),
        ("test_examples", -1),
        ("test_answers", -1),
    ],
)
def test_bad_value_names_its_key(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key_of(field)):
        DataConfig(**{field: value})


def test_unknown_task_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"data\.task must be one of number-words.*summing"):
        load_task(DataConfig(task="summing"))


def test_keys_are_kebab_case() -> None:
    assert {key_of(field.name) for field in fields(DataConfig)} >= {
        "data.max-source-length",
        "data.partition-column",
    }
