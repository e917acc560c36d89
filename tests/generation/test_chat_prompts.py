"""A message to an instruct model is written by its chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.generation.text_model import TextModel
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.saving import save_whole
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.transport.generation import GenerateRequest
from tests.chats import chat_tokenizer
from tests.generation.test_backends import GPT2


def test_the_prompt_of_a_message_is_the_template_s(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    spec = make_spec(
        "causal-lm",
        model_type="gpt2",
        overrides=GPT2,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    save_whole(spec, Splitter(spec).initial_weights(1), tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = TextModel.load(tmp_path)
    asked = GenerateRequest(text="it was", chat=True, max_new_tokens=1)
    written = tokenizer.decode(model.encode_prompt(asked)[0])
    assert written == "<|im_start|>user\nit was<|im_end|>\n<|im_start|>assistant\n"
    model.tokenizer.chat_template = None
    with pytest.raises(
        ConfigError, match="--chat needs a model whose tokenizer has a chat template"
    ):
        model.encode_prompt(asked)
