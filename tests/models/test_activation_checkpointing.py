"""Law: blocks that are computed again pass back the gradients of blocks that kept everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.randomness import SeededRandomness
from tests.closeness import assert_near
from tests.thorough import few

CASES = [
    ("bert", "masked-lm", {}),
    ("distilbert", "masked-lm", {}),
    ("deberta-v2", "masked-lm", {"shared": "sum"}),
    ("modernbert", "masked-lm", {}),
    ("vit", "image-classification", {}),
    ("bart", "seq2seq", {}),
    ("m2m_100", "seq2seq", {}),
    ("t5", "seq2seq", {"shared": "sum"}),
    ("whisper", "seq2seq", {}),
    ("gpt2", "causal-lm", {}),
    ("llama", "causal-lm", {}),
    ("qwen3", "causal-lm", {}),
    ("electra", "sequence-classification", {}),  # a type without a record
    ("opt", "causal-lm", {}),  # and two whose stack itself owns the list of blocks
    ("pegasus", "seq2seq", {}),
]

# A convolution reads the first block's input, too: what both pass back adds up in another order.
JOINED = ("deberta-v2",)


class Counted:
    """How often something was computed a second time, and how often at once."""

    def __init__(self, masks: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._masks = masks
        self.times = self.inside = self.most_inside = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.times += 1
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        with self._masks():
            yield
        self.inside -= 1


def _dropping(module: Any) -> Any:
    """The module in training, with dropout wherever it has any."""
    for inner in module.modules():
        if isinstance(inner, torch.nn.Dropout):
            inner.p = 0.2
        elif isinstance(getattr(inner, "dropout", None), float):  # given to a function
            inner.dropout = 0.2
    return module.train()


def _masks(model: torch.nn.Module) -> Callable[[], AbstractContextManager[None]]:
    return partial(SeededRandomness(model, 7).seed_at, 1, 2)


def _gradients(splitter: Splitter, batch: dict[str, Tensor], *, again: bool) -> Any:
    """What one segment passes back and learns, with dropout, for a gradient of its output."""
    weights = splitter.initial_weights(seed=5)
    segment = _dropping(splitter.build_segment(0, 3, weights))
    masks = _masks(segment.model)
    counted = Counted(masks)
    segment.compute_again(counted if again else None)
    hidden_BTD = splitter.build_embedding(weights)(batch).detach().requires_grad_()
    with masks():
        output_BTD = segment(hidden_BTD, splitter.context(batch))
    output_BTD.backward(output_BTD.detach().sin())
    assert (counted.times, counted.most_inside) == ((3, 1) if again else (0, 0))
    return output_BTD, hidden_BTD.grad, {k: p.grad for k, p in segment.named_parameters()}


@pytest.mark.parametrize(("model_type", "task", "choices"), few(CASES, *range(0, len(CASES), 2)))
def test_gradients_are_those_of_blocks_that_kept_everything(
    model_type: str, task: str, choices: dict[str, Any], tiny: Any
) -> None:
    splitter = Splitter(tiny.spec(model_type, task, **choices))
    batch = tiny.batch(model_type, task)
    output, hidden, learnt = _gradients(splitter, batch, again=False)
    output_again, hidden_again, learnt_again = _gradients(splitter, batch, again=True)
    exact = model_type not in JOINED
    assert torch.equal(output_again, output)
    _assert_equal(hidden_again, hidden, exact=exact)
    for key, gradient in learnt.items():
        _assert_equal(learnt_again[key], gradient, exact=exact)


@pytest.mark.parametrize("stops", few([((3,),), ((1, 3),), ((1, 2, 3),)], 1), ids=str)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("model_type", "task", "choices"),
    [
        ("opt", "causal-lm", {"edge_blocks": 1}),
        ("pegasus", "seq2seq", {}),
        ("electra", "sequence-classification", {"edge_blocks": 1}),
    ],
)
def test_types_without_a_record_drop_what_the_unsplit_model_drops(
    model_type: str, task: str, choices: Any, again: bool, stops: tuple[int, ...], tiny: Any
) -> None:
    splitter, batch = Splitter(tiny.spec(model_type, task, **choices)), tiny.batch(model_type, task)
    weights, context = splitter.initial_weights(seed=5), splitter.context(batch)
    whole = _dropping(splitter.build_whole(weights, trains=True))
    with _masks(whole)():
        expected = splitter.loss_of(splitter.run_whole(whole, batch), batch)
    expected.backward()
    stops = (*stops[:-1], splitter.num_blocks)
    segments = [splitter.build_segment(*ends, weights) for ends in pairwise((0, *stops))]
    parts = [splitter.build_embedding(weights), *segments, splitter.build_edge(weights)]
    passed: Any = batch
    for part in map(_dropping, parts):
        masks = _masks(part.model)
        if again and part in segments:
            part.compute_again(masks)
        with masks():
            passed = part(passed) if part is parts[0] else part(passed, context)
    passed.backward()
    assert torch.equal(passed, expected)
    for key, parameter in (pair for part in parts for pair in part.named_parameters()):
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, whole.get_parameter(key).grad), key


def _assert_equal(found: Tensor, wanted: Tensor, *, exact: bool) -> None:
    if exact:
        assert torch.equal(found, wanted)
    else:
        assert_near(found, wanted)


@pytest.mark.parametrize("model_type", ["bart", "t5"])
def test_a_forward_pass_keeps_what_went_into_each_block(model_type: str, tiny: Any) -> None:
    """Also where blocks read a mask that trains, as T5's do."""
    shared = {"shared": "sum"} if model_type == "t5" else {}
    splitter = Splitter(tiny.spec(model_type, "seq2seq", **shared))
    weights, batch = splitter.initial_weights(seed=5), tiny.batch(model_type, "seq2seq")
    segment = splitter.build_segment(1, 4, weights).train()
    hidden_BTD = splitter.build_embedding(weights)(batch).detach().requires_grad_()
    segment.compute_again(nullcontext)
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        segment(hidden_BTD, splitter.context(batch))
    states = [tensor for tensor in kept if tensor.shape == hidden_BTD.shape]
    assert len(states) == 3
    assert not [tensor for tensor in kept if tensor.shape[-1] == 48]  # of the inner layer


def test_blocks_learn_though_what_comes_in_does_not(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("bert", "masked-lm"))
    segment = splitter.build_segment(0, 2, splitter.initial_weights(seed=5))
    again = Counted()
    segment.compute_again(again)
    segment(torch.randn(2, 4, 32), {}).sum().backward()
    assert again.times == 2
    assert all(p.grad is not None for p in segment.parameters())
