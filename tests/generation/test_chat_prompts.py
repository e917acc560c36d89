"""Messages to an instruct model are written by its chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.generation.text_model import TextModel
from collapipe_flwr.transport.generation import ChatMessage, GenerateRequest

ASKED = GenerateRequest(messages=(ChatMessage("user", "it was"),))


@pytest.fixture(scope="module")
def model(talker: Path) -> TextModel:
    return TextModel.load(talker)


def test_the_prompt_of_messages_is_the_template_s(model: TextModel) -> None:
    messages = [("system", "of times"), ("user", "it was"), ("assistant", "best"), ("user", "it")]
    asked = GenerateRequest(messages=tuple(ChatMessage(*each) for each in messages))
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    written = model.tokenizer.decode(model.encode_prompt(asked)[0])
    assert written == turns + "<|im_start|>assistant\n"


def test_messages_need_a_chat_template_that_takes_them(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    with pytest.raises(ModelError, match="refuses the messages: roles must alternate"):
        model.encode_prompt(ASKED)
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="a model whose tokenizer has a chat template"):
        model.encode_prompt(ASKED)
    with pytest.raises(ConfigError, match="has the role 'poet', but known are system, user"):
        GenerateRequest(messages=(ChatMessage("poet", "it was"),))


def test_an_answer_may_fill_the_positions_unless_a_number_says_less(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def most(request: GenerateRequest) -> int:
        found: int = json.loads(model.settings_for(request, 16)[0])["max_new_tokens"]
        return found

    assert most(ASKED) == 256 - 16
    monkeypatch.setattr(model.settings, "max_new_tokens", 7)
    assert most(ASKED) == 7
    full = GenerateRequest(messages=(ChatMessage("user", "it was " * 300),))
    with pytest.raises(ModelError, match="256 positions: shorten the text"):
        model.encode_prompt(full)
