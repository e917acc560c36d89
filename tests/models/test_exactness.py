"""Law: whatever the cut, loss and every gradient equal those of the unsplit model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.skeleton import build_random, build_skeleton
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.randomness import SeededRandomness
from tests.closeness import assert_near
from tests.thorough import few

CASES = [
    ("bert", "sequence-classification", {}),
    ("bert", "token-classification", {}),
    ("bert", "masked-lm", {"edge_blocks": 2}),
    ("roberta", "sequence-classification", {}),
    ("roberta", "masked-lm", {}),
    ("distilbert", "sequence-classification", {}),
    ("distilbert", "masked-lm", {}),
    ("deberta-v2", "token-classification", {}),
    ("deberta-v2", "masked-lm", {"shared": "sum", "edge_blocks": 1}),
    ("modernbert", "sequence-classification", {}),
    ("modernbert", "masked-lm", {"edge_blocks": 1}),
    ("vit", "image-classification", {"edge_blocks": 1}),
    ("marian", "seq2seq", {}),
    ("bart", "seq2seq", {}),
    ("mbart", "seq2seq", {}),
    ("m2m_100", "seq2seq", {}),
    ("t5", "seq2seq", {}),
    ("t5", "seq2seq", {"shared": "sum"}),
    ("mt5", "seq2seq", {}),
    ("whisper", "seq2seq", {}),
    ("gpt2", "causal-lm", {"edge_blocks": 1}),
    ("gpt2", "sequence-classification", {}),
    ("llama", "causal-lm", {"edge_blocks": 2}),
    ("llama", "sequence-classification", {}),
    ("mistral", "causal-lm", {}),
    ("qwen2", "causal-lm", {"edge_blocks": 1}),
    ("qwen2", "token-classification", {}),
    ("qwen3", "causal-lm", {}),
    ("smollm3", "causal-lm", {"edge_blocks": 1}),
    ("olmo2", "causal-lm", {}),
    ("phi3", "causal-lm", {"edge_blocks": 1}),
    ("gemma3_text", "causal-lm", {"edge_blocks": 1}),
    ("gemma", "causal-lm", {"edge_blocks": 1}),
    ("gemma", "sequence-classification", {}),
    # model types without a record
    ("electra", "sequence-classification", {"edge_blocks": 1}),
    ("opt", "causal-lm", {"edge_blocks": 1}),
    ("bloom", "causal-lm", {}),
    ("granite", "causal-lm", {"edge_blocks": 2}),
    ("gemma2", "sequence-classification", {}),
    ("beit", "image-classification", {"edge_blocks": 1}),
    ("pegasus", "seq2seq", {}),
    ("nystromformer", "masked-lm", {"edge_blocks": 1}),
    ("mixtral", "causal-lm", {"edge_blocks": 1}),
    ("lfm2", "causal-lm", {"edge_blocks": 1}),
    ("ctrl", "causal-lm", {}),
    ("mamba2", "causal-lm", {}),
    ("bamba", "causal-lm", {"edge_blocks": 1}),
    ("granitemoehybrid", "causal-lm", {"edge_blocks": 1}),
    ("falcon_h1", "causal-lm", {}),
    ("nemotron_h", "causal-lm", {}),
    ("modernbert-decoder", "causal-lm", {"edge_blocks": 1}),
    ("clip", "image-classification", {"edge_blocks": 1}),
    ("siglip", "image-classification", {}),
]

# Each type once: its first case.
ONCE = {kind: n for n, (kind, *_) in reversed(list(enumerate(CASES)))}.values()


def _cuts(num_blocks: int, seed: int) -> list[tuple[int, int]]:
    """Random consecutive ranges that cover all blocks."""
    chance = random.Random(seed)
    inner = chance.sample(range(1, num_blocks), chance.randint(0, num_blocks - 1))
    return list(pairwise([0, *sorted(inner), num_blocks]))


def _whole_step(
    splitter: Splitter, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    torch.manual_seed(0)  # some heads drop out on their own account
    whole = splitter.build_whole(weights).train()
    cached = splitter.decodes or "causal-lm" in splitter._family.tasks
    options: dict[str, Any] = {"use_cache": False} if cached else {}
    loss = whole(**batch, **options).loss
    loss.backward()
    return loss.detach(), {key: p.grad for key, p in whole.named_parameters()}


def _split_step(
    splitter: Splitter,
    weights: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    cuts: list[tuple[int, int]],
) -> tuple[Tensor, dict[str, Tensor | None]]:
    embedding, edge = splitter.build_embedding(weights), splitter.build_edge(weights)
    segments = [splitter.build_segment(first, stop, weights) for first, stop in cuts]
    context = splitter.context(batch)
    torch.manual_seed(0)
    hidden_BTD = embedding(batch)
    for segment in segments:
        hidden_BTD = segment(hidden_BTD, context)
    loss = edge(hidden_BTD, context)
    loss.backward()
    gradients: dict[str, Tensor | None] = {}
    for part in (embedding, *segments, edge):
        for key, parameter in part.named_parameters():
            earlier = gradients.get(key)
            both = earlier is not None and parameter.grad is not None
            gradients[key] = earlier + parameter.grad if both else parameter.grad
    return loss.detach(), gradients


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("model_type", "task", "choices"), few(CASES, *ONCE))
def test_loss_and_gradients_equal_the_unsplit_model(
    model_type: str, task: str, choices: dict[str, Any], seed: int, tiny: Any
) -> None:
    spec: ModelSpec = tiny.spec(model_type, task, **choices)
    splitter = Splitter(spec)
    weights = splitter.initial_weights(seed=5)
    batch = tiny.batch(model_type, task)
    expected_loss, expected = _whole_step(splitter, weights, batch)
    cuts = _cuts(splitter.num_blocks, seed)
    loss, gradients = _split_step(splitter, weights, batch, cuts)
    assert torch.equal(loss, expected_loss), cuts
    assert set(expected) <= set(gradients)
    for key, gradient in expected.items():
        _assert_equal(key, gradients[key], gradient, exact=key not in splitter.shared_keys)


def _assert_equal(key: str, found: Tensor | None, wanted: Tensor | None, *, exact: bool) -> None:
    if wanted is None or found is None:
        assert found is None and wanted is None, key
    elif exact:
        assert torch.equal(found, wanted), key
    else:  # replicas add up in another order
        assert_near(found, wanted)


@pytest.mark.parametrize("model_type", ["falcon_h1", "gemma", "qwen2", "ctrl", "bloom"])
def test_constants_are_those_of_the_library(model_type: str, tiny: Any) -> None:
    """What no checkpoint holds is computed by the library, never left as the memory was."""
    spec = tiny.spec(model_type, "causal-lm")
    expected = dict(build_random(spec, seed=1).named_buffers())
    for path, constant in build_skeleton(spec).named_buffers():
        if not constant.is_meta:
            assert torch.equal(constant, expected[path]), path


@pytest.mark.parametrize("model_type", ["llama", "gemma"])
def test_a_window_that_the_library_ignores_is_ignored(model_type: str, tiny: Any) -> None:
    """Checkpoints converted from Mistral carry ``sliding_window`` in a Llama configuration."""
    spec = tiny.spec(model_type, "causal-lm")
    config = json.loads(spec.config_json)
    splitter = Splitter(replace(spec, config_json=json.dumps({**config, "sliding_window": 3})))
    weights = splitter.initial_weights(seed=5)
    batch = tiny.batch(model_type, "causal-lm")
    expected, _ = _whole_step(splitter, weights, batch)
    assert torch.equal(_split_step(splitter, weights, batch, [(0, 2), (2, 4)])[0], expected)


def test_long_rotary_positions_are_exact_up_to_the_length_where_they_change(tiny: Any) -> None:
    """Phi-3's angles follow the longest text of a micro-batch, and so would its cached keys."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    spec = tiny.spec("phi3", "causal-lm")
    batch = tiny.batch("phi3", "causal-lm")
    for known in (11, 10):  # of the batch's 11 tokens
        rope = {**json.loads(spec.config_json)["rope_parameters"], **factors}
        changes = {"rope_parameters": rope, "original_max_position_embeddings": known}
        config = {**json.loads(spec.config_json), **changes}
        splitter = Splitter(replace(spec, config_json=json.dumps(config)))
        weights = splitter.initial_weights(seed=5)
        assert splitter.most_tokens == known
        if known == 11:
            expected, _ = _whole_step(splitter, weights, batch)
            assert torch.equal(_split_step(splitter, weights, batch, [(0, 4)])[0], expected)
            continue
        embedding = splitter.build_embedding(weights)
        with pytest.raises(ModelError, match=r"11 tokens, but beyond 10 .* shorten texts to 10"):
            embedding(batch)
        with pytest.raises(ModelError, match="11 tokens"):  # of a text that is being written
            embedding({"input_ids": torch.ones(1, 1).long(), "position_ids": torch.tensor([[10]])})


@pytest.mark.parametrize(
    ("model_type", "task"),
    [("t5", "seq2seq"), ("bert", "masked-lm"), ("gpt2", "causal-lm"), ("gemma3_text", "causal-lm")],
)
def test_seeded_dropout_masks_are_those_of_the_unsplit_model(
    model_type: str, task: str, tiny: Any
) -> None:
    """T5's first block computes the bias itself when whole, and gets it when cut."""
    spec = tiny.spec(model_type, task)
    config = json.loads(spec.config_json)
    drops = {key: 0.2 for key in config if "dropout" in key or key.endswith("pdrop")}
    splitter = Splitter(replace(spec, config_json=json.dumps({**config, **drops})))
    weights = splitter.initial_weights(seed=5)
    batch = tiny.batch(model_type, task)
    whole = splitter.build_whole(weights).train()
    with SeededRandomness(whole, 3).seed_at(0, 0):
        expected = whole(**batch, use_cache=False).loss
    context = splitter.context(batch)
    hidden_BTD: Any = batch
    edge = splitter.build_edge(weights)
    segments = [splitter.build_segment(first, first + 2, weights) for first in (0, 2)]
    for part in (splitter.build_embedding(weights), *segments, edge):
        inputs = (hidden_BTD,) if hidden_BTD is batch else (hidden_BTD, context)
        with SeededRandomness(part.model, 3).seed_at(0, 0):
            hidden_BTD = part(*inputs)
    assert torch.equal(hidden_BTD, expected)
    assert not torch.equal(hidden_BTD, splitter.build_whole(weights)(**batch).loss)


@pytest.mark.parametrize(
    ("model_type", "task", "setting"),
    [
        ("clip", "image-classification", {"vision_config": {"attention_dropout": 0.2}}),
        ("mixtral", "causal-lm", {"router_jitter_noise": 0.1}),
    ],
)
def test_what_is_drawn_by_a_part_of_a_model_or_a_router_is_seeded(
    model_type: str, task: str, setting: dict[str, Any], tiny: Any
) -> None:
    spec = tiny.spec(model_type, task)
    assert not Splitter(spec).drops
    config = json.loads(spec.config_json)
    for key, value in setting.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    splitter = Splitter(replace(spec, config_json=json.dumps(config)))
    assert splitter.drops
    weights, batch = splitter.initial_weights(seed=5), tiny.batch(model_type, task)
    whole = splitter.build_whole(weights).train()
    with SeededRandomness(whole, 3).seed_at(0, 0):
        expected = whole(**batch).loss
    assert not torch.equal(whole.eval()(**batch).loss, expected)
    context, hidden_BTD = splitter.context(batch), batch
    for part in (
        splitter.build_embedding(weights),
        splitter.build_segment(0, 3, weights),
        splitter.build_segment(3, 4, weights),
        splitter.build_edge(weights),
    ):
        inputs = (hidden_BTD,) if hidden_BTD is batch else (hidden_BTD, context)
        with SeededRandomness(part.model.train(), 3).seed_at(0, 0):
            hidden_BTD = part(*inputs)
    assert torch.equal(hidden_BTD, expected)


def test_a_dropout_layer_of_two_parts_has_the_masks_of_the_unsplit_model(tiny: Any) -> None:
    """T5 uses one behind its embedding, on the control unit, and behind its encoder."""
    spec = tiny.spec("t5", "seq2seq")
    config = {**json.loads(spec.config_json), "dropout_rate": 0.5}
    splitter = Splitter(replace(spec, config_json=json.dumps(config)))
    weights, batch = splitter.initial_weights(seed=5), tiny.batch("t5", "seq2seq")

    def masks(model: Any, run: Callable[[], object]) -> list[Tensor]:
        found: list[Tensor] = []
        model.encoder.dropout.register_forward_hook(lambda *call: found.append(call[-1] == 0))
        with SeededRandomness(model, 3).seed_at(0, 0):
            run()
        return found

    whole = splitter.build_whole(weights).train()
    first, last = masks(whole, lambda: whole(**batch, use_cache=False))
    assert not torch.equal(first, last)
    embedding, edge = splitter.build_embedding(weights), splitter.build_edge(weights)
    (of_embedding,) = masks(embedding.model, lambda: embedding(batch))
    hidden_BTD = torch.ones(*first.shape)
    (of_edge,) = masks(edge.model, lambda: edge(hidden_BTD, splitter.context(batch)))
    assert torch.equal(of_embedding, first)
    assert torch.equal(of_edge, last)


@pytest.mark.parametrize("model_type", ["bert", "t5", "gpt2"])
def test_the_padding_mask_matters(model_type: str, tiny: Any) -> None:
    """The control: without its mask a segment computes something else."""
    task = {"bert": "masked-lm", "t5": "seq2seq", "gpt2": "causal-lm"}[model_type]
    splitter = Splitter(tiny.spec(model_type, task))
    weights = splitter.initial_weights(seed=5)
    batch = tiny.batch(model_type, task)
    if model_type == "gpt2":  # behind a causal mask only padding on the left is visible
        batch["attention_mask"] = batch["attention_mask"].flip(1)
    hidden_BTD = splitter.build_embedding(weights)(batch)
    segment = splitter.build_segment(0, 2, weights)
    masked = segment(hidden_BTD, splitter.context(batch))
    assert not torch.allclose(segment(hidden_BTD, {}), masked, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
@pytest.mark.parametrize("model_type", ["bert", "deberta-v2"])
def test_a_mask_may_travel_in_any_integer_type(
    model_type: str, dtype: torch.dtype, tiny: Any
) -> None:
    splitter = Splitter(tiny.spec(model_type, "masked-lm"))
    weights = splitter.initial_weights(seed=5)
    batch = tiny.batch(model_type, "masked-lm")
    hidden_BTD = splitter.build_embedding(weights)(batch)
    segment = splitter.build_segment(0, 3, weights)
    narrow = {"attention_mask": batch["attention_mask"].to(dtype)}
    assert torch.equal(segment(hidden_BTD, narrow), segment(hidden_BTD, splitter.context(batch)))


def test_micro_batches_scaled_by_their_targets_add_up(tiny: Any) -> None:
    """An uneven last micro-batch changes nothing when each loss counts n_i / N."""
    splitter = Splitter(tiny.spec("marian", "seq2seq"))
    weights = splitter.initial_weights(seed=5)
    batch = tiny.batch("marian", "seq2seq")
    expected_loss, expected = _whole_step(splitter, weights, batch)
    embedding, edge = splitter.build_embedding(weights), splitter.build_edge(weights)
    segment = splitter.build_segment(0, splitter.num_blocks, weights)
    total = edge.weight_of(batch)
    loss = torch.zeros(())
    for rows in (slice(0, 3), slice(3, 4)):
        micro = {key: value[rows] for key, value in batch.items()}
        context = splitter.context(micro)
        part = edge(segment(embedding(micro), context), context)
        scaled = part * (edge.weight_of(context) / total)
        scaled.backward()
        loss += scaled.detach()
    assert_near(loss, expected_loss)
    parameters = [p for part in (embedding, segment, edge) for p in part.named_parameters()]
    found = {key: parameter.grad for key, parameter in parameters if parameter.grad is not None}
    assert_near(found, {key: expected[key] for key in found})


def test_a_batch_without_targets_has_no_loss_and_no_gradient(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("bert", "masked-lm"))
    weights = splitter.initial_weights(seed=5)
    hidden_BTD = torch.randn(2, 5, 32, requires_grad=True)
    context = {"labels": torch.full((2, 5), -100)}
    edge = splitter.build_edge(weights)
    loss = edge(hidden_BTD, context)
    loss.backward()
    assert edge.weight_of(context) == 0
    assert loss.item() == 0.0
    assert hidden_BTD.grad is not None and not hidden_BTD.grad.any()
