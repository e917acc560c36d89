"""Law: frozen blocks at the control unit compute, and train, what they do on devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.describing import keep_frozen, make_spec
from collapipe_flwr.models.front import FrontPart
from collapipe_flwr.models.saving import save_adapter
from collapipe_flwr.models.spec import LoraConfig, ModelSpec
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.models.splitter import Splitter
from tests.closeness import assert_near
from tests.models.conftest import OVERRIDES, TOKENS
from tests.models.test_lora import CASES, checkpoint, moved, options, peft_model
from tests.skeletons import skeletons_are_copied  # noqa: F401
from tests.thorough import few

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
FROZEN = 2


def frozen(spec: ModelSpec, blocks: int = FROZEN) -> ModelSpec:
    return replace(spec, frozen=Splitter(spec).front_keys(blocks))


def gradients(
    splitter: Splitter, weights: dict[str, Tensor], batch: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The loss, and the gradients of all parts that train, by key."""
    front = splitter.build_front(weights).train()
    segment = splitter.build_segment(0, splitter.num_blocks, weights).train()
    edge = splitter.build_edge(weights).train()
    hidden, context = splitter.embed(front, weights, batch)
    loss = edge(segment(hidden, context), context)
    loss.backward()
    named = {k: p for part in (front, segment, edge) for k, p in part.named_parameters()}
    return {"loss": loss, **{k: p.grad for k, p in named.items() if p.grad is not None}}


@pytest.mark.parametrize(
    ("model_type", "task", "edge_blocks"), few(CASES, 0, 3, 4, 5, 9, 14, 15, 16)
)
def test_the_same_loss_and_gradients_wherever_frozen_blocks_are(
    model_type: str, task: str, edge_blocks: int, tiny: Any
) -> None:
    spec = frozen(replace(tiny.spec(model_type, task), edge_blocks=edge_blocks))
    there, here = Splitter(spec), Splitter(keep_frozen(spec, without_dropout=True))
    at_most = there.num_blocks - 1
    assert here.held_blocks == min(FROZEN, at_most)
    assert here.num_blocks == there.num_blocks - here.held_blocks
    assert set(here.all_keys()) == set(there.all_keys())
    weights, batch = there.initial_weights(seed=1), tiny.batch(model_type, task)
    wanted = gradients(there, weights, batch)
    found = gradients(here, weights, batch)
    assert_near(found, wanted)
    assert not set(found) & set(spec.frozen) and len(found) > 2
    front = here.build_front(weights)
    assert isinstance(front, FrontPart) and set(front.state_dict()) == set(here.embedding_keys())


@pytest.mark.parametrize(
    ("model_type", "task"), [("bert", "sequence-classification"), ("gpt2", "causal-lm")]
)
def test_frozen_blocks_have_no_adapters_and_the_rest_trains_as_by_peft(
    model_type: str, task: str, tiny: Any, tmp_path: Path
) -> None:
    base = checkpoint(tiny, model_type, task, tmp_path)
    lora = LoraConfig(rank=2, alpha=8)
    spec = make_spec(task, pretrained=base, frozen_blocks=FROZEN, lora=lora)
    splitter = Splitter(keep_frozen(spec))
    assert splitter.held_blocks == FROZEN and not splitter.embedding_keys()
    everywhere = Splitter(make_spec(task, pretrained=base, lora=lora)).all_keys()
    assert 0 < len(splitter.all_keys()) < len(everywhere)
    weights = moved(splitter.initial_weights(seed=3))
    batch = tiny.batch(model_type, task)
    found = gradients(splitter, weights, batch)
    save_adapter(spec, weights, tmp_path / "adapter")
    reference = peft_model(spec, tmp_path / "adapter").train()
    loss = reference(**batch, **options(spec)).loss
    loss.backward()
    trained = [p.grad for p in reference.parameters() if p.grad is not None]
    assert len(trained) == len(found) - 1
    assert_near(found["loss"], loss)
    norms = sorted(float(g.norm()) for k, g in found.items() if k != "loss")
    assert norms == pytest.approx(sorted(float(g.norm()) for g in trained), rel=1e-4, abs=1e-7)


def spec_of(**settings: float) -> ModelSpec:
    overrides = {**OVERRIDES["bert"], **settings}
    task = "sequence-classification"
    return make_spec(task, model_type="bert", overrides=overrides, num_labels=3, **TOKENS)


@pytest.mark.parametrize("share", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_what_frozen_blocks_drop_is_refused_or_left_out(share: str) -> None:
    spec = frozen(spec_of(**{share: 0.1}))
    with pytest.raises(ModelError, match=r"draw dropout \(.*\).*set its share to 0.*dropout=off"):
        keep_frozen(spec)
    splitter = Splitter(keep_frozen(spec, without_dropout=True))
    front = splitter.build_front(splitter.initial_weights(seed=1)).train()
    batch = {"input_ids": torch.arange(3, 11).view(2, 4)}
    assert torch.equal(front(batch), front(batch))


def test_a_head_may_drop_what_it_likes() -> None:
    assert keep_frozen(frozen(spec_of(classifier_dropout=0.5))).held_blocks == FROZEN


def test_what_trains_stays_with_devices() -> None:
    with pytest.raises(ModelError, match=r"nothing can be kept.*freeze both"):
        keep_frozen(spec_of())
    with pytest.raises(
        ModelError, match=r"cannot keep 3 blocks: 'bert\.encoder\.layer\.2.*is trained"
    ):
        Splitter(replace(frozen(spec_of()), held_blocks=3))
    with pytest.raises(ModelError, match="4 stay at the control unit and 0 at the edge, so none"):
        Splitter(replace(frozen(spec_of(), 4), held_blocks=4))
    with pytest.raises(ModelError, match="frozen_blocks must be at most the 4 blocks"):
        make_spec(
            "sequence-classification",
            model_type="bert",
            frozen_blocks=5,
            num_labels=3,
            overrides=OVERRIDES["bert"],
            **TOKENS,
        )
    assert keep_frozen(frozen(spec_of(), 4)).held_blocks == 3  # one is left for devices


def test_a_live_model_whose_lower_blocks_are_frozen_is_held() -> None:
    model = Splitter(spec_of()).build_whole(Splitter(spec_of()).initial_weights(seed=1))
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:FROZEN]):
        part.requires_grad_(False)
    split = SplitModel(model, batch_size=2, length=8, hold_frozen=True)
    assert split.splitter.held_blocks == FROZEN
