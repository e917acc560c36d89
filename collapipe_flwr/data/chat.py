"""Conversations: read from a table, written by a chat template, and where answers are in them.

A template may mark what the assistant writes by ``{% generation %}``. Without marks an answer is
what the text of a conversation up to it adds to the prompt for it, if the whole text begins so:
otherwise nobody can tell what the model would have to write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from collapipe_flwr.core.errors import DataError, extra
from collapipe_flwr.core.hub import expand_home
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.reader import read_column

with extra("data"):
    from datasets import Dataset

USER, ASSISTANT = "user", "assistant"
ROLES = ("system", USER, ASSISTANT)
Message = dict[str, str]  # role, content
Span = tuple[int, int]  # first, behind the last
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKED = "with {% generation %} around what the assistant writes"
_PAIRS = (("prompt", "", "completion"), ("instruction", "input", "output"))


def read_conversations(table: Dataset, settings: DataConfig, of: str) -> list[list[Message]]:
    """Read the conversations of a table, empty where a row has none; raises DataError.

    They are in ``data.messages-column``, or else each is a question with its answer, in columns
    ``prompt`` and ``completion``, or ``instruction``, ``input`` (if any) and ``output``.
    """
    column, names = settings.messages_column, table.column_names
    if column in names:
        return [_read_messages(row, column, of) for row in table[column][:]]
    for question, context, answer in _PAIRS:
        if question in names and answer in names:
            rows = zip(
                *(
                    read_column(table, each, key="column", of=of)
                    for each in (question, answer, context)
                    if each in names
                ),
                strict=True,
            )
            return [_make_conversation(*row) for row in rows]
    raise DataError(
        f'"{of}" has the columns {", ".join(names)}, but data.task "instruct" reads '
        f'data.messages-column "{column}" (lists of objects with role and content), or prompt and '
        "completion, or instruction, input and output: rename your columns to one of these"
    )


def _make_conversation(question: str, answer: str, context: str = "") -> list[Message]:
    asked = f"{question}\n\n{context}" if context.strip() else question
    return [{"role": USER, "content": asked}, {"role": ASSISTANT, "content": answer}]


def _read_messages(row: Any, column: str, of: str) -> list[Message]:
    """Read the messages of a row; fields that are not there are empty."""
    if not isinstance(row, list | None) or not all(isinstance(each, Mapping) for each in row or ()):
        raise DataError(
            f'data.messages-column "{column}" of "{of}" holds {row!r:.40} where the messages of a '
            "conversation should stand: give a list of objects with role and content in every row"
        )
    texts = ((each.get("role"), each.get("content")) for each in row or ())
    return [{"role": str(role or ""), "content": str(text or "")} for role, text in texts]


def find_faults(conversation: Sequence[Message]) -> str:
    """Say what is wrong with a conversation; empty if it can be learned from."""
    roles = [message["role"] for message in conversation]
    if not roles:
        return "no messages"
    if unknown := next((role for role in roles if role not in ROLES), None):
        return f'the unknown role "{unknown}" (known are {", ".join(ROLES)})'
    if "" in roles:
        return "a message without a role"
    if ASSISTANT not in roles:
        return "no answer (a message of the role assistant)"
    blank = (m["role"] for m in conversation if m["role"] in ROLES[1:] and not m["content"].strip())
    return f"an empty message of the {role}" if (role := next(blank, "")) else ""


def set_template(tokenizer: PreTrainedTokenizerFast, given: str, name: str) -> None:
    """Give a tokenizer the chat template in a file or text; empty: it has one, or DataError."""
    if given:
        tokenizer.chat_template = _read_template(given)
    if not tokenizer.chat_template:
        raise DataError(
            f'data.tokenizer "{name}" has no chat template, which data.task "instruct" needs: '
            "choose the tokenizer of an instruct model, or name a template in data.chat-template"
        )
    with_default = tokenizer.chat_template
    if isinstance(with_default, dict) and "default" not in with_default:
        raise DataError(
            f'data.tokenizer "{name}" has several chat templates ({", ".join(with_default)}) and '
            "none by default: give the text of one in data.chat-template"
        )


def _read_template(given: str) -> str:
    if "{%" in given or "{{" in given:
        return given
    try:
        return expand_home(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f'data.chat-template "{given}" cannot be read ({error}): name a file, or write the '
            "template itself"
        ) from error


def write_conversation(
    tokenizer: PreTrainedTokenizerFast, conversation: Sequence[Message]
) -> tuple[str, list[Span]]:
    """Write a conversation by the chat template; also return the characters of its answers.

    Raises TemplateError where the template refuses the conversation, DataError where it cannot be
    told what the assistant wrote.
    """
    if _MARKS.search(str(tokenizer.get_chat_template())):
        text, spans = _render(tokenizer, conversation, return_assistant_tokens_mask=True)
    else:
        text, _ = _render(tokenizer, conversation)
        spans = _find_added(tokenizer, conversation, text)
    if not any(stop > start for start, stop in spans):
        raise DataError(
            "the chat template leaves out or does not mark what the assistant writes: name one "
            f"{_MARKED} in data.chat-template"
        )
    return text, spans


def _find_added(
    tokenizer: PreTrainedTokenizerFast, conversation: Sequence[Message], text: str
) -> list[Span]:
    """Find what each answer adds to the prompt for it."""
    spans = []
    for place, message in enumerate(conversation):
        if message["role"] != ASSISTANT:
            continue
        prompt, _ = _render(tokenizer, conversation[:place], add_generation_prompt=True)
        answered, _ = _render(tokenizer, conversation[: place + 1])
        if not (answered.startswith(prompt) and text.startswith(answered)):
            raise DataError(
                "the chat template writes the beginning of a conversation in other words once more "
                f"follows, so that answers cannot be told from the rest: name one {_MARKED} in "
                "data.chat-template"
            )
        spans.append((len(prompt), len(answered)))
    return spans


def _render(
    tokenizer: PreTrainedTokenizerFast, conversation: Sequence[Message], **options: bool
) -> tuple[str, list[Span]]:
    settings: dict[str, Any] = {**tokenizer.special_tokens_map, **options}
    found: Any = render_jinja_template(
        [list(conversation)], chat_template=tokenizer.get_chat_template(), **settings
    )
    (text,), spans = found
    return text, spans[0] if spans else []


def mark_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Say of each token of a text whether it is in one of the spans, in part at least.

    Tokens of blanks may have no characters of their own: those within a span belong to it.
    """
    marked = [False] * len(offsets)
    for start, stop in spans:
        first = next((i for i, (_, end) in enumerate(offsets) if end > start), len(offsets))
        behind = next((i for i in range(first, len(offsets)) if offsets[i][0] >= stop), None)
        marked[first:behind] = [True] * len(marked[first:behind])
    return marked
