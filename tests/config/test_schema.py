"""The run-config: defaults are the demo, and every refusal names the key and the way out."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.config.schema import AppConfig, flatten, known_keys, parse
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import read_assignments

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flower's own flattening: nested tables joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def test_pyproject_repeats_exactly_the_defaults() -> None:
    declared = tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"]
    assert _flat(declared) == flatten(AppConfig())


def test_flatten_then_parse_is_identity() -> None:
    config = parse({"train.learning-rate": 0.5, "clusters": 3})
    assert parse(flatten(config)) == config
    assert known_keys() == set(flatten(config))


def test_equal_run_configs_are_one_key_of_a_cache() -> None:
    values = {"train.optimizer": "sgd", "train.optimizer-arguments": "momentum=0.9"}
    assert {parse(values): 1}[parse(values)] == 1
    assert parse(values) != parse({"train.optimizer": "sgd"})


def test_an_optimizer_is_named_with_its_arguments() -> None:
    rule = "train.optimizer-arguments"
    config = parse({"train.optimizer": "SGD", rule: "momentum=0.9 nesterov=true"})
    assert config.train.optimizer.arguments == {"momentum": 0.9, "nesterov": True}
    assert parse(flatten(config)) == config
    config = parse({"train.optimizer": "Adafactor", rule: "eps=[null,0.001]", "seed": 3})
    assert config.train.optimizer.arguments == {"eps": (None, 0.001)}
    assert parse(flatten(config)) == config
    assert config.optimizer(1).arguments == {"eps": (None, 0.001)}
    assert hash(config) == hash(parse(flatten(config)))


def test_whole_number_serves_where_a_float_is_asked() -> None:
    assert parse({"train.learning-rate": 1}).train.optimizer.learning_rate == 1.0


def test_assignments_are_json_where_they_can_be() -> None:
    assert read_assignments("d_model=64  act=gelu dropout=0.0 tie=false") == {
        "d_model": 64,
        "act": "gelu",
        "dropout": 0.0,
        "tie": False,
    }


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"train.learning-rat": 0.1}, "train.learning-rat is unknown; did you mean"),
        ({"train.learning-rate": -1}, "train.learning-rate must be > 0, got -1.0"),
        ({"train.learning-rate": "fast"}, "train.learning-rate must be a number, got 'fast'"),
        ({"train.optimizer": "Adm"}, "optimizer 'Adm' is unknown; did you mean Adam"),
        ({"train.optimizer-arguments": "fast"}, "train.optimizer-arguments must read like"),
        ({"train.optimizer-arguments": "beta=0.9"}, "has no argument 'beta'; it knows betas, eps"),
        ({"clusters": 0}, "clusters must be at least 1, got 0"),
        ({"clusters": True}, "clusters must be a whole number, got True"),
        ({"data.task": "summaries"}, "data.task must be one of number-words, classification"),
        ({"scheduler.micro-batches": "2,x"}, "scheduler.micro-batches must list whole numbers"),
        ({"model.overrides": "d_model"}, "model.overrides must read like"),
        ({"scheduler.participation-floor": 1.5}, "must lie between 0 and 1, got 1.5"),
        ({"links.updates": "int5"}, "links.updates must be one of fp32, fp16"),
        (
            {"links.codec": "top-k"},
            "links.codec must be one of fp32, fp16, bf16, int8, int4, auto, got",
        ),
        (
            {"links.codecs": "int8,top-k"},
            "links.codecs must list some of fp32, fp16, bf16, int8, int4",
        ),
        ({"cache.codec": "top-k"}, "cache.codec must be one of fp32, fp16, bf16, int8, int4, got"),
        ({"links.updates": "int8", "runtime": "whole"}, "links.updates=int8 has no effect with"),
        ({"trust.audit-share": 1.1}, "trust.audit-share must lie between 0 and 1, got 1.1"),
        ({"trust.audit-share": 0.1, "runtime": "whole"}, "trust.audit-share=0.1 has no effect"),
        ({"trust.audit-share": 0.1, "scheduler.replicas": True}, "set scheduler.replicas=false"),
    ],
)
def test_refusal_names_key_value_and_way_out(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as refusal:
        parse(values)
    assert sentence in str(refusal.value)


PRIVATE = {
    "privacy.clip-norm": 1.0,
    "privacy.noise-multiplier": 1.0,
    "privacy.labels": "home",
}


@pytest.mark.parametrize(
    ("value", "way_out"),
    [
        ({"runtime": "whole"}, "only stages clip: set pipeline"),
        ({"strategy": "qfedavg"}, "weighs by losses of training"),
        ({"data.stream": "arrivals"}, "a fixed set of examples: leave it out"),
        ({"privacy.labels": "travel"}, "sees gradients before their noise: set home"),
        ({"train.clip-norm": 1.0}, "gradients are clipped already: leave it out"),
    ],
)
def test_what_cannot_be_private_is_refused_with_its_key_and_value(
    value: dict[str, Any], way_out: str
) -> None:
    ((key, given),) = value.items()
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as refusal:
        parse({**PRIVATE, **value})
    assert str(refusal.value).startswith(f"{key} is {given!r} beside privacy.clip-norm, but ")
    assert way_out in str(refusal.value)
    assert parse(PRIVATE).noise.active


NOISED = {
    "privacy.clip-norm": 1.0,
    "privacy.noise-multiplier": 1.0,
    "privacy.noise-on": "activations",
    "privacy.trusted-blocks": 2,
    "model.frozen-blocks": 2,
}


@pytest.mark.parametrize(
    ("value", "way_out"),
    [
        ({"privacy.trusted-blocks": 0}, "adds noise behind trusted blocks: set 1 or more"),
        ({"model.frozen-blocks": 1}, "leaves uncovered must not train: set 2"),
        ({"evaluation.federated": True}, "covers examples of training alone: set false"),
        ({"data.stream": "arrivals"}, "a fixed set of examples: leave it out"),
    ],
)
def test_what_noise_on_activations_does_not_cover_is_refused(
    value: dict[str, Any], way_out: str
) -> None:
    ((key, given),) = value.items()
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as refusal:
        parse({**NOISED, **value})
    assert str(refusal.value).startswith(f"{key} is {given!r} beside privacy.clip-norm, but ")
    assert way_out in str(refusal.value)
    with pytest.raises(ConfigError, match=r"privacy\.noise-on=activations has no effect without"):
        parse({"privacy.noise-on": "activations"})
    noised = parse({**NOISED, "train.clip-norm": 1.0, "strategy": "qfedavg"})  # which are not hurt
    assert noised.scheduling.batches == parse({}).scheduling.batches


def test_the_demos_overrides_are_not_a_checkpoints() -> None:
    assert parse({}).model.settings["d_model"] == 64
    assert parse({"model.pretrained": "folder"}).model.settings == {}
    own = parse({"model.pretrained": "folder", "model.overrides": "dropout=0.0"})
    assert own.model.settings == {"dropout": 0.0}


def test_a_run_config_is_read_without_loading_the_libraries_of_models_and_data() -> None:
    code = (
        "import sys; from collapipe_flwr.config.schema import parse; parse({}); "
        "print([m for m in ('transformers', 'datasets', 'flwr', 'grpc') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"
