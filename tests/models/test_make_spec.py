"""A model is described by one JSON string, and a wrong description is one clear sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.spec import spec_of
from collapipe_flwr.models.splitter import Splitter
from tests.models.conftest import OVERRIDES


def test_a_spec_survives_its_json(tiny: Any) -> None:
    spec = tiny.spec("qwen2", "causal-lm", edge_blocks=1)
    again = spec_of(spec.to_json())
    assert again == spec
    assert Splitter(again).all_keys() == Splitter(spec).all_keys()
    assert Splitter(again).config.to_dict() == Splitter(spec).config.to_dict()


def test_a_peer_s_configuration_that_the_library_refuses_is_one_sentence(tiny: Any) -> None:
    spec = tiny.spec("bert", "masked-lm")
    config = {**json.loads(spec.config_json), "hidden_size": "wide"}
    with pytest.raises(ModelError, match="'bert': Field 'hidden_size' expected int"):
        Splitter(replace(spec, config_json=json.dumps(config)))


def test_overrides_and_tokens_reach_the_configuration() -> None:
    spec = make_spec(
        "seq2seq",
        model_type="marian",
        overrides={"d_model": 16, "encoder_layers": 3, "decoder_layers": 1},
        vocab_size=30,
        pad_token_id=4,
        eos_token_id=5,
        decoder_start_token_id=6,
    )
    config = Splitter(spec).config
    assert (config.d_model, config.encoder_layers) == (16, 3)
    assert (config.vocab_size, config.decoder_vocab_size) == (30, 30)
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (4, 5, 6)


def test_labels_reach_the_head() -> None:
    names = {0: "no", 1: "yes"}
    spec = make_spec("sequence-classification", model_type="bert", id2label=names)
    config = Splitter(spec).config
    assert config.id2label == names
    assert config.label2id == {"no": 0, "yes": 1}
    assert Splitter(spec).shapes["classifier.weight"][0][0] == 2


def test_a_default_layerdrop_is_switched_off_and_a_wanted_one_refused() -> None:
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    spec = make_spec("seq2seq", model_type="m2m_100", overrides=small)
    assert Splitter(spec).config.encoder_layerdrop == 0
    with pytest.raises(ModelError, match="encoder_layerdrop must be 0"):
        make_spec("seq2seq", model_type="m2m_100", overrides={**small, "encoder_layerdrop": 0.1})


def test_attention_masks_cannot_be_dropped_silently(tiny: Any) -> None:
    """Without an attention implementation transformers builds no masks at all."""
    for model_type, task in (("bert", "masked-lm"), ("deberta-v2", "masked-lm")):
        config = Splitter(tiny.spec(model_type, task)).config
        assert config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"model_type": "brt"}, "unknown model type 'brt'; did you mean 'bert'"),
        ({"model_type": "resnet"}, "transformers has no 'sequence-classification' head"),
        ({"task": "translate"}, "unknown task 'translate'"),
        ({"task": "seq2seq"}, "cannot do the task 'seq2seq'"),
        ({"overrides": {"hiden_size": 3}}, "no setting 'hiden_size'; did you mean 'hidden_size'"),
        ({"overrides": {"xyzzy": 3}}, "'bert' models have no setting 'xyzzy'; see"),
        ({"overrides": {"hidden_size": "big"}}, "'bert': Field 'hidden_size' expected int"),
        ({"overrides": {"num_attention_heads": 5}}, "not a multiple"),
        ({"overrides": {"num_hidden_layers": 0}}, "no blocks"),
        ({"overrides": {"is_decoder": True}}, "is_decoder must be false"),
        ({"vocab_size": 9, "pad_token_id": 9}, "pad_token_id must be below the vocabulary's 9"),
        ({"num_labels": 0}, "num_labels must be 1 or more, got 0"),
        ({"num_labels": 3, "id2label": {0: "a", 1: "b"}}, "names 2 labels"),
        ({"edge_blocks": 12}, "edge_blocks must be below the model's 12 blocks"),
        ({"edge_blocks": -1}, "edge_blocks must be 0 or more"),
        ({"ties": "maybe"}, "ties must be one of untie, rows, got 'maybe'"),
        ({"shared": "maybe"}, "shared must be one of freeze, sum, got 'maybe'"),
        ({"pretrained": "also"}, "either a model_type"),
        ({"model_type": None}, "either a model_type"),
    ],
)
def test_a_wrong_description_is_one_clear_sentence(wrong: dict[str, Any], sentence: str) -> None:
    right: dict[str, Any] = {"task": "sequence-classification", "model_type": "bert"}
    arguments = {**right, **wrong}
    with pytest.raises(ModelError) as caught:
        make_spec(arguments.pop("task"), **arguments)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_only_a_run_would_show_is_refused_at_once() -> None:
    with pytest.raises(ModelError, match="decoder_start_token_id"):
        make_spec("seq2seq", model_type="t5", overrides={"num_layers": 1})


@pytest.mark.parametrize("model_type", ["whisper", "marian", "pegasus"])
def test_a_decoder_without_a_start_is_refused_in_one_sentence(model_type: str) -> None:
    """Some types demand a number there, and their default is of a larger vocabulary."""
    settings = dict(OVERRIDES[model_type])
    if model_type == "pegasus":  # whose own fits
        settings["decoder_start_token_id"] = None
    with pytest.raises(ModelError, match=r"decoder_start_token_id.*; take it from"):
        make_spec("seq2seq", model_type=model_type, overrides=settings, vocab_size=50)


def test_a_token_that_a_type_demands_is_asked_for() -> None:
    with pytest.raises(ModelError, match="'modernbert-decoder' models need pad_token_id; take it"):
        make_spec(
            "causal-lm",
            model_type="modernbert-decoder",
            overrides=OVERRIDES["modernbert-decoder"],
            vocab_size=50,
        )


def test_a_default_that_the_library_refuses_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="'gemma4_assistant': hidden_size_per_layer_input must"):
        make_spec("causal-lm", model_type="gemma4_assistant")


def test_token_numbers_of_the_published_vocabulary_are_forgotten() -> None:
    config = Splitter(
        make_spec(
            "seq2seq",
            model_type="marian",
            overrides={"d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
            vocab_size=30,
            pad_token_id=0,
            eos_token_id=7,
            decoder_start_token_id=0,
        )
    ).config
    assert config.forced_eos_token_id == 7
    two = {"num_hidden_layers": 2}
    modern = Splitter(
        make_spec("masked-lm", model_type="modernbert", overrides=two, vocab_size=30)
    ).config
    assert (modern.cls_token_id, modern.sep_token_id, modern.pad_token_id) == (None, None, None)


def test_a_decoder_stands_whole_at_the_edge() -> None:
    with pytest.raises(ModelError, match="edge_blocks must be 0"):
        make_spec("seq2seq", model_type="marian", edge_blocks=1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "3", "[" * 99_999, '{"task": "x"}', '{"task": "x", "q": 1}'),
        *(json.dumps({"task": "x", "config_json": c}) for c in ("{", "[]", "{}", 3)),
    ],
)
def test_a_text_that_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="the description of a model cannot be read: "):
        spec_of(text)
