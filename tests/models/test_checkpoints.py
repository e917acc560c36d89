"""First weights, checkpoints in, folders out: values survive every way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    BertModel,
    GenerationConfig,
)

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.saving import save_whole
from collapipe_flwr.models.splitter import Splitter
from tests.full_disk import full_disk
from tests.power_cuts import rebuilt, watched
from tests.thorough import few


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return set(left) == set(right) and all(torch.equal(left[key], right[key]) for key in left)


def test_a_seed_decides_the_first_weights_and_nothing_else(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("bert", "sequence-classification"))
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    first = splitter.initial_weights(seed=1)
    assert torch.equal(torch.rand(1), expected)  # the caller's random numbers go on undisturbed
    assert _equal(first, splitter.initial_weights(seed=1))
    assert not _equal(first, splitter.initial_weights(seed=2))


@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        ("bert", "sequence-classification"),
        ("gpt2", "causal-lm"),
        ("vit", "image-classification"),
        ("marian", "seq2seq"),
        ("bart", "seq2seq"),
        ("t5", "seq2seq"),
    ],
)
def test_a_saved_model_loads_with_equal_weights(
    model_type: str, task: str, tiny: Any, tmp_path: Path
) -> None:
    spec = tiny.spec(model_type, task)
    splitter = Splitter(spec)
    weights = splitter.initial_weights(seed=1)
    for key in set(weights) - splitter.constant_keys:  # as training would leave them
        weights[key] = weights[key] + torch.rand_like(weights[key])
    save_whole(spec, weights, tmp_path)
    whole = splitter.build_whole(weights)
    loaded = type(whole).from_pretrained(tmp_path)
    found = loaded.state_dict()
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert _equal(found, whole.state_dict())
    again = make_spec(task, pretrained=str(tmp_path))
    assert _equal(Splitter(again).initial_weights(seed=0), weights)


@pytest.mark.parametrize("model_type", few(["bamba", "falcon_h1"], 1))
def test_a_configuration_with_infinities_survives_saving(
    model_type: str, tiny: Any, tmp_path: Path
) -> None:
    """transformers writes them as objects, since JSON has no such numbers."""
    spec = tiny.spec(model_type, "causal-lm")
    save_whole(spec, Splitter(spec).initial_weights(seed=1), tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    batch = tiny.batch(model_type, "causal-lm")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(**batch, use_cache=False).loss
    splitter = Splitter(make_spec("causal-lm", pretrained=str(tmp_path)))
    weights, context = splitter.initial_weights(seed=0), splitter.context(batch)
    hidden_BTD = splitter.build_embedding(weights)(batch)
    for block in range(splitter.num_blocks):
        hidden_BTD = splitter.build_segment(block, block + 1, weights)(hidden_BTD, context)
    assert torch.equal(splitter.build_edge(weights)(hidden_BTD, context), expected)


def test_greedy_text_survives_saving(tiny: Any, tmp_path: Path) -> None:
    spec = tiny.spec("marian", "seq2seq")
    splitter = Splitter(spec)
    weights = splitter.initial_weights(seed=4)
    save_whole(spec, weights, tmp_path)
    batch = tiny.batch("marian", "seq2seq")
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    models = (splitter.build_whole(weights), AutoModelForSeq2SeqLM.from_pretrained(tmp_path))
    texts = [model.generate(**inputs, max_new_tokens=6, do_sample=False) for model in models]
    assert torch.equal(*texts)
    assert (texts[0][:, 0] == 0).all()  # the decoder's start


def test_a_body_without_a_head_gets_a_fresh_seeded_one(tiny: Any, tmp_path: Path) -> None:
    config = Splitter(tiny.spec("bert", "sequence-classification")).config
    body = BertModel(config)
    body.save_pretrained(tmp_path)
    spec = make_spec("sequence-classification", pretrained=str(tmp_path), num_labels=7)
    splitter = Splitter(spec)
    one, same, other = (splitter.initial_weights(seed=seed) for seed in (1, 1, 2))
    assert one["classifier.weight"].shape == (7, 32)
    assert _equal(one, same)
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])
    for key, value in body.state_dict().items():
        assert torch.equal(one[f"bert.{key}"], value)
        assert torch.equal(other[f"bert.{key}"], value)


def test_another_number_of_labels_replaces_the_head(tiny: Any, tmp_path: Path) -> None:
    spec = tiny.spec("bert", "sequence-classification")
    save_whole(spec, Splitter(spec).initial_weights(seed=1), tmp_path)
    kept = make_spec("sequence-classification", pretrained=str(tmp_path))
    grown = make_spec("sequence-classification", pretrained=str(tmp_path), num_labels=5)
    assert Splitter(kept).initial_weights(seed=1)["classifier.bias"].shape == (3,)
    assert Splitter(grown).initial_weights(seed=1)["classifier.bias"].shape == (5,)
    AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_a_checkpoint_with_its_own_output_table_keeps_it(tiny: Any, tmp_path: Path) -> None:
    """T5 1.1: the configuration ties lm_head to the shared table, the checkpoint does not."""
    model = Splitter(tiny.spec("t5", "seq2seq"))
    weights = model.initial_weights(seed=1)
    whole = model.build_whole(weights)
    whole.lm_head.weight = torch.nn.Parameter(torch.rand_like(whole.lm_head.weight))
    whole.all_tied_weights_keys.pop("lm_head.weight")
    whole.save_pretrained(tmp_path)
    spec = make_spec("seq2seq", pretrained=str(tmp_path))
    assert spec.untied == ("lm_head.weight",)
    splitter = Splitter(spec)
    loaded = splitter.initial_weights(seed=0)
    assert torch.equal(loaded["lm_head.weight"], whole.lm_head.weight)
    batch = tiny.batch("t5", "seq2seq")
    again = splitter.build_whole(loaded)(**batch, use_cache=False)
    assert torch.equal(again.loss, whole(**batch, use_cache=False).loss)


@pytest.mark.parametrize("ties", ["untie", "rows"])
@pytest.mark.parametrize(("model_type", "task"), [("gpt2", "causal-lm"), ("bart", "seq2seq")])
def test_a_tied_checkpoint_starts_with_equal_tables(
    model_type: str, task: str, ties: str, tiny: Any, tmp_path: Path
) -> None:
    """Whatever becomes of the tie, the first loss is that of the checkpoint."""
    source = Splitter(tiny.spec(model_type, task, ties="rows"))
    whole = source.build_whole(source.initial_weights(seed=6))
    whole.save_pretrained(tmp_path)
    splitter = Splitter(make_spec(task, pretrained=str(tmp_path), ties=ties))
    assert splitter.spec.untied == ()
    again = splitter.build_whole(splitter.initial_weights(seed=0))
    batch = tiny.batch(model_type, task)
    assert torch.equal(again(**batch, use_cache=False).loss, whole(**batch, use_cache=False).loss)


@pytest.mark.parametrize("name", ["{}/nowhere", "~nobody-here/nowhere"])
def test_a_missing_checkpoint_is_one_clear_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read the checkpoint"):
        make_spec("masked-lm", pretrained=name.format(tmp_path))


def test_a_checkpoint_without_weights_is_one_clear_error(tiny: Any, tmp_path: Path) -> None:
    spec = tiny.spec("bert", "masked-lm")
    Splitter(spec).config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot load the checkpoint"):
        Splitter(make_spec("masked-lm", pretrained=str(tmp_path))).initial_weights(seed=0)


def test_missing_and_broken_tensors_are_named(tiny: Any, tmp_path: Path) -> None:
    spec = tiny.spec("bert", "masked-lm")
    save_whole(spec, Splitter(spec).initial_weights(seed=0), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    key = "bert.encoder.layer.2.output.dense.weight"
    del tensors[key]
    save_file(tensors, file, metadata={"format": "pt"})
    broken = make_spec("masked-lm", pretrained=str(tmp_path))
    with pytest.raises(ModelError, match=f"1 missing tensors, first '{key}'"):
        Splitter(broken).initial_weights(seed=0)
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match="cannot load the checkpoint"):
        Splitter(broken).initial_weights(seed=0)


def test_a_body_of_another_size_is_named(tiny: Any, tmp_path: Path) -> None:
    spec = tiny.spec("bert", "masked-lm")
    save_whole(spec, Splitter(spec).initial_weights(seed=0), tmp_path)
    other = make_spec("masked-lm", pretrained=str(tmp_path), overrides={"intermediate_size": 64})
    with pytest.raises(ModelError, match="mismatched tensors"):
        Splitter(other).initial_weights(seed=0)


def test_a_tokenizer_larger_than_the_checkpoint_is_refused(tiny: Any, tmp_path: Path) -> None:
    spec = tiny.spec("bert", "masked-lm")
    save_whole(spec, Splitter(spec).initial_weights(seed=0), tmp_path)
    with pytest.raises(ModelError, match=r"60 tokens.*only 50"):
        make_spec("masked-lm", pretrained=str(tmp_path), vocab_size=60)


def test_a_regressor_becomes_a_classifier_where_classes_are_named(
    tiny: Any, tmp_path: Path
) -> None:
    config = Splitter(tiny.spec("bert", "sequence-classification")).config
    config.num_labels, config.problem_type = 1, "regression"
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    kept = Splitter(make_spec("sequence-classification", pretrained=str(tmp_path)))
    assert kept.config.problem_type == "regression"
    classes = {0: "calm", 1: "wild", 2: "odd"}
    splitter = Splitter(
        make_spec("sequence-classification", pretrained=str(tmp_path), id2label=classes)
    )
    edge = splitter.build_edge(splitter.initial_weights(seed=0))
    batch = tiny.batch("bert", "sequence-classification")
    hidden_BTD = torch.randn(4, 11, 32)
    logits = edge.outputs(hidden_BTD, batch)["logits"]
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"])
    assert torch.equal(edge(hidden_BTD, batch), expected)


def test_a_full_disk_is_one_sentence_and_no_half_of_a_model(tiny: Any, tmp_path: Path) -> None:
    spec = tiny.spec("bert", "sequence-classification")
    weights = Splitter(spec).initial_weights(seed=1)
    for folder in (tmp_path / "runs" / "model", tmp_path / "there"):
        words = f"cannot write the model to '{folder}': .*File too large"
        with full_disk(), pytest.raises(ModelError, match=words):
            save_whole(spec, weights, folder)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "README.md").touch()
    with full_disk(), pytest.raises(ModelError, match="cannot write the model"):
        save_whole(spec, weights, tmp_path / "there")
    assert not (tmp_path / "runs" / "model").exists()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["README.md"]


def test_after_every_cut_a_new_folder_holds_the_whole_model_or_is_not_there(
    tiny: Any, tmp_path: Path
) -> None:
    spec = tiny.spec("bert", "sequence-classification")
    root, weights = tmp_path / "disk", Splitter(spec).initial_weights(seed=1)
    root.mkdir()
    with watched(root) as disk:
        save_whole(spec, weights, root / "model", save_inputs=lambda f: (f / "inputs.txt").touch())
        disk.done = 1
    whole = {path.name: path.read_bytes() for path in (root / "model").iterdir()}
    assert "inputs.txt" in whole
    for number, (done, tree) in enumerate(disk.found):
        folder = rebuilt(tree, tmp_path / str(number)) / "model"
        found = folder.iterdir() if folder.exists() else ()
        assert {path.name: path.read_bytes() for path in found} in (
            [whole] if done else [{}, whole]
        )


def test_generation_settings_of_a_checkpoint_survive_training_and_saving(
    tiny: Any, tmp_path: Path
) -> None:
    """Several ends, penalties and forced tokens: the configuration has no place for them."""
    first, last = tmp_path / "first", tmp_path / "last"
    new = tiny.spec("llama", "causal-lm")
    save_whole(new, Splitter(new).initial_weights(seed=1), first)
    kept = {"eos_token_id": [2, 7, 9], "repetition_penalty": 1.3, "forced_eos_token_id": 7}
    wrong = {"temperature": 0.6, "do_sample": False}  # the library would not write these
    (first / "generation_config.json").write_text(json.dumps({**kept, **wrong}))
    spec = make_spec("causal-lm", pretrained=str(first))
    save_whole(spec, Splitter(spec).initial_weights(seed=0), last)
    found = GenerationConfig.from_pretrained(last)
    assert {key: getattr(found, key) for key in kept} == kept
