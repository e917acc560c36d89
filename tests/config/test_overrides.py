"""Overrides of the run-config, one by one or several in a string as Flower takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from collapipe_flwr.config.parsing import declared_config, read_overrides, write_overrides
from collapipe_flwr.core.errors import ConfigError

DECLARED = declared_config(Path(__file__).parents[2])


@pytest.mark.parametrize(
    "text",
    [
        "num-server-rounds=3 seed=1",
        'data.task="classification" train.learning-rate=0.1 train.recompute=true',
        "data.text-column='a b' seed=2",
        'model.overrides="d_model=16 encoder_layers=4" seed=2',
        "seed=1  clusters=1 ",
    ],
)
def test_one_string_of_pairs_is_understood_as_by_flwr_run(text: str) -> None:
    assert read_overrides([text], DECLARED) == parse_config_args([text])


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        (["model.overrides=d_model=16 encoder_layers=4"], "d_model=16 encoder_layers=4"),
        (["model.overrides=d_model=16"], "d_model=16"),
        (["seed=1 clusters=1", "model.overrides=a=1 b=2"], "a=1 b=2"),
    ],
)
def test_text_with_equals_signs_is_one_value(sources: list[str], found: str) -> None:
    assert read_overrides(sources, DECLARED)["model.overrides"] == found


def test_a_key_that_is_mistyped_is_still_a_key() -> None:
    found = read_overrides(["num-server-rounds=3 train.learning-rat=0.1"], DECLARED)
    assert found == {"num-server-rounds": 3, "train.learning-rat": 0.1}


def test_later_ones_come_first() -> None:
    assert read_overrides(["seed=1 clusters=3", "seed=2"], DECLARED) == {"seed": 2, "clusters": 3}


def test_what_is_read_can_be_written_for_flower(tmp_path: Path) -> None:
    file = tmp_path / "more.toml"
    file.write_text("model.pretrained = 2024-05-01\n")
    sources = ["output=/data/\U0001f600", "model.name=2024-05-01", "seed=1", "rate=0.5", "on=true"]
    found = read_overrides([*sources, str(file)])
    assert found["model.pretrained"] == found["model.name"] == "2024-05-01"
    write_overrides(found, tmp_path / "run-config.toml")
    assert read_overrides([str(tmp_path / "run-config.toml")]) == found


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_numbers_are_finite(value: str) -> None:
    with pytest.raises(ConfigError, match="--run-config round-timeout-s must be a finite number"):
        read_overrides([f"round-timeout-s={value}"])
