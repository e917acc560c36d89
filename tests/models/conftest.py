"""Tiny random models of every family, with what it takes to train them one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.spec import ModelSpec

VOCABULARY = 50
BLOCKS = 4
TOKENS = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_DECODER = {
    "hidden_size": 32,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
_BART = {
    "d_model": 32,
    "encoder_layers": BLOCKS,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_TRANSLATION = {**_BART, "max_position_embeddings": 40}
_T5 = {
    "d_model": 32,
    "num_layers": BLOCKS,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "d_kv": 16,
    "d_ff": 48,
    "dropout_rate": 0.0,
}
_DEBERTA = {
    **_BERT,
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "conv_kernel_size": 3,
}
_MODERNBERT = {
    **{key: value for key, value in _BERT.items() if "dropout" not in key},
    "local_attention": 4,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_DISTILBERT = {
    "dim": 32,
    "n_layers": BLOCKS,
    "n_heads": 2,
    "hidden_dim": 48,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
_GPT2 = {
    "n_embd": 32,
    "n_layer": BLOCKS,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
_OPT = {
    "hidden_size": 32,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "dropout": 0.0,
}
_BLOOM = {"hidden_size": 32, "n_layer": BLOCKS, "n_head": 4}
_VIT = {**_BERT, "image_size": 16, "patch_size": 4}
_PICTURES = {
    "hidden_size": 32,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
_CAPTIONS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_MIXTRAL = {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA = {
    **_DECODER,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
}
_MAMBA2 = {
    "hidden_size": 32,
    "num_hidden_layers": BLOCKS,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 4,
}
_NEMOTRON = {
    **{key: value for key, value in _DECODER.items() if key != "num_hidden_layers"},
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
}
_WHISPER = {**_BART, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 20}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": _DISTILBERT,
    "deberta-v2": _DEBERTA,
    "modernbert": _MODERNBERT,
    "vit": _VIT,
    "marian": _TRANSLATION,
    "bart": _TRANSLATION,
    "mbart": _TRANSLATION,
    "m2m_100": _TRANSLATION,
    "t5": _T5,
    "mt5": _T5,
    "whisper": _WHISPER,
    "gpt2": _GPT2,
    "llama": _DECODER,
    "mistral": {**_DECODER, "sliding_window": 4},
    "qwen2": {**_DECODER, **_SLIDING},
    "qwen3": {**_DECODER, **_SLIDING, "head_dim": 8},
    "gemma": {**_DECODER, "head_dim": 8},
    "gemma3_text": {
        **_DECODER,
        "head_dim": 8,
        "sliding_window": 4,  # shorter than the text, as those below
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "smollm3": {
        **_DECODER,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
    },
    "olmo2": _DECODER,
    "phi3": {**_DECODER, "sliding_window": 4},
    # without a record
    "electra": {**_BERT, "embedding_size": 16},
    "opt": _OPT,
    "bloom": {**_BLOOM, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "granite": {**_DECODER, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "gemma2": {**_DECODER, "head_dim": 8, "sliding_window": 4},
    "beit": _VIT,
    "nystromformer": _BERT,  # its blocks return tuples of one
    "mixtral": {**_MIXTRAL, "sliding_window": 4},
    "lfm2": {
        **_DECODER,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "ctrl": {
        "n_embd": 32,
        "n_layer": BLOCKS,
        "n_head": 2,
        "dff": 48,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "pegasus": _TRANSLATION,
    # their configurations hold an infinity
    "mamba2": _MAMBA2,
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_MAMBA,
        "num_local_experts": 4,
        "shared_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "ssm_multipliers": [0.5, 2.0, 1.0, 1.5, 1.0]},
    "nemotron_h": _NEMOTRON,
    "modernbert-decoder": {k: v for k, v in _MODERNBERT.items() if not k.endswith("token_id")},
    "clip": {"vision_config": _PICTURES, "text_config": _CAPTIONS},
    "siglip": {"vision_config": _PICTURES, "text_config": _CAPTIONS},
}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """Makes tiny specs and padded batches."""

    def spec(self, model_type: str, task: str, **choices: Any) -> ModelSpec:
        """A small random model of that family; ``sizes`` are pairs that its config has instead."""
        return _make(model_type, task, tuple(sorted(choices.items())))

    def batch(self, model_type: str, task: str, *, examples: int = 4) -> dict[str, Tensor]:
        """Unequal lengths, padded; labels of padding are ignored."""
        random = torch.Generator().manual_seed(7)
        if task == "image-classification":
            images = torch.randn(examples, 3, 16, 16, generator=random)
            return {"pixel_values": images, "labels": torch.arange(examples) % 3}
        tokens = torch.randint(3, VOCABULARY, (examples, 11), generator=random)
        mask = (torch.arange(11) < torch.tensor([[11], [6], [9], [4]])[:examples]).long()
        tokens = tokens * mask
        if model_type == "whisper":
            sound = torch.randn(examples, 8, 24, generator=random)
            return {"input_features": sound, "labels": tokens.masked_fill(mask == 0, -100)}
        if task == "sequence-classification":
            labels = torch.arange(examples) % 3
        elif task == "token-classification":
            labels = (tokens % 3).masked_fill(mask == 0, -100)
        else:
            labels = tokens.masked_fill(mask == 0, -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@cache
def _make(model_type: str, task: str, choices: tuple[tuple[str, Any], ...]) -> ModelSpec:
    tokens: dict[str, Any] = {} if task == "image-classification" else TOKENS
    labels = {"num_labels": 3} if "classification" in task else {}
    more = dict(choices)
    return make_spec(
        task,
        model_type=model_type,
        overrides={**OVERRIDES[model_type], **dict(more.pop("sizes", ()))},
        **tokens,
        **labels,
        **more,
    )


@pytest.fixture
def tiny() -> Tiny:
    """The maker of tiny models."""
    return Tiny()


@pytest.fixture(autouse=True)
def one_thread() -> Callable[[], None]:
    """Sums have one order, so equal means equal bits."""
    torch.set_num_threads(1)
    return lambda: None
