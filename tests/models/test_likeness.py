"""Law: no change of a live model is lost. What other machines do not build alike is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import PreTrainedConfig, PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.likeness import _CARRIED, _SET_BY_THE_CUT, refuse_differences
from collapipe_flwr.models.skeleton import build_module_skeleton, build_random, build_skeleton
from collapipe_flwr.models.split_model import SplitModel
from tests.models import own_models
from tests.models.conftest import OVERRIDES
from tests.models.test_split_model import CASES, texts
from tests.thorough import few

TASKS = {
    "image-classification": ("vit", "beit", "clip", "siglip"),
    "seq2seq": ("marian", "bart", "mbart", "m2m_100", "t5", "mt5", "whisper"),
}
USUAL = ("bert", "gpt2", "mixtral")
OWN = {kind for kind, _ in CASES.values()} | {own_models.Dropping, own_models.BatchNormed}


def other_than(value: Any) -> Any:
    """A value of the same kind that differs."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "_"
    if isinstance(value, PreTrainedConfig):
        changed = copy.deepcopy(value)
        changed.chunk_size_feed_forward = 7
        return changed
    if isinstance(value, Tensor):
        return value + 1
    if isinstance(value, (tuple, list)):
        return type(value)([*value, 1])
    if isinstance(value, (set, frozenset)):
        return type(value)([*value, "more"])
    if isinstance(value, dict):
        return {**value, "more": len}
    return 1 if value is None else (lambda *_: None)


@contextmanager
def noticed(live: nn.Module, rebuilt: nn.Module, *named: str) -> Iterator[None]:
    """The change that the body makes is refused, by names."""
    yield
    with pytest.raises(ModelError) as caught:
        refuse_differences(live, rebuilt, "build it so")
    assert all(name in str(caught.value) for name in named), (named, str(caught.value))


def change_everything(live: nn.Module, rebuilt: nn.Module) -> int:
    """Change each attribute of one module of each class, one at a time; how many there were."""
    refuse_differences(live, rebuilt, "build it so")
    changed, seen = 0, set[type]()
    for path, module in live.named_modules():
        if type(module) in seen:
            continue
        seen.add(type(module))
        for name, value in list(vars(module).items()):
            if name in _CARRIED:
                continue
            with noticed(live, rebuilt, name):
                vars(module)[name] = other_than(value)
            vars(module)[name] = value
            changed += 1
        with noticed(live, rebuilt, f"{path}.added".lstrip(".")):
            vars(module)["added"] = 1
        del vars(module)["added"]
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers[name]) is not None:
                with noticed(live, rebuilt, name):
                    module._buffers[name] = ~buffer if buffer.dtype == torch.bool else buffer + 1
                module._buffers[name] = buffer
        if module is not live:
            with noticed(live, rebuilt, f"{path}.training"):
                module.training = not module.training
            module.training = not module.training
    refuse_differences(live, rebuilt, "build it so")
    return changed


@pytest.mark.parametrize(
    "model_type",
    [*USUAL, *few(t for t in OVERRIDES if t not in USUAL)],
)
def test_every_change_of_a_librarys_model_is_noticed(model_type: str, tiny: Any) -> None:
    task = next((t for t, types in TASKS.items() if model_type in types), "causal-lm")
    if model_type in ("bert", "roberta", "distilbert", "deberta-v2", "modernbert", "electra"):
        task = "masked-lm"
    if model_type == "nystromformer":
        task = "sequence-classification"
    spec = tiny.spec(model_type, task)
    live = build_random(spec, seed=0).train()
    assert change_everything(live, build_skeleton(spec)) > 50


@pytest.mark.parametrize("kind", sorted(OWN, key=lambda kind: kind.__name__))
def test_every_change_of_a_users_module_is_noticed(kind: type[nn.Module]) -> None:
    rebuilt = build_module_skeleton(f"{kind.__module__}:{kind.__name__}", "{}")
    assert change_everything(kind(), rebuilt) > 50


def bert() -> PreTrainedModel:
    return own_models.BertForSequenceClassification(own_models.bert_config())


def _drop_a_layer(model: Any) -> None:
    model.bert.encoder.layer = model.bert.encoder.layer[:-1]


def _replace_head(model: Any) -> None:
    model.classifier = nn.Linear(32, 7)


def _more_dropout(model: Any) -> None:
    model.bert.encoder.layer[1].output.dropout.p = 0.5


def _normalise(model: Any) -> None:
    parametrizations.weight_norm(model.classifier)


def _own_train(model: Any) -> None:
    model.train = lambda *_: model


def _other_activation(model: Any) -> None:
    model.bert.encoder.layer[2].intermediate.intermediate_act_fn = nn.ReLU()


def _other_epsilon(model: Any) -> None:
    model.bert.encoder.layer[0].output.LayerNorm.eps = 0.1


def _hook_a_gradient(model: Any) -> None:
    model.classifier.weight.register_hook(lambda gradient: 2 * gradient)


def _move_a_constant(model: Any) -> None:
    model.bert.embeddings.position_ids = model.bert.embeddings.position_ids.flip(1)


def _keep_a_part_calm(model: Any) -> None:
    model.train().bert.encoder.eval()


def _share_a_parameter(model: Any) -> None:
    layers = model.bert.encoder.layer
    layers[1].output.dense.weight = layers[0].output.dense.weight


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_drop_a_layer, "bert.encoder.layer.3"),
        (_replace_head, "classifier.weight"),
        (_more_dropout, "bert.encoder.layer.1.output.dropout.p"),
        (_normalise, "classifier"),
        (_own_train, "train"),
        (_other_activation, "bert.encoder.layer.2.intermediate.intermediate_act_fn"),
        (_other_epsilon, "bert.encoder.layer.0.output.LayerNorm.eps"),
        (_hook_a_gradient, "classifier.weight"),
        (_move_a_constant, "bert.embeddings.position_ids"),
        (_keep_a_part_calm, "training"),
        (_share_a_parameter, "bert.encoder.layer.1.output.dense.weight"),
    ],
)
def test_a_changed_live_model_is_refused_where_it_is_described(
    change: Callable[[Any], None], named: str
) -> None:
    model = bert()
    SplitModel(model, batch_size=4, length=8, whole_batches=True)
    change(model)
    with pytest.raises(ModelError, match=f"cannot be split: .*{re.escape(named)}"):
        SplitModel(model, batch_size=4, length=8, whole_batches=True)


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_of_a_users_module_are_refused(register: str) -> None:
    model = own_models.TextClassifier()
    path, block = next((p, m) for p, m in model.named_modules() if isinstance(m, nn.LayerNorm))
    getattr(block, register)(lambda *_: None)
    with pytest.raises(ModelError, match=rf"{re.escape(path)}\._\w+_hooks"):
        SplitModel(model, example=texts(0))


def test_what_is_frozen_is_carried() -> None:
    model = bert()
    parameters = dict(model.named_parameters())
    for key in list(parameters)[::9]:
        parameter = parameters[key]
        model.requires_grad_(True)
        parameter.requires_grad = False
        splitter = SplitModel(model, batch_size=4, length=8, whole_batches=True).splitter
        assert splitter.constant_keys.intersection(splitter.all_keys()) == {key}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_")
def test_a_model_that_was_used_is_the_same_model() -> None:
    model = bert()
    model(input_ids=torch.ones(2, 8, dtype=torch.long), labels=torch.tensor([0, 1])).loss.backward()
    SplitModel(model.eval(), batch_size=4, length=8, whole_batches=True)
    model.gradient_checkpointing_enable()
    with pytest.raises(ModelError, match=r"gradient_checkpointing_disable\(\)"):
        SplitModel(model, batch_size=4, length=8)
    model.gradient_checkpointing_disable()
    SplitModel(model, batch_size=4, length=8, whole_batches=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("part", ["", "bert.encoder", "classifier"])
def test_other_precision_is_refused_also_of_one_part(dtype: torch.dtype, part: str) -> None:
    model = bert()
    model.get_submodule(part).to(dtype)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ModelError, match=rf"is {kind}: pass model\.float\(\)"):
        SplitModel(model, batch_size=4, length=8)
    SplitModel(model.float(), batch_size=4, length=8, whole_batches=True)


def test_what_is_not_compared_is_known() -> None:
    """Each of these is carried, refused elsewhere, or changes nothing of a built model."""
    assert len(_CARRIED) == 16 and len(_SET_BY_THE_CUT) == 9
