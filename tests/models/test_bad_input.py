"""Whatever does not fit is refused with one sentence that says what, and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.saving import save_whole
from collapipe_flwr.models.spec import LoraConfig
from collapipe_flwr.models.splitter import Splitter
from tests.models.conftest import OVERRIDES


def _refusal(run: Any) -> str:
    with pytest.raises(ModelError) as refused:
        run()
    text = str(refused.value)
    assert "\n" not in text and len(text) < 300
    return text


@pytest.mark.parametrize(
    ("model_type", "task"),
    [("bert", "sequence-classification"), ("gpt2", "causal-lm"), ("marian", "seq2seq")],
)
def test_a_tokenizer_that_does_not_fit(model_type: str, task: str, tiny: Any) -> None:
    splitter = Splitter(tiny.spec(model_type, task))
    embedding = splitter.build_embedding(splitter.initial_weights(seed=1))
    text = _refusal(lambda: embedding({"input_ids": torch.tensor([[3, 61]])}))
    assert "token 61" in text and "50 tokens" in text and "tokenizer" in text


@pytest.mark.parametrize(
    ("model_type", "task", "most"),
    [
        ("bert", "sequence-classification", 512),
        ("roberta", "sequence-classification", 511),
        ("marian", "seq2seq", 40),
        ("gpt2", "causal-lm", 1024),
    ],
)
def test_sequences_longer_than_the_positions(
    model_type: str, task: str, most: int, tiny: Any
) -> None:
    splitter = Splitter(tiny.spec(model_type, task))
    assert splitter.most_tokens == most
    embedding = splitter.build_embedding(splitter.initial_weights(seed=1))
    embedding({"input_ids": torch.ones(1, most, dtype=torch.long) * 3})  # the last that fits
    text = _refusal(lambda: embedding({"input_ids": torch.ones(1, most + 1, dtype=torch.long) * 3}))
    assert f"{most + 1} tokens" in text and f"only {most} positions" in text


@pytest.mark.parametrize(
    ("model_type", "task", "label", "highest"),
    [
        ("bert", "sequence-classification", 3, 2),
        ("bert", "token-classification", 7, 2),
        ("gpt2", "causal-lm", 50, 49),
        ("marian", "seq2seq", 50, 49),
        ("t5", "seq2seq", -3, 49),
    ],
)
def test_labels_out_of_range(
    model_type: str, task: str, label: int, highest: int, tiny: Any
) -> None:
    splitter = Splitter(tiny.spec(model_type, task))
    edge = splitter.build_edge(splitter.initial_weights(seed=1))
    batch = tiny.batch(model_type, task)
    labels = batch["labels"].clone()
    labels.view(-1)[1] = label
    hidden_BTD = torch.zeros(*batch["input_ids"].shape, 32)
    context = {**splitter.context(batch), "labels": labels}
    text = _refusal(lambda: edge(hidden_BTD, context))
    assert f"label {label}" in text and f"0 to {highest}" in text


def test_a_checkpoint_with_missing_tensors_below_adapters(tiny: Any, tmp_path: Path) -> None:
    spec = tiny.spec("llama", "causal-lm")
    save_whole(spec, Splitter(spec).initial_weights(seed=0), tmp_path)
    file, key = tmp_path / "model.safetensors", "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(file)
    del tensors[key]
    save_file(tensors, file, metadata={"format": "pt"})
    text = _refusal(
        lambda: make_spec("causal-lm", pretrained=str(tmp_path), lora=LoraConfig(rank=2))
    )
    assert key in text and "missing" in text


def test_a_model_without_a_usable_block_list() -> None:
    text = _refusal(lambda: make_spec("masked-lm", model_type="albert"))
    assert "albert" in text and "block 0 runs out of turn, or more than once" in text


def test_a_quantised_checkpoint(tiny: Any, tmp_path: Path) -> None:
    spec = tiny.spec("llama", "causal-lm")
    save_whole(spec, Splitter(spec).initial_weights(seed=1), tmp_path)
    file = tmp_path / "config.json"
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **quantised}))
    text = _refusal(lambda: make_spec("causal-lm", pretrained=str(tmp_path)))
    assert "is quantised" in text and "the one that it was made from" in text


def test_a_loss_that_reads_the_routers_of_all_blocks() -> None:
    config = {**OVERRIDES["mixtral"], "output_router_logits": True}
    text = _refusal(lambda: make_spec("causal-lm", model_type="mixtral", overrides=config))
    assert "output_router_logits must be false" in text
