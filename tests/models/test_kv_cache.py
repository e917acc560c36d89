"""Law of the caches: token by token through cut blocks gives the hidden states of all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.models.stack import PartCache
from tests.closeness import assert_near

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 64},
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 4},
    "qwen2": {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen3": {**LLAMA, "head_dim": 16},
    "gemma": {**LLAMA, "head_dim": 16},
    "gemma3_text": {
        **LLAMA,
        "head_dim": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "smollm3": {
        **LLAMA,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
    },
    "olmo2": LLAMA,
    "phi3": {**LLAMA, "sliding_window": 4},
}


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_token_by_token_equals_all_at_once(model_type: str) -> None:
    spec = make_spec(
        "causal-lm", model_type=model_type, overrides=MODELS[model_type], vocab_size=60
    )
    splitter = Splitter(spec)
    weights = splitter.initial_weights(1)
    embedding = splitter.build_embedding(weights).train(False)
    segments = [splitter.build_segment(a, b, weights).train(False) for a, b in ((0, 1), (1, 4))]
    ids = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = embedding({"input_ids": ids})
        for segment in segments:
            together = segment(together, {})
        caches = [segment.new_cache() for segment in segments]
        pieces, start = [], 0
        for size in (5, 1, 1, 2, 1, 1, 1):
            positions = torch.arange(start, start + size)[None]
            hidden = embedding(
                {"input_ids": ids[:, start : start + size], "position_ids": positions}
            )
            for segment, cache in zip(segments, caches, strict=True):
                hidden = segment.advance(hidden, cache)
            pieces.append(hidden)
            start += size
    assert [cache.tokens for cache in caches] == [12, 12]
    assert_near(torch.cat(pieces, dim=1), together)
    wrong = torch.cat([pieces[0], *pieces[2:], pieces[1]], dim=1)
    assert (wrong - together).abs().max() > 1e-3  # the comparison can fail


def test_a_part_without_blocks_counts_its_tokens() -> None:
    spec = make_spec("causal-lm", model_type="gpt2", overrides=MODELS["gpt2"], vocab_size=60)
    cache = PartCache(Splitter(spec).config, 4, 4)
    cache.tokens += 3
    assert (cache.get_seq_length(), cache.is_compileable) == (3, False)


def test_an_encoder_has_no_cache() -> None:
    overrides = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    spec = make_spec("masked-lm", model_type="bert", overrides=overrides, vocab_size=60)
    splitter = Splitter(spec)
    segment = splitter.build_segment(0, 1, splitter.initial_weights(1))
    with pytest.raises(ModelError, match="'bert' cannot generate token by token"):
        segment.advance(torch.zeros(1, 2, 16), segment.new_cache())


def test_blocks_in_the_librarys_own_loop_refuse_to_go_on(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("lfm2", "causal-lm"))  # whose convolutions have states
    assert not splitter.generates
    segment = splitter.build_segment(0, 2, splitter.initial_weights(seed=1))
    with pytest.raises(ModelError, match="'lfm2' cannot generate token by token when split"):
        segment.advance(torch.zeros(1, 1, 32), segment.new_cache())
