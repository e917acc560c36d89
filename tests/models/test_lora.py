"""Law: adapters on parts train as peft trains them on the whole model, and only they travel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import BertForMaskedLM

from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.models import next_tokens
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.saving import save_adapter, save_whole
from collapipe_flwr.models.spec import BatchShape, LoraConfig, ModelSpec, spec_of
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.models.tasks import find_auto_class
from tests.closeness import assert_near
from tests.models.conftest import VOCABULARY
from tests.skeletons import skeletons_are_copied  # noqa: F401
from tests.thorough import few

# peft asks transformers for a property under its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
LORA = LoraConfig(rank=2, alpha=8)
CASES = [
    ("bert", "sequence-classification", 0),
    ("distilbert", "sequence-classification", 0),
    ("roberta", "token-classification", 1),
    ("modernbert", "sequence-classification", 0),
    ("deberta-v2", "token-classification", 0),
    ("gpt2", "causal-lm", 1),
    ("llama", "causal-lm", 2),
    ("qwen3", "causal-lm", 1),
    ("gemma", "causal-lm", 0),
    ("gemma3_text", "causal-lm", 1),
    ("smollm3", "causal-lm", 0),
    ("olmo2", "causal-lm", 1),
    ("phi3", "causal-lm", 0),
    ("marian", "seq2seq", 0),
    ("t5", "seq2seq", 0),
    ("vit", "image-classification", 0),
    ("opt", "causal-lm", 1),  # without a record
    ("lfm2", "causal-lm", 1),
]


def checkpoint(tiny: Any, model_type: str, task: str, folder: Path) -> str:
    """A random model saved as the library saves it."""
    spec = tiny.spec(model_type, task)
    save_whole(spec, Splitter(spec).initial_weights(seed=1), folder / "base")
    return str(folder / "base")


def adapted(base: str, task: str, lora: LoraConfig = LORA, edge_blocks: int = 0) -> ModelSpec:
    return make_spec(task, pretrained=base, edge_blocks=edge_blocks, lora=lora)


def moved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The zero halves of the adapters set to something: else half of the gradients vanish."""
    torch.manual_seed(5)
    return {
        key: torch.randn_like(value) * 0.1 if "lora_B" in key else value
        for key, value in weights.items()
    }


def peft_model(spec: ModelSpec, folder: Path) -> Any:
    from peft import PeftModel  # slow; other workers do without

    builder = find_auto_class(spec.task, Splitter(spec).config)
    base = builder.from_pretrained(spec.pretrained)
    return PeftModel.from_pretrained(base, str(folder), is_trainable=True)


def options(spec: ModelSpec) -> dict[str, Any]:
    cached = spec.task in ("causal-lm", "seq2seq")
    return {"use_cache": False} if cached else {}


def _parts(splitter: Splitter, weights: dict[str, Tensor]) -> Iterator[Any]:
    yield splitter.build_embedding(weights)
    stops = [0, 1, splitter.num_blocks]
    for first, stop in pairwise(stops):
        yield splitter.build_segment(first, stop, weights)
    yield splitter.build_edge(weights)


def _loss(parts: list[Any], batch: dict[str, Tensor], context: dict[str, Tensor]) -> Tensor:
    embedding, *segments, edge = parts
    hidden = embedding(batch)
    for segment in segments:
        hidden = segment(hidden, context)
    loss: Tensor = edge(hidden, context)
    return loss


# A head that trains, blocks on the edge, Conv1D, windows, two stacks, pictures; without a record.
@pytest.mark.parametrize(
    ("model_type", "task", "edge_blocks"), few(CASES, 0, 2, 5, 6, 9, 14, 15, 16)
)
def test_three_steps_equal_peft_on_the_whole_model(
    model_type: str, task: str, edge_blocks: int, tiny: Any, tmp_path: Path
) -> None:
    base = checkpoint(tiny, model_type, task, tmp_path)
    spec = adapted(base, task, edge_blocks=edge_blocks)
    splitter = Splitter(spec)
    weights = moved(splitter.initial_weights(seed=3))
    save_adapter(spec, weights, tmp_path / "first")
    reference = peft_model(spec, tmp_path / "first").train()
    batch = tiny.batch(model_type, task)
    parts = [part.train() for part in _parts(splitter, weights)]
    mine = [p for part in parts for p in part.parameters() if p.requires_grad]
    theirs = [p for p in reference.parameters() if p.requires_grad]
    assert sum(p.numel() for p in mine) == sum(p.numel() for p in theirs)
    steps = AdamW(mine, lr=1e-2), AdamW(theirs, lr=1e-2)
    for _ in range(3):
        for optimizer in steps:
            optimizer.zero_grad()
        torch.manual_seed(0)
        loss = _loss(parts, batch, splitter.context(batch))
        loss.backward()
        torch.manual_seed(0)
        expected = reference(**batch, **options(spec)).loss
        expected.backward()
        assert_near(loss, expected)
        for optimizer in steps:
            optimizer.step()
    trained = {key: value for part in parts for key, value in part.state_dict().items()}
    assert set(trained) == set(splitter.all_keys())
    save_adapter(spec, trained, tmp_path / "trained")
    found = peft_model(spec, tmp_path / "trained")
    assert_near(dict(found.named_parameters()), dict(reference.named_parameters()))
    assert any(float((trained[k] - weights[k]).abs().max()) > 1e-3 for k in trained)


def test_only_adapters_and_the_head_travel(tiny: Any, tmp_path: Path) -> None:
    task = "sequence-classification"
    splitter = Splitter(adapted(checkpoint(tiny, "bert", task, tmp_path), task))
    keys = set(splitter.all_keys())
    assert {k for k in keys if "lora_" not in k} == {"classifier.weight", "classifier.bias"}
    assert len(keys) == 4 * 2 * 2 + 2
    assert splitter.embedding_keys() == ()
    assert not splitter.constant_keys & keys
    again = Splitter(spec_of(splitter.spec.to_json()))
    assert again.all_keys() == splitter.all_keys()
    assert set(splitter.build_segment(0, 2, splitter.initial_weights(0)).state_dict()) == {
        key for key in keys if ".layer.0." in key or ".layer.1." in key
    }


def test_frozen_weights_may_be_handed_over_instead(tiny: Any, tmp_path: Path) -> None:
    """A member without the checkpoint works with what another one reads for it."""
    base = checkpoint(tiny, "llama", "causal-lm", tmp_path)
    splitter = Splitter(adapted(base, "causal-lm"))
    weights = splitter.initial_weights(seed=1)
    frozen = splitter.read_resident(splitter.resident_keys_of_segment(0, 2))
    (tmp_path / "base").rename(tmp_path / "gone")
    elsewhere = Splitter(splitter.spec)
    with pytest.raises(ModelError, match="cannot read the checkpoint"):
        elsewhere.build_segment(0, 2, weights)
    part = elsewhere.build_segment(0, 2, {**weights, **frozen})
    assert set(part.state_dict()) == set(splitter.segment_keys(0, 2))


def test_a_frozen_layer_below_the_head_that_the_checkpoint_lacks_travels(
    tiny: Any, tmp_path: Path
) -> None:
    base = checkpoint(tiny, "bert", "masked-lm", tmp_path)  # no pooler
    splitter = Splitter(adapted(base, "sequence-classification"))
    assert splitter.spec.absent == ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
    assert set(splitter.spec.absent) <= set(splitter.edge_keys())
    assert set(splitter.spec.absent) <= splitter.constant_keys
    assert set(splitter.spec.absent) <= set(splitter.initial_weights(seed=1))


def test_constants_that_checkpoints_leave_out_are_computed(tiny: Any, tmp_path: Path) -> None:
    base = checkpoint(tiny, "marian", "seq2seq", tmp_path)
    plain = Splitter(make_spec("seq2seq", pretrained=base))
    sinusoids = plain.initial_weights(seed=1)["model.encoder.embed_positions.weight"]
    splitter = Splitter(adapted(base, "seq2seq"))
    assert all("lora_" in key for key in splitter.all_keys())
    part = splitter.build_embedding({})
    assert torch.equal(part.model.model.encoder.embed_positions.weight, sinusoids)


def test_gradients_stop_where_nothing_below_learns(tiny: Any, tmp_path: Path) -> None:
    base = checkpoint(tiny, "gpt2", "causal-lm", tmp_path)
    splitter = Splitter(adapted(base, "causal-lm"))
    batch = tiny.batch("gpt2", "causal-lm")
    parts = list(_parts(splitter, splitter.initial_weights(seed=1)))
    assert not parts[0](batch).requires_grad
    _loss(parts, batch, splitter.context(batch)).backward()
    for part in parts:
        for key, parameter in part.named_parameters():
            assert (parameter.grad is not None) == ("lora_" in key), key


def test_the_profile_knows_what_is_frozen(tiny: Any, tmp_path: Path) -> None:
    base = checkpoint(tiny, "llama", "causal-lm", tmp_path)
    full = profile_model(
        Splitter(make_spec("causal-lm", pretrained=base)), BatchShape(source_length=8)
    )
    splitter = Splitter(adapted(base, "causal-lm"))
    lora = profile_model(splitter, BatchShape(source_length=8))
    weights = splitter.initial_weights(seed=1)
    sent = sum(weights[key].numel() * 4 for key in splitter.segment_keys(1, 2))
    block, before = lora.blocks[1], full.blocks[1]
    assert block.parameter_bytes == sent
    assert block.state_bytes == before.parameter_bytes + 4 * sent
    assert block.forward_flop > before.forward_flop
    assert before.forward_flop < block.backward_flop < 0.75 * before.backward_flop
    assert lora.embedding.backward_flop == 0
    assert lora.blocks[0].backward_flop < block.backward_flop  # no gradient for the embedding
    assert lora.embedding.parameter_bytes == 0


def test_the_profile_knows_that_frozen_heads_work_piece_by_piece(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 tokens' scores and gradients as many are there as a piece has."""
    base = checkpoint(tiny, "llama", "causal-lm", tmp_path)
    splitter = Splitter(adapted(base, "causal-lm"))
    shape = BatchShape(source_length=8)
    head = profile_model(splitter, shape).decoder
    live = head.stash_bytes + head.passing_bytes
    assert live > 3 * 8 * VOCABULARY * 4
    assert head.piece_stash_bytes == 8 * splitter.config.hidden_size * 4
    monkeypatch.setattr(next_tokens, "PIECE_BYTES", 4 * VOCABULARY * 6)
    assert profile_model(splitter, shape).decoder.piece_bytes == pytest.approx(live * 6 / 8)
    full = Splitter(make_spec("causal-lm", pretrained=base))
    assert profile_model(full, shape).decoder.piece_bytes == inf


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.02), ("int8", 0.03)])
@pytest.mark.parametrize(
    ("model_type", "task"), [("llama", "causal-lm"), ("gpt2", "causal-lm"), ("t5", "seq2seq")]
)
def test_narrow_frozen_weights_save_memory_and_cost_their_rounding(
    model_type: str, task: str, dtype: str, tolerance: float, tiny: Any, tmp_path: Path
) -> None:
    base = checkpoint(tiny, model_type, task, tmp_path)
    exact = Splitter(adapted(base, task))
    spec = replace(exact.spec, lora=replace(LORA, target_modules=exact.spec.lora.target_modules))
    narrow = Splitter(replace(spec, lora=replace(spec.lora, frozen_dtype=dtype)))
    weights, batch = moved(exact.initial_weights(seed=2)), tiny.batch(model_type, task)
    losses, gradients, held = [], [], []
    for splitter in (exact, narrow):
        parts = list(_parts(splitter, weights))
        loss = _loss(parts, batch, splitter.context(batch))
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for part in parts for p in part.parameters() if p.requires_grad])
        held.append(parts[1].held_bytes())
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    difference = torch.cat([(a - b).flatten() for a, b in zip(*gradients, strict=True)]).norm()
    size = torch.cat([a.flatten() for a in gradients[0]]).norm()
    assert 0 < difference / size < 5 * tolerance
    assert held[1] < (0.65 if dtype == "bfloat16" else 0.5) * held[0]


def test_a_checkpoint_as_narrow_as_the_memory_loses_nothing(tiny: Any, tmp_path: Path) -> None:
    spec = tiny.spec("llama", "causal-lm")
    weights = Splitter(spec).initial_weights(seed=1)
    rounded = {key: value.bfloat16().float() for key, value in weights.items()}
    save_whole(spec, rounded, tmp_path / "base")
    base, batch = str(tmp_path / "base"), tiny.batch("llama", "causal-lm")
    exact = Splitter(adapted(base, "causal-lm"))
    narrow = Splitter(adapted(base, "causal-lm", replace(LORA, frozen_dtype="bfloat16")))
    first = moved(exact.initial_weights(seed=2))
    losses = [_loss(list(_parts(s, first)), batch, s.context(batch)) for s in (exact, narrow)]
    assert_near(*losses)


def test_a_merged_model_loads_without_peft_and_computes_the_same(tiny: Any, tmp_path: Path) -> None:
    task = "sequence-classification"
    spec = adapted(checkpoint(tiny, "roberta", task, tmp_path), task)
    splitter = Splitter(spec)
    weights, batch = moved(splitter.initial_weights(seed=1)), tiny.batch("roberta", task)
    save_whole(spec, weights, tmp_path / "merged")
    loaded = find_auto_class(task, splitter.config).from_pretrained(tmp_path / "merged").eval()
    expected = splitter.build_whole(weights)(**batch).logits
    assert_near(loaded(**batch).logits, expected)


def test_refusals_name_the_way_out(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = checkpoint(tiny, "bert", "sequence-classification", tmp_path)
    lost = replace(LORA, target_modules=("q_proj",))
    with pytest.raises(ModelError, match=r"q_proj.*its linear layers are .*query"):
        adapted(base, "sequence-classification", lost)
    BertForMaskedLM(Splitter(tiny.spec("bert", "masked-lm", ties="rows")).config).save_pretrained(
        tmp_path / "tied"
    )
    with pytest.raises(ModelError, match="tied"):
        table = replace(LORA, modules_to_save=("word_embeddings",))
        adapted(str(tmp_path / "tied"), "masked-lm", table)
    with pytest.raises(ConfigError, match=r"lora\.rank must be at least 0, got -1"):
        LoraConfig(rank=-1)
    with pytest.raises(ModelError, match="rank"):  # 0 asks for no adapters, so none are described
        ModelSpec(task="causal-lm", config_json="{}", lora=LoraConfig(rank=0))
    assert adapted(base, "sequence-classification", LoraConfig(rank=0)).lora is None
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[lora\]"):
        adapted(base, "sequence-classification")


def test_4_bits_without_bitsandbytes_name_the_extra(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = checkpoint(tiny, "llama", "causal-lm", tmp_path)
    splitter = Splitter(adapted(base, "causal-lm", replace(LORA, frozen_dtype="nf4")))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"^lora\.frozen-dtype: .*bitsandbytes.*\[nf4\]"):
        profile_model(splitter, BatchShape(source_length=8))


def test_a_name_to_train_in_full_that_no_module_has_is_refused(tiny: Any, tmp_path: Path) -> None:
    task = "sequence-classification"
    base = checkpoint(tiny, "bert", task, tmp_path)
    with pytest.raises(ModelError, match=r"'clasifier', but no .* did you mean 'classifier'\?"):
        adapted(base, task, replace(LORA, modules_to_save=("clasifier",)))


def test_only_a_head_of_the_checkpoint_may_stay_frozen(tiny: Any, tmp_path: Path) -> None:
    task, pooler = "sequence-classification", replace(LORA, modules_to_save=("pooler",))
    kept = adapted(checkpoint(tiny, "bert", task, tmp_path / "with"), task, pooler)
    assert "classifier.weight" not in Splitter(kept).all_keys()
    headless = checkpoint(tiny, "bert", "masked-lm", tmp_path / "without")
    with pytest.raises(ModelError, match=r"'pooler' leaves out 'classifier' .* stay random"):
        adapted(headless, task, pooler)


def test_a_large_table_is_widened_piece_by_piece(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, batch = checkpoint(tiny, "llama", "causal-lm", tmp_path), tiny.batch("llama", "causal-lm")
    splitter = Splitter(adapted(base, "causal-lm", replace(LORA, frozen_dtype="int8")))
    weights = moved(splitter.initial_weights(seed=2))
    results = []
    for elements in (10**6, 100):
        monkeypatch.setattr("collapipe_flwr.models.lora._CHUNK", elements)
        parts = list(_parts(splitter, weights))
        loss = _loss(parts, batch, splitter.context(batch))
        loss.backward()
        results.append(
            [loss, *(p.grad for part in parts for p in part.parameters() if p.grad is not None)]
        )
    assert len(results[0]) > 5
    assert_near(*results)
