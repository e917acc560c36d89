"""Model types without a record split exactly or say why not; those with one agree with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.electra import modeling_electra

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models import Splitter, make_spec
from collapipe_flwr.models.discovery import discover_family
from collapipe_flwr.models.families import FAMILIES
from collapipe_flwr.models.replay import ReplayedStack

RECORDED = [
    ("bert", "masked-lm"),
    ("distilbert", "masked-lm"),
    ("modernbert", "masked-lm"),
    ("vit", "image-classification"),
    ("marian", "seq2seq"),
    ("mbart", "seq2seq"),
    ("gpt2", "causal-lm"),
    ("mistral", "causal-lm"),
    ("qwen2", "causal-lm"),
    ("gemma", "causal-lm"),
]


@pytest.mark.parametrize(("model_type", "task"), RECORDED)
def test_the_record_says_what_a_trace_finds(model_type: str, task: str, tiny: Any) -> None:
    found, record = discover_family(tiny.spec(model_type, task)), FAMILIES[model_type]
    assert (found.stack, found.blocks) == (record.stack, record.blocks)
    assert set(found.before) <= set(record.before)
    assert (found.decodes, found.input_name) == (record.decodes, record.input_name)


@pytest.mark.parametrize(("model_type", "task"), RECORDED)
@pytest.mark.parametrize(("first", "stop"), [(0, 1), (1, 3), (3, 4)])
def test_the_library_s_own_loop_is_the_oracle(
    model_type: str, task: str, first: int, stop: int, tiny: Any
) -> None:
    """Blocks run inside the library's forward give what the rebuilt arguments give."""
    spec = tiny.spec(model_type, task)
    splitter = Splitter(spec)
    weights = splitter.initial_weights(seed=3)
    batch = tiny.batch(model_type, task)
    context = splitter.context(batch)
    hidden_BTD = splitter.build_embedding(weights)(batch).detach()
    oracle = ReplayedStack(
        model=splitter.build_whole(weights).train(),
        family=discover_family(spec),
        first_block=first,
        stop_block=stop,
    )
    segment = splitter.build_segment(first, stop, weights)
    assert torch.equal(segment(hidden_BTD, context), oracle.run_blocks(hidden_BTD, context))


@pytest.mark.parametrize(
    ("model_type", "task", "reason"),
    [
        ("t5", "seq2seq", "position_bias|argument 2"),
        ("deberta-v2", "masked-lm", "between its blocks 0 and 1|rel_embeddings"),
    ],
)
def test_a_learned_side_input_is_named(model_type: str, task: str, reason: str, tiny: Any) -> None:
    with pytest.raises(ModelError, match=reason):
        discover_family(tiny.spec(model_type, task))


@pytest.mark.parametrize(
    ("model_type", "task", "reason"),
    [
        ("albert", "masked-lm", "its 1 blocks ran 12 times instead of once each"),
        ("mpnet", "masked-lm", "besides hidden states, which is learned"),
        ("xlnet", "causal-lm", "do not begin with examples"),
        ("longformer", "masked-lm", "depends on values, not only on shapes"),
        ("swin", "image-classification", "do not run apart from each other"),
        ("resnet", "image-classification", "has no image_size"),
        ("cvt", "image-classification", "has no image_size"),
        ("mobilevit", "image-classification", "do not run apart from each other"),
        ("speech_to_text", "seq2seq", "has no num_mel_bins"),
    ],
)
def test_a_model_that_cannot_be_cut_says_why(model_type: str, task: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"'{model_type}' cannot be split: .*{reason}") as refused:
        make_spec(task, model_type=model_type)
    assert "\n" not in str(refused.value)


def test_a_model_whose_end_reads_its_beginning_is_refused(monkeypatch: Any) -> None:
    """No model of the library does so today; this one adds the embedding behind its blocks."""
    encode = modeling_electra.ElectraEncoder.forward

    def skip_ahead(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = encode(self, hidden_states, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + hidden_states
        return output

    monkeypatch.setattr(modeling_electra.ElectraEncoder, "forward", skip_ahead)
    with pytest.raises(ModelError, match="reads more than the last one's result"):
        make_spec("masked-lm", model_type="electra", overrides={"num_hidden_layers": 2})
