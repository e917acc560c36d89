"""Conversations as a chat template writes them, and what of that the assistant wrote."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.instruct import mark_tokens, write_conversation
from tests.chats import CHATML, MARKED, PROMPT, TURN, chat_tokenizer, message

TALK = [
    message("system", "be brief"),
    message("user", "it was"),
    message("assistant", "\nthe best"),
    message("user", "and then"),
    message("assistant", "the worst"),
]
# Llama 2's way: the prompt for an answer is the end of the question
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
# Qwen 3's way: only the last answer says that nothing was thought
FORGETFUL = (
    "{% for message in messages %}{% if loop.last and message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n<think></think>' + message['content'] + '<|im_end|>\n' }}"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer()


def answers(tokenizer: PreTrainedTokenizerFast, template: str) -> list[str]:
    tokenizer.chat_template = template
    text, spans = write_conversation(tokenizer, TALK)
    assert text == tokenizer.apply_chat_template(TALK, tokenize=False)
    return [text[start:stop] for start, stop in spans]


def test_every_answer_is_found_with_the_end_of_its_turn(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ended = ["\nthe best<|im_end|>", "the worst<|im_end|>"]
    assert answers(tokenizer, MARKED) == ended
    assert answers(tokenizer, CHATML) == [f"{answer}\n" for answer in ended]
    assert answers(tokenizer, BRACKETS) == [" \nthe best<|im_end|>", " the worst<|im_end|>"]


def test_marked_tokens_are_those_of_the_library(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = MARKED
    text, spans = write_conversation(tokenizer, TALK)
    ours: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    theirs: Any = tokenizer.apply_chat_template(TALK, return_assistant_tokens_mask=True)
    assert ours["input_ids"] == theirs["input_ids"]
    assert mark_tokens(ours["offset_mapping"], spans) == [
        bool(m) for m in theirs["assistant_masks"]
    ]


def test_a_token_across_the_border_is_a_target_and_blanks_without_characters_are_too() -> None:
    offsets = [(0, 3), (3, 6), (8, 8), (8, 9), (9, 12)]
    assert mark_tokens(offsets, [(5, 9)]) == [False, True, True, True, False]
    assert mark_tokens(offsets[:2], [(5, 9), (9, 12)]) == [False, True]


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (FORGETFUL, "in other words once more follows"),
        (
            "{% for m in messages %}{{ m['role'] }}{% endfor %}{{ messages[-1]['content'] }}",
            "other",
        ),
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}hello", "does not mark"),
        ("{{ messages[0]['content'] }}", "leaves out"),
    ],
)
def test_a_template_that_hides_answers_is_refused(
    tokenizer: PreTrainedTokenizerFast, template: str, sentence: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=sentence) as refusal:
        write_conversation(tokenizer, TALK)
    assert "{% generation %}" in str(refusal.value) and "data.chat-template" in str(refusal.value)


def test_the_last_answer_of_a_forgetful_template_can_be_learned(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = FORGETFUL
    text, ((start, stop),) = write_conversation(tokenizer, TALK[1:3])
    assert text[start:stop] == "<think></think>\nthe best<|im_end|>\n"
