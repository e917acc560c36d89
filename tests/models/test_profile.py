"""The profile says what a real run costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from tests.thorough import few

LENGTH = 11
SHAPE = BatchShape(source_length=LENGTH, target_length=LENGTH)


def test_a_block_follows_the_closed_formula() -> None:
    """2T(4d^2 + 2df) multiply-adds of weights and 4T^2 d of attention."""
    width, inner, length = 64, 96, 24
    spec = make_spec(
        "masked-lm",
        model_type="bert",
        overrides={
            "hidden_size": width,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": inner,
        },
        vocab_size=50,
    )
    profile = profile_model(Splitter(spec), BatchShape(source_length=length))
    block = profile.blocks[1]
    dense = 2 * length * (4 * width**2 + 2 * width * inner)
    assert block.forward_flop == dense + 4 * length**2 * width
    assert block.backward_flop == 2 * block.forward_flop
    parameters = 4 * width**2 + 2 * width * inner + 9 * width + inner
    assert block.parameter_bytes == 4 * parameters
    assert block.state_bytes == 4 * block.parameter_bytes
    assert block.output_bytes == length * width * 4


@pytest.mark.parametrize(
    ("model_type", "task"),
    few(
        [
            ("bert", "sequence-classification"),
            ("deberta-v2", "sequence-classification"),
            ("modernbert", "masked-lm"),
            ("vit", "image-classification"),
            ("marian", "seq2seq"),
            ("t5", "seq2seq"),
            ("whisper", "seq2seq"),
            ("gpt2", "causal-lm"),
            ("qwen2", "causal-lm"),
            ("gemma", "causal-lm"),
        ],
        *(0, 3, 5, 7),
    ),
)
def test_the_pieces_add_up_to_the_whole(model_type: str, task: str, tiny: Any) -> None:
    """Operations as torch counts them in the whole model, bytes as the weights weigh."""
    splitter = Splitter(tiny.spec(model_type, task))
    weights = splitter.initial_weights(seed=1)
    profile = profile_model(splitter, SHAPE)
    pieces = (profile.embedding, *profile.blocks, profile.decoder)
    assert len(profile.blocks) == splitter.num_blocks
    held = sum(value.numel() * value.element_size() for value in weights.values())
    assert sum(piece.parameter_bytes for piece in pieces) == held
    batch = {key: value[:1] for key, value in tiny.batch(model_type, task).items()}
    whole = splitter.build_whole(weights)
    if hasattr(whole, "set_attn_implementation") and model_type != "deberta-v2":
        whole.set_attn_implementation("eager")  # torch counts it; it does not count the CPU's sdpa
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        whole(**batch)
    assert sum(piece.forward_flop for piece in pieces) == counter.get_total_flops()


def _kept_bytes(segment: torch.nn.Module, hidden_BTD: torch.Tensor, mask: torch.Tensor) -> int:
    """What autograd keeps of one forward pass, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in segment.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = segment(hidden_BTD, {"attention_mask": mask})
    assert output.grad_fn is not None
    return sum(storage.nbytes() for storage in kept.values())


def test_the_stash_is_what_autograd_keeps(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("bert", "masked-lm"))
    segment = splitter.build_segment(1, 2, splitter.initial_weights(seed=1))
    hidden_BTD = torch.randn(1, LENGTH, 32, requires_grad=True)
    mask = (torch.arange(LENGTH) < 6).unsqueeze(0)
    assert profile_model(splitter, SHAPE).blocks[1].stash_bytes == _kept_bytes(
        segment, hidden_BTD, mask
    )


@pytest.mark.parametrize(
    ("model_type", "task", "overrides"),
    few(
        [
            ("bert", "masked-lm", {"hidden_size": 128, "num_attention_heads": 4}),
            ("llama", "causal-lm", {"hidden_size": 128, "num_attention_heads": 4}),
            (
                "t5",
                "seq2seq",
                {"d_model": 128, "num_heads": 4, "d_kv": 32, "num_decoder_layers": 1},
            ),
            (
                "mixtral",
                "causal-lm",
                {
                    "hidden_size": 128,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "num_local_experts": 4,
                },
            ),
        ],
        *(0, 1),
    ),
)
def test_the_stash_of_a_micro_batch_is_foreseen_within_a_tenth(
    model_type: str, task: str, overrides: dict[str, Any]
) -> None:
    """Never too little; masks and angles that examples share are counted with each."""
    size = "d_ff" if model_type == "t5" else "intermediate_size"
    layers = "num_layers" if model_type == "t5" else "num_hidden_layers"
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    spec = make_spec(
        task,
        model_type=model_type,
        overrides={**overrides, size: 512, layers: 2},
        vocab_size=50,
        **(tokens if task == "seq2seq" else {}),
    )
    splitter = Splitter(spec)
    segment = splitter.build_segment(1, 2, splitter.initial_weights(seed=1)).train()
    hidden_BTD = torch.randn(8, 64, 128, requires_grad=True)
    kept = _kept_bytes(segment, hidden_BTD, torch.ones(8, 64, dtype=torch.long))
    foreseen = 8 * profile_model(splitter, BatchShape(source_length=64)).blocks[1].stash_bytes
    assert kept <= foreseen <= 1.1 * kept


def test_trained_blocks_cost_more_than_the_frozen_ones_below_them(tiny: Any) -> None:
    """Although the optimizer keeps nothing of either."""
    spec = tiny.spec("bert", "masked-lm")
    plain = Splitter(spec)
    frozen = (*plain.embedding_keys(), *plain.segment_keys(0, 2))
    costs = profile_model(Splitter(replace(spec, frozen=frozen)), SHAPE, lambda _: 0).blocks
    assert [cost.backward_flop > 0 for cost in costs] == [False, False, True, True]
    assert [cost.stash_bytes > 0 for cost in costs] == [False, False, True, True]


def test_a_large_model_is_profiled_without_its_weights() -> None:
    spec = make_spec(
        "causal-lm",
        model_type="llama",
        overrides={"hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32},
    )
    profile = profile_model(Splitter(spec), BatchShape(source_length=128))
    assert len(profile.blocks) == 8
    assert profile.blocks[0].parameter_bytes > 500e6
