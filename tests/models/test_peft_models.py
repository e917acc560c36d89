"""Law: a user's PeftModel trains in parts as it trains whole, and only what peft saves travels."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.models.splitter import Splitter
from tests.closeness import assert_near, near
from tests.models import own_models
from tests.models.test_own_models import CALM, by_hand, cut_up
from tests.rounds import SGD, Cut, train_split
from tests.skeletons import skeletons_are_copied  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'. . LoRA tensor.s. have invalid shape"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True."),
]
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CUT = Cut(stops=(1, 2), micro_batches=(4, 2))
PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return str(folder)


def adapted(base: str, **lora: Any) -> Any:
    """A PeftModel whose adapters are not zero, else half of their gradients vanish."""
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    settings = {"r": 4, "target_modules": "all-linear", **lora}
    return moved(get_peft_model(model, LoraConfig(**settings)))


def moved(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "lora_B" in key or "embedding_B" in key:
                tensor.normal_(0, 0.1)
    return model


def answers(seed: int) -> dict[str, Tensor]:
    """Texts whose loss is on their last tokens alone, as of a completion."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (6, 8), generator=random)
    asked = torch.randint(1, 6, (6, 1), generator=random)
    labels = ids.masked_fill(torch.arange(8) < asked, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def own_loss(model: Any, step: dict[str, Tensor]) -> Tensor:
    return model(**step).loss


def split(model: Any, **choices: Any) -> SplitModel:
    return SplitModel(model, batch_size=6, length=8, **choices)


def train(model: Any, adamw: bool, steps: int, **choices: Any) -> tuple[Any, Any]:
    """Losses and adapters as peft saves them, of the parts and of the whole model."""
    described = split(model, **choices)
    batches = [answers(seed) for seed in range(steps)]
    parts = [cut_up(batch, CUT.micro_batches) for batch in batches]
    rule = CALM if adamw else SGD
    weights = {key: tensor.clone() for key, tensor in described.weights().items()}
    cut = replace(CUT, stops=CUT.stops[: described.splitter.num_blocks])
    losses, trained = train_split(described.splitter, weights, cut, parts, rule)
    expected = by_hand(model, own_loss, batches, adamw)
    (adapter,) = model.peft_config
    saved = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return (losses, {PREFIX + k: t for k, t in trained.items()}), (tuple(expected), saved)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "patterns": {
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"layers.1.mlp.up_proj": 32},
        "use_rslora": True,
        "layers_to_transform": [0, 1],
        "target_modules": ["q_proj", "up_proj"],
    },
    "dora": {"use_dora": True},
    "head": {"modules_to_save": ["lm_head"], "target_modules": ["v_proj"]},
    "table": {"target_modules": ["embed_tokens", "q_proj"]},
    "some layers": {"target_modules": r".*layers\.[1]\..*(q|v)_proj", "lora_bias": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_equal_the_unsplit_peft_model(kind: str, base: str) -> None:
    (losses, ours), (expected, theirs) = train(adapted(base, **KINDS[kind]), adamw=True, steps=3)
    assert losses == near(expected)
    assert set(ours) == set(theirs)
    assert_near(ours, theirs)


def test_every_gradient_equals_the_unsplit_peft_models(base: str) -> None:
    model = adapted(base)
    before = deepcopy(get_peft_model_state_dict(model))
    (losses, ours), (expected, theirs) = train(model, adamw=False, steps=1)
    assert losses == near(expected)
    assert_near(ours, theirs)
    assert all(float((ours[k] - before[k]).abs().max()) > 1e-5 for k in before)


def test_the_users_model_stays_as_it_is(base: str) -> None:
    model = adapted(base)
    before = deepcopy(model.state_dict()), [m.training for m in model.modules()]
    split(model)
    assert model.config.use_cache
    assert all(torch.equal(model.state_dict()[key], t) for key, t in before[0].items())
    assert [m.training for m in model.modules()] == before[1]


def test_dropout_does_not_depend_on_the_cut(base: str) -> None:
    described = split(adapted(base, lora_dropout=0.3))
    assert described.splitter.drops and not split(adapted(base)).splitter.drops
    weights, steps = described.weights(), [cut_up(answers(1), (3, 3))]
    found = [
        train_split(
            described.splitter,
            weights,
            Cut(stops=stops, micro_batches=(3, 3)),
            steps,
            SGD,
            dropout_seed=7,
        )
        for stops in ((2,), (1, 2))
    ]
    assert found[0][0] == near(found[1][0])
    assert_near(found[0][1], found[1][1])


def test_what_travels_has_peft_s_names_and_order(base: str) -> None:
    model = adapted(base, modules_to_save=["lm_head"], target_modules=["q_proj", "v_proj"])
    described = split(model)
    assert described.keys == set(get_peft_model_state_dict(model))
    assert not described.hidden_keys & described.keys
    plain = split(adapted(base))
    sent = [PREFIX + key for key in plain.splitter.all_keys()]
    assert sent == list(get_peft_model_state_dict(plain.model))


def test_adapters_that_were_trained_elsewhere_are_saved_and_merged(
    base: str, tmp_path: Path
) -> None:
    model = adapted(base, **KINDS["patterns"])
    (_, ours), _ = train(deepcopy(model), adamw=True, steps=1)
    set_peft_model_state_dict(model, ours)
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path))
    assert_near(get_peft_model_state_dict(again), ours)
    batch = answers(3)
    with torch.no_grad():
        expected = model.eval()(**batch).loss
        assert again.eval()(**batch).loss == near(expected)
        assert again.merge_and_unload()(**batch).loss == near(expected)


def test_an_adapter_may_have_any_name(base: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=2, target_modules=["q_proj"])
    model = moved(get_peft_model(model, config, adapter_name="chat"))
    (losses, ours), (expected, theirs) = train(model, adamw=True, steps=1)
    assert losses == near(expected)
    assert_near(ours, theirs)


def test_half_of_an_adapter_may_be_frozen(base: str) -> None:
    model = adapted(base)
    for key, tensor in model.named_parameters():
        if "lora_A" in key:
            tensor.requires_grad = False
    (losses, ours), (expected, theirs) = train(model, adamw=True, steps=2)
    assert losses == near(expected)
    assert_near(ours, theirs)


def test_blocks_without_adapters_may_stay_at_the_control_unit(base: str) -> None:
    model = adapted(base, layers_to_transform=[1], target_modules=["q_proj", "up_proj"])
    assert split(model, hold_frozen=True).splitter.held_blocks == 1
    (losses, ours), (expected, theirs) = train(model, adamw=True, steps=3, hold_frozen=True)
    assert losses == near(expected)
    assert_near(ours, theirs)
    with pytest.raises(ModelError, match="nothing can be kept of the lower blocks"):
        split(adapted(base), hold_frozen=True)


def test_a_head_that_was_tied_trains_apart_from_its_table(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path)
    model = adapted(str(tmp_path), modules_to_save=["lm_head"], target_modules=["v_proj"])
    (losses, ours), (expected, theirs) = train(model, adamw=True, steps=2)
    assert losses == near(expected)
    assert_near(ours, theirs)


def test_a_checkpoint_with_other_values_on_a_machine_is_refused(base: str, tmp_path: Path) -> None:
    described = split(adapted(base))
    torch.manual_seed(9)
    folder = tmp_path / "other"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    splitter = described.splitter
    elsewhere = Splitter(replace(splitter.spec, pretrained=str(folder)))
    with pytest.raises(ModelError, match=r"holds another 'model\.layers.* copy the server's"):
        elsewhere.build_segment(0, 1, described.weights())


def two(base: str) -> Any:
    model = adapted(base)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def changed(base: str) -> Any:
    model = adapted(base)
    with torch.no_grad():
        model.get_input_embeddings().weight[3] += 1
    return model


def merged(base: str) -> Any:
    model = adapted(base)
    model.merge_adapter()
    return model


def idle(base: str) -> Any:
    return adapted(base, inference_mode=True)


def other(base: str, config: Any) -> Any:
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


def from_nowhere(_: str) -> Any:
    return get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), LoraConfig(r=2))


def injected(base: str) -> Any:
    return adapted(base).base_model.model


def of_a_module(_: str) -> Any:
    config = LoraConfig(r=2, target_modules=["linear1"])
    return get_peft_model(own_models.TextClassifier(), config)


def half(base: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


TEXT = "CAUSAL_LM"
REFUSED: dict[str, tuple[Any, str]] = {
    "several": (two, r"trains one adapter, .*default, other: call delete_adapter"),
    "changed": (changed, r"'model.embed_tokens.weight' .* is not that of .*save_pretrained"),
    "merged": (merged, r"is merged: call unmerge_adapter"),
    "idle": (idle, r"does not train: .*is_trainable=True"),
    "ia3": (lambda b: other(b, IA3Config(task_type=TEXT)), r"of type IA3: pass get_peft_model"),
    "prefix": (
        lambda b: other(b, PrefixTuningConfig(task_type=TEXT, num_virtual_tokens=2)),
        r"of type PREFIX_TUNING: pass",
    ),
    "prompt": (
        lambda b: other(b, PromptTuningConfig(task_type=TEXT, num_virtual_tokens=2)),
        r"of type PROMPT_TUNING: pass",
    ),
    "tokens": (
        lambda b: adapted(b, trainable_token_indices=[3]),
        r"with trainable_token_indices of LoraConfig, which reads more",
    ),
    "pissa": (lambda b: adapted(b, init_lora_weights="pissa"), r"is not that of"),
    "from nowhere": (from_nowhere, r"not loaded from a folder .*save_pretrained\(FOLDER\) ahead"),
    "injected": (injected, r"a lora\.Linear|pass what get_peft_model"),
    "module": (of_a_module, r"models of transformers only, .*merge_and_unload"),
    "half": (half, r"in float32, .*pass model\.float"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused_in_one_sentence(case: str, base: str) -> None:
    make, sentence = REFUSED[case]
    with pytest.raises(ModelError, match=sentence) as refused:
        split(make(base))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["shift_labels", "num_items_in_batch"])
def test_what_would_make_transformers_compute_another_loss_is_refused(name: str, base: str) -> None:
    splitter = split(AutoModelForCausalLM.from_pretrained(base)).splitter
    batch = {**answers(0), name: torch.ones(6)}
    with pytest.raises(ModelError, match=f"holds {name!r}, .*: leave it out"):
        splitter.context(batch)
