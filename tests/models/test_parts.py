"""Laws of ownership: every tensor has one owner, and a part holds nothing else."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.splitter import Splitter
from tests.thorough import few

FAMILIES = [
    ("bert", "sequence-classification"),
    ("deberta-v2", "masked-lm"),
    ("modernbert", "masked-lm"),
    ("vit", "image-classification"),
    ("marian", "seq2seq"),
    ("bart", "seq2seq"),
    ("t5", "seq2seq"),
    ("whisper", "seq2seq"),
    ("gpt2", "causal-lm"),
    ("qwen2", "causal-lm"),
]


@pytest.mark.parametrize(("model_type", "task"), FAMILIES)
@pytest.mark.parametrize("ties", few(["untie", "rows"], 1))
def test_every_key_has_exactly_one_owner(model_type: str, task: str, ties: str, tiny: Any) -> None:
    splitter = Splitter(tiny.spec(model_type, task, ties=ties))
    parts = [
        splitter.embedding_keys(),
        *(splitter.segment_keys(i, i + 1) for i in range(splitter.num_blocks)),
        splitter.edge_keys(),
    ]
    joined = [key for keys in parts for key in keys]
    assert len(joined) == len(set(joined))
    assert set(joined) == set(splitter.all_keys())
    whole = splitter.build_whole(splitter.initial_weights(seed=1))
    aliases = set(whole.all_tied_weights_keys)
    assert set(whole.state_dict()) - aliases == set(joined)


@pytest.mark.parametrize(("model_type", "task"), few(FAMILIES, 1, 3, 6, 8))
def test_weights_come_out_as_they_went_in(model_type: str, task: str, tiny: Any) -> None:
    splitter = Splitter(tiny.spec(model_type, task))
    weights = splitter.initial_weights(seed=1)
    half = splitter.num_blocks // 2
    parts = [
        splitter.build_embedding(weights),
        splitter.build_segment(0, half, weights),
        splitter.build_segment(half, splitter.num_blocks, weights),
        splitter.build_edge(weights),
    ]
    joined = {key: value for part in parts for key, value in part.state_dict().items()}
    assert set(joined) == set(weights)
    assert all(torch.equal(joined[key], weights[key]) for key in weights)


@pytest.mark.parametrize(("model_type", "task"), few(FAMILIES, 0, 5, 7))
def test_a_part_holds_only_its_own_tensors(model_type: str, task: str, tiny: Any) -> None:
    splitter = Splitter(tiny.spec(model_type, task))
    weights = splitter.initial_weights(seed=1)
    segment = splitter.build_segment(1, 3, weights)
    own = {*splitter.segment_keys(1, 3), *splitter.shared_keys}
    present = {name for name, tensor in segment.model.named_parameters() if tensor.numel() > 0}
    assert present == own
    assert all(p.device.type == "cpu" for p in segment.parameters())


def test_a_part_needs_only_its_own_weights(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("t5", "seq2seq", shared="sum"))
    weights = splitter.initial_weights(seed=1)

    def pick(*keys: str) -> dict[str, torch.Tensor]:
        return {key: weights[key] for key in keys}

    splitter.build_embedding(pick(*splitter.embedding_keys()))
    splitter.build_edge(pick(*splitter.edge_keys()))
    second = splitter.build_segment(2, 3, pick(*splitter.segment_keys(2, 3), *splitter.shared_keys))
    assert tuple(second.shared_parameters()) == splitter.shared_keys
    assert not set(second.state_dict()) & set(splitter.shared_keys)
    with pytest.raises(ModelError, match="relative_attention_bias"):
        splitter.build_segment(2, 3, pick(*splitter.segment_keys(2, 3)))


def test_parts_do_not_write_into_the_weights_they_got(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("bert", "masked-lm"))
    weights = splitter.initial_weights(seed=1)
    before = {key: value.clone() for key, value in weights.items()}
    segment = splitter.build_segment(0, 2, weights)
    with torch.no_grad():
        for parameter in segment.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(weights[key], before[key]) for key in weights)


@pytest.mark.parametrize(
    ("model_type", "task", "choices"),
    [
        ("bert", "masked-lm", {"edge_blocks": 1}),
        ("t5", "seq2seq", {}),
        ("opt", "causal-lm", {"edge_blocks": 1}),
    ],
)
def test_a_dropped_part_frees_its_memory_at_once(
    model_type: str, task: str, choices: dict[str, Any], tiny: Any
) -> None:
    """Segments move between rounds; the old ones may not wait for the garbage collector."""
    splitter = Splitter(tiny.spec(model_type, task, **choices))
    weights = splitter.initial_weights(seed=1)
    batch = tiny.batch(model_type, task)
    context = splitter.context(batch)
    gc.collect()
    gc.disable()
    try:
        embedding, edge = splitter.build_embedding(weights), splitter.build_edge(weights)
        segment = splitter.build_segment(0, splitter.num_blocks, weights)
        edge(segment(embedding(batch), context), context).backward()
        parts = (embedding, segment, edge)
        held = [weakref.ref(p) for part in parts for p in part.parameters()]
        del embedding, segment, edge, parts
        assert not [parameter for parameter in held if parameter() is not None]
    finally:
        gc.enable()


def test_loading_keeps_the_parameter_objects(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("marian", "seq2seq"))
    edge = splitter.build_edge(splitter.initial_weights(seed=1))
    objects = dict(edge.named_parameters())
    other = splitter.initial_weights(seed=2)
    edge.load_weights(other)
    for key, parameter in edge.named_parameters():
        assert parameter is objects[key]
        assert torch.equal(parameter, other[key])


def test_a_wrong_shape_is_named(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("bert", "masked-lm"))
    weights = splitter.initial_weights(seed=1)
    key = splitter.segment_keys(0, 1)[0]
    weights[key] = torch.zeros(3)
    with pytest.raises(ModelError, match=rf"{key}.*\(3,\)"):
        splitter.build_segment(0, 1, weights)


@pytest.mark.parametrize(("first", "stop"), [(0, 5), (-1, 2), (2, 2), (3, 1)])
def test_a_range_outside_the_model_is_refused(first: int, stop: int, tiny: Any) -> None:
    splitter = Splitter(tiny.spec("bert", "masked-lm"))
    with pytest.raises(ModelError, match=r"blocks 0\.\.3"):
        splitter.segment_keys(first, stop)


def test_frozen_shared_parameters_are_constant(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("t5", "seq2seq"))
    segment = splitter.build_segment(0, 1, splitter.initial_weights(seed=1))
    frozen = {key for key, p in segment.named_parameters() if not p.requires_grad}
    assert frozen == set(splitter.shared_keys)
    assert frozen <= splitter.constant_keys


def test_sinusoids_are_constant_and_trained_tables_are_not(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("marian", "seq2seq"))
    assert splitter.constant_keys == {
        "final_logits_bias",
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_positions.weight",
    }


def test_inputs_that_do_not_fit_are_one_clear_error(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("bert", "sequence-classification"))
    weights = splitter.initial_weights(seed=1)
    embedding, edge = splitter.build_embedding(weights), splitter.build_edge(weights)
    with pytest.raises(ModelError, match="50"):
        embedding({"input_ids": torch.full((1, 4), 50)})
    with pytest.raises(ModelError, match="512"):
        embedding({"input_ids": torch.ones(1, 600, dtype=torch.long)})
    hidden_BTD = torch.zeros(1, 4, 32)
    with pytest.raises(ModelError, match="labels"):
        edge(hidden_BTD, {})
    with pytest.raises(ModelError, match="3"):
        edge(hidden_BTD, {"labels": torch.tensor([3])})
