"""Live models that cannot be trained in parts say what to do; none is trained on other numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForMaskedImageModeling,
)

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models import profile
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.module_call import describe
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.models.splitter import Splitter
from tests.models import own_models
from tests.models.conftest import OVERRIDES, TOKENS
from tests.models.test_split_model import texts


@pytest.mark.parametrize("shown", [True, False])
def test_a_head_that_reads_pictures_is_refused_with_an_example_or_without(shown: bool) -> None:
    config = ViTConfig(**OVERRIDES["vit"], num_channels=3, encoder_stride=4)
    mask = torch.zeros(4, 16, dtype=torch.bool)
    mask[:, ::2] = True
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "bool_masked_pos": mask}
    given: dict[str, Any] = {"example": batch} if shown else {"batch_size": 4}
    with pytest.raises(ModelError, match="the head computes with 'pixel_values' itself, which"):
        split_model = SplitModel(ViTForMaskedImageModeling(config), **given)
        splitter, weights = split_model.splitter, split_model.weights()
        hidden, context = splitter.embed(splitter.build_embedding(weights), weights, batch)
        splitter.build_edge(weights)(hidden, context)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_merged_adapters_train_as_any_model() -> None:
    adapted = get_peft_model(gpt2(), LoraConfig(fan_in_fan_out=True))
    merged = adapted.merge_and_unload().requires_grad_(True)
    SplitModel(merged, batch_size=4, length=8, whole_batches=True)


def test_sparse_gradients_are_refused() -> None:
    model = own_models.TextClassifier()
    path, table = next((p, m) for p, m in model.named_modules() if isinstance(m, nn.Embedding))
    table.sparse = True
    with pytest.raises(ModelError, match=f"{path!r} of TextClassifier has sparse=True"):
        SplitModel(model, example=texts(0))


def test_a_cache_between_blocks_is_named_with_the_argument_that_turns_it_off() -> None:
    with pytest.raises(
        ModelError, match=r"a DynamicCache, .*: call the model with use_cache=False"
    ):
        describe({"past_key_values": DynamicCache()})


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_positions_that_depend_on_earlier_batches_are_refused(model_type: str) -> None:
    with pytest.raises(ModelError, match="rope_type must not be 'dynamic'"):
        make_spec(
            "causal-lm",
            model_type=model_type,
            overrides={**OVERRIDES[model_type], "rope_parameters": DYNAMIC},
            **TOKENS,
        )


def test_such_positions_of_a_live_model_are_refused() -> None:
    config = LlamaConfig(**OVERRIDES["llama"], rope_parameters=DYNAMIC, vocab_size=50)
    with pytest.raises(ModelError, match="rope_type must not be 'dynamic'"):
        SplitModel(LlamaForCausalLM(config), batch_size=4, length=8)


@pytest.mark.parametrize("error", [profile.VALUE_ERRORS[0](None), RuntimeError("no such kernel")])
def test_every_error_of_a_trace_is_a_refusal(
    error: Exception, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(profile, "_profile", fail)
    splitter = Splitter(tiny.spec("llama", "causal-lm"))
    with pytest.raises(ModelError, match="model type 'llama' cannot be split: "):
        profile_model(splitter, BatchShape(source_length=4))
