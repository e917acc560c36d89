"""Gradients of weights can come after that of the input, and whoever listens hears them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from collapipe_flwr.pipeline.backward import defer_products, fuse_accumulation
from collapipe_flwr.pipeline.meter import MemoryMeter
from tests.pipeline.test_fused_accumulation import WIDTH, encoder

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")


def test_the_input_comes_first_and_matrices_later():
    model, hidden = encoder(), torch.randn(2, 4, WIDTH, requires_grad=True)
    fuse_accumulation(model)
    with defer_products() as deferred:
        model(hidden).sum().backward()
    assert hidden.grad is not None
    missing = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert missing == {"linear1.weight", "linear2.weight"}
    assert len(deferred.tensors) == 2 * len(missing)
    deferred.add()
    assert all(weight.grad is not None for weight in model.parameters())
    assert not deferred.tensors


@pytest.mark.parametrize("layer", [nn.Linear(WIDTH, WIDTH), nn.Embedding(WIDTH, WIDTH)])
def test_who_listens_to_a_weight_hears_its_gradient(layer):
    heard = []
    fuse_accumulation(layer)
    layer.weight.register_hook(lambda gradient: heard.append(gradient.shape))
    given = torch.ones(2, WIDTH) if isinstance(layer, nn.Linear) else torch.tensor([1, 2])
    for _ in range(2):
        with defer_products():
            layer(given).sum().backward()
    assert heard == [(WIDTH, WIDTH)] * 2


def bert(attention):
    config = BertConfig(hidden_size=32, num_attention_heads=4, intermediate_size=128)
    config._attn_implementation = attention
    return BertLayer(config), {}


def gpt2(attention):
    config = GPT2Config(n_embd=32, n_head=4)
    config._attn_implementation = attention
    return GPT2Block(config, 0), {}


def llama(attention):
    sizes = {"hidden_size": 32, "intermediate_size": 86}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    config._attn_implementation = attention
    places = LlamaRotaryEmbedding(config)(torch.ones(1), torch.arange(16)[None])
    return LlamaDecoderLayer(config, 0), {"position_embeddings": places}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_what_is_owed_takes_no_more_than_what_the_forward_pass_saved(make, attention):
    (block, arguments), meter = make(attention), MemoryMeter()
    fuse_accumulation(block.train())
    hidden = torch.randn(2, 16, 32, requires_grad=True)
    with meter.measure_saved("pass", block.parameters()):
        output = block(hidden * 1.0, **arguments)
    output = output[0] if isinstance(output, tuple) else output
    meter.hold(0, "pass")
    saved_bytes = meter.peak_bytes
    with defer_products() as deferred:
        output.sum().backward()
    assert deferred.tensors
    meter.note_rest(0, deferred.tensors)
    assert meter.peak_bytes == saved_bytes > 0
