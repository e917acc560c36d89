"""Model types without a record split exactly or say why not; those with one agree with it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.electra import modeling_electra

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.discovery import discover_family
from collapipe_flwr.models.families import FAMILIES
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.models.stack import Stack
from tests.thorough import few

RECORDED = [
    ("bert", "masked-lm"),
    ("distilbert", "masked-lm"),
    ("modernbert", "masked-lm"),
    ("vit", "image-classification"),
    ("marian", "seq2seq"),
    ("mbart", "seq2seq"),
    ("gpt2", "causal-lm"),
    ("mistral", "causal-lm"),
    ("qwen2", "causal-lm"),
    ("gemma", "causal-lm"),
]
_NARROW = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_PER_LAYER = {"num_hidden_layers": 2, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8}
_GEMMA3N = {**_PER_LAYER, "activation_sparsity_pattern": [0.0, 0.0], "altup_num_inputs": 2}
_DBRX = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4},
    "attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0},
}


@pytest.mark.parametrize(("model_type", "task"), few(RECORDED, 0, 3, 4, 6))
def test_the_record_says_what_a_trace_finds(model_type: str, task: str, tiny: Any) -> None:
    found, record = discover_family(tiny.spec(model_type, task)), FAMILIES[model_type]
    assert (found.stack, found.blocks) == (record.stack, record.blocks)
    assert set(found.before) <= set(record.before)
    assert (found.decodes, found.input_name) == (record.decodes, record.input_name)


@pytest.mark.parametrize(("model_type", "task"), RECORDED)
@pytest.mark.parametrize(("first", "stop"), few([(0, 1), (1, 3), (3, 4)], 1))
def test_the_library_s_own_loop_is_the_oracle(
    model_type: str, task: str, first: int, stop: int, tiny: Any
) -> None:
    """Blocks run inside the library's forward give what the rebuilt arguments give."""
    spec = tiny.spec(model_type, task)
    splitter = Splitter(spec)
    weights = splitter.initial_weights(seed=3)
    batch = tiny.batch(model_type, task)
    context = splitter.context(batch)
    hidden_BTD = splitter.build_embedding(weights)(batch).detach()
    oracle = Stack(
        model=splitter.build_whole(weights).train(),
        family=discover_family(spec),
        first_block=first,
        stop_block=stop,
    )
    segment = splitter.build_segment(first, stop, weights)
    assert torch.equal(segment(hidden_BTD, context), oracle.run_blocks(hidden_BTD, context))


@pytest.mark.parametrize(
    ("model_type", "task", "reason"),
    [
        ("t5", "seq2seq", "position_bias|argument 2"),
        ("deberta-v2", "masked-lm", "between its blocks 0 and 1|rel_embeddings"),
    ],
)
def test_a_learned_side_input_is_named(model_type: str, task: str, reason: str, tiny: Any) -> None:
    with pytest.raises(ModelError, match=reason):
        discover_family(tiny.spec(model_type, task))


@pytest.mark.parametrize(
    ("model_type", "task", "reason"),
    few(
        [
            ("albert", "masked-lm", "its block 0 runs out of turn, or more than once"),
            ("mpnet", "masked-lm", "besides hidden states, which is learned"),
            ("xlnet", "causal-lm", "besides hidden states, which is drawn at random"),
            ("longformer", "masked-lm", "depends on values, not only on shapes"),
            ("swin", "image-classification", "changes the shape of hidden states"),
            ("roformer", "masked-lm", "(do not run apart from each other|besides hidden states)"),
            ("data2vec-vision", "image-classification", "do not run apart from each other"),
            ("perceiver", "masked-lm", "it needs 'inputs'"),
            ("textnet", "image-classification", "has no num_channels"),
            ("resnet", "image-classification", "has no image_size"),
            ("cvt", "image-classification", "has no image_size"),
            ("mobilevit", "image-classification", "changes the shape of hidden states"),
            ("speech_to_text", "seq2seq", "has no num_mel_bins"),
        ],
        *(0, 1, 3, 7, 8, 9, 12),
    ),
)
def test_a_model_that_cannot_be_cut_says_why(model_type: str, task: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"'{model_type}' cannot be split: .*{reason}") as refused:
        make_spec(task, model_type=model_type)
    text = str(refused.value)
    assert "\n" not in text and text.count("cannot be split") == 1
    assert not re.search(r"tensor|dimension|torch|aten|unpack|missing", text)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("dbrx", _DBRX, "depends on values, not only on shapes"),
        (
            "zamba2",
            {"num_hidden_layers": 2, "layer_types": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
            "besides hidden states, which is learned",
        ),
        # the vocabulary of every layer is no number of layers
        ("gemma3n_text", _GEMMA3N, "besides hidden states, which is learned"),
        ("gemma4_text", _PER_LAYER, "besides hidden states, which is learned"),
    ],
)
def test_a_small_model_that_cannot_be_cut_says_why(
    model_type: str, settings: dict[str, Any], reason: str
) -> None:
    small = settings if model_type == "dbrx" else {**_NARROW, **settings}
    with pytest.raises(ModelError, match=f"'{model_type}' cannot be split: .*{reason}"):
        make_spec("causal-lm", model_type=model_type, overrides=small)


@pytest.mark.parametrize(
    ("model_type", "task", "settings", "reason"),
    [
        ("dbrx", "causal-lm", {}, "may not fit together .*rope_theta.*see DbrxConfig"),
        ("mobilebert", "masked-lm", {"hidden_size": 32}, "may not fit together; see MobileBert"),
        pytest.param(
            *("timm_wrapper", "image-classification", {}, "requires the timm library"),
            marks=pytest.mark.skipif(find_spec("timm") is not None, reason="timm is there"),
        ),
    ],
)
def test_a_model_that_the_library_cannot_build_says_why(
    model_type: str, task: str, settings: dict[str, Any], reason: str
) -> None:
    sentence = f"transformers cannot build the '{model_type}' model: .*{reason}"
    with pytest.raises(ModelError, match=sentence) as refused:
        make_spec(task, model_type=model_type, overrides=settings)
    assert "\n" not in str(refused.value) and "tensor" not in str(refused.value)


def test_settings_that_the_library_cannot_run_are_one_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    narrow = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 64}
    with pytest.raises(ModelError, match="may not fit together; see GPTJConfig") as refused:
        make_spec("causal-lm", model_type="gptj", overrides=narrow)
    assert "dimension" not in str(refused.value)
    assert "torch" not in caplog.text


def test_a_model_whose_end_reads_its_beginning_is_refused(monkeypatch: Any) -> None:
    """No model of the library does so today; this one adds the embedding behind its blocks."""
    encode = modeling_electra.ElectraEncoder.forward

    def skip_ahead(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = encode(self, hidden_states, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + hidden_states
        return output

    monkeypatch.setattr(modeling_electra.ElectraEncoder, "forward", skip_ahead)
    with pytest.raises(ModelError, match=r"runs after its blocks reads .*on another machine"):
        make_spec("masked-lm", model_type="electra", overrides={"num_hidden_layers": 2})
