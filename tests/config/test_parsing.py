"""A key is declared once, beside the field that it sets, and wherever that dataclass is used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.config.parsing import flatten_section, parse_section
from collapipe_flwr.config.schema import AppConfig, flatten, parse
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import at_least, inline, key


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    depth: int = key(3, at_least(1))
    keep_spans: bool = key(False, name="timeline")
    name: str = "known to stages alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    stage: Stage = inline(Stage(depth=5))
    rounds: int = key(1)


def test_the_keys_of_a_composed_dataclass_stand_beside_those_of_its_section() -> None:
    keys = {"train.depth", "train.timeline", "train.rounds"}
    assert flatten_section(Section(), "train.").keys() == keys
    found = parse_section(Section(), "train.", {"train.timeline": True})
    assert found == Section(stage=Stage(depth=5, keep_spans=True))
    assert parse_section(Section(), "train.", flatten_section(found, "train.")) == found
    with pytest.raises(ConfigError, match=r"train\.depth must be at least 1, got 0"):
        parse_section(Section(), "train.", {"train.depth": 0})


def test_options_of_stages_are_keys_without_being_declared_again() -> None:
    config = parse({"train.recompute": True, "train.clip-norm": 1, "links.pace": "plan"})
    assert config.execution.recompute and config.execution.clip_norm == 1.0
    assert config.execution.paced and config.execution.codec == "fp32"
    assert config.scheduling.recompute


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("scheduler.micro-batches", "2, 4", (2, 4)),
        ("data.image-mean", "0.485,0.5,1", (0.485, 0.5, 1.0)),
        ("data.label-names", "O, B-PER I-PER", ("O", "B-PER", "I-PER")),
        ("links.codecs", "fp32, int8", ("fp32", "int8")),
        ("world.devices", "phone, jetson-nano;phone;", (("phone", "jetson-nano"), ("phone",))),
        ("edge.tls-ca", "certs/ca.pem", Path("certs/ca.pem")),
    ],
)
def test_lists_and_paths_are_typed_when_they_are_parsed(name: str, text: str, value: Any) -> None:
    section, _, field = name.partition(".")
    parsed = parse({name: text})
    owner = getattr(parsed, section)
    owner = getattr(owner, "settings", owner) if section == "scheduler" else owner
    assert getattr(owner, field.replace("-", "_")) == value
    assert parse(flatten(parsed)) == parsed


@pytest.mark.parametrize("text", ["", "2,", "0", "2;4", "-1"])
def test_what_is_no_list_of_counts_is_refused_as_it_was_written(text: str) -> None:
    with pytest.raises(ConfigError, match=f"must list whole numbers from 1 .*got {text!r}"):
        parse({"scheduler.micro-batches": text})


def test_the_demo_differs_from_the_librarys_own_defaults_where_it_says_so() -> None:
    demo = AppConfig()
    assert demo.scheduler.settings.micro_batch_sizes == (16, 32)
    assert demo.train.optimizer.weight_decay == 0.0
