"""Overrides of the run-config, one by one or several in a string as Flower takes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from collapipe_flwr.config.parsing import declared_config, read_overrides, write_overrides
from collapipe_flwr.config.schema import parse
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


LISTS = [
    "scheduler.micro-batch-sizes=16",
    "scheduler.micro-batches=4",
    "data.image-mean=0.25",
    "data.image-std=1",
    "data.label-names=7",
]


@pytest.mark.parametrize("pair", LISTS)
def test_a_bare_number_is_a_list_of_one(pair: str, tmp_path: Path) -> None:
    """On the command line, in a file, and in what Flower hands over."""
    name, _, number = pair.partition("=")
    quoted = parse({**DECLARED, name: number})
    (tmp_path / "a.toml").write_text(f"{name} = {number}\n")
    (tmp_path / "b.toml").write_text(f"{name} = [{number}]\n")
    for source in (pair, str(tmp_path / "a.toml"), str(tmp_path / "b.toml")):
        found = read_overrides([source], DECLARED)
        assert found == {name: number}
        assert parse({**DECLARED, **found}) == quoted
    assert parse({**DECLARED, name: json.loads(number)}) == quoted


def test_a_list_may_be_written_as_toml_writes_it() -> None:
    found = read_overrides(["scheduler.micro-batch-sizes=[4, 8]"], DECLARED)
    assert parse({**DECLARED, **found}).scheduler.settings.micro_batch_sizes == (4, 8)


@pytest.mark.parametrize("text", ["2024", "1e3", "true", "0.50", "007"])
def test_a_text_may_look_like_a_number(text: str) -> None:
    names = ("data.text-column", "data.train", "data.label-names")
    assert read_overrides([f"{name}={text}" for name in names], DECLARED) == dict.fromkeys(
        names, text
    )


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
