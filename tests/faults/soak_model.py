"""The checkpoint of a soak: a very small translator from words to numbers, with its tokenizer.

    python -m tests.faults.soak_model FOLDER

Flower moves every tensor by a request of its own, which costs its SuperLink most of a small round.
So a soak trains adapters: of a model of two encoder blocks, four tensors travel.
"""

from __future__ import annotations

import sys

import torch
from transformers import MarianConfig, MarianMTModel

from collapipe_flwr.data.seq2seq import spell
from collapipe_flwr.data.tokenizer import train_tokenizer

_VOCABULARY = 300
_SEED = 7


def save(folder: str) -> None:
    """Write it; equal in every soak."""
    texts = [spell(number) for number in range(1000)]
    tokenizer = train_tokenizer(texts, vocab_size=_VOCABULARY, starts_with_bos=False)
    config = MarianConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=64,
        dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(_SEED)
    MarianMTModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save(sys.argv[1])
