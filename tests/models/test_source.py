"""A checkpoint read tensor by tensor gives what the library's loader gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, BertModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.checkpoint import CheckpointSource
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.saving import save_whole
from collapipe_flwr.models.splitter import Splitter
from tests.thorough import few

CASES = [
    ("bert", "masked-lm"),
    ("vit", "image-classification"),
    ("t5", "seq2seq"),
    ("bart", "seq2seq"),
    ("marian", "seq2seq"),
    ("gpt2", "causal-lm"),
    ("gemma", "causal-lm"),
]


@pytest.mark.parametrize(("model_type", "task"), CASES)
@pytest.mark.parametrize("shard_size", few(["5GB", "20KB"], 1))
def test_every_tensor_equals_that_of_the_loader(
    model_type: str, task: str, shard_size: str, tiny: Any, tmp_path: Path
) -> None:
    drawn = Splitter(tiny.spec(model_type, task, ties="rows"))  # tied on disk, as published ones
    model = drawn.build_whole(drawn.initial_weights(seed=1))
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    spec = make_spec(task, pretrained=str(tmp_path))
    expected = Splitter(spec).initial_weights(seed=9)
    source = CheckpointSource(spec)
    for key, value in expected.items():
        assert torch.equal(source.read(key), value), key


@pytest.mark.parametrize("shard_size", few(["5GB", "20KB"], 1))
def test_a_checkpoint_is_read_from_the_users_home(
    shard_size: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    drawn = Splitter(tiny.spec("bert", "masked-lm"))
    model = drawn.build_whole(drawn.initial_weights(seed=1))
    model.save_pretrained(tmp_path / "mine", max_shard_size=shard_size)
    spec = make_spec("masked-lm", pretrained="~/mine")
    loaded, source = Splitter(spec).initial_weights(seed=9), CheckpointSource(spec)
    key = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(loaded[key], model.state_dict()[key])
    assert torch.equal(source.read(key), loaded[key])


def test_a_body_alone_is_found_under_the_task_models_names(tiny: Any, tmp_path: Path) -> None:
    config = Splitter(tiny.spec("bert", "sequence-classification")).config
    body = BertModel(config)
    body.save_pretrained(tmp_path)
    source = CheckpointSource(
        make_spec("sequence-classification", pretrained=str(tmp_path), num_labels=3)
    )
    for key, value in body.state_dict().items():
        assert torch.equal(source.read(f"bert.{key}"), value)
    assert "classifier.weight" not in source
    with pytest.raises(ModelError, match=r"lacks the tensor 'classifier.weight'"):
        source.read("classifier.weight")


def test_experts_in_pieces_are_joined_in_their_order(tiny: Any, tmp_path: Path) -> None:
    """Checkpoints keep every expert apart; by name the eleventh would stand behind the first."""
    spec = tiny.spec("mixtral", "causal-lm")
    config = json.dumps({**json.loads(spec.config_json), "num_local_experts": 12})
    drawn = Splitter(replace(spec, config_json=config))
    model = drawn.build_whole(drawn.initial_weights(seed=1))
    model.save_pretrained(tmp_path)
    assert any(".experts.11." in key for key in load_file(tmp_path / "model.safetensors"))
    source = CheckpointSource(make_spec("causal-lm", pretrained=str(tmp_path)))
    for key, value in model.state_dict().items():
        assert torch.equal(source.read(key), value), key


def test_a_missing_shard_or_format_is_one_sentence(tiny: Any, tmp_path: Path) -> None:
    spec = tiny.spec("bert", "masked-lm")
    save_whole(spec, Splitter(spec).initial_weights(seed=1), tmp_path)
    found = make_spec("masked-lm", pretrained=str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        CheckpointSource(found)
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="cannot read the checkpoint"):
        CheckpointSource(found)
    save_file(weights, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    assert "cls.predictions.bias" in CheckpointSource(found)
    AutoModelForMaskedLM.from_pretrained(tmp_path)
