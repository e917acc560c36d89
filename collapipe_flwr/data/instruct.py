"""Instruct models: the assistant's answers in conversations, written by a chat template.

A template may mark what the assistant writes by ``{% generation %}``. Without marks an answer is
what the text of a conversation up to it adds to the prompt for it, if the whole text begins so:
otherwise what the model would have to write is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import DataError, name_extra
from collapipe_flwr.core.hub import expand_home
from collapipe_flwr.data.batches import Example, cut_batches, pack_rows
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.language import CausalLM
from collapipe_flwr.data.metrics import (
    ROUGE,
    Measure,
    Tally,
    add_counts,
    match_rate,
    word_accuracy,
)
from collapipe_flwr.data.reader import read_column

with name_extra("data"):
    from datasets import Dataset

USER, ASSISTANT = "user", "assistant"
ROLES = ("system", USER, ASSISTANT)
Message = dict[str, str]  # role, content
Span = tuple[int, int]  # first, after the last
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKED = "with {% generation %} around what the assistant writes"
_PAIRS = (("prompt", "", "completion"), ("instruction", "input", "output"))
_GENERATED: Mapping[str, Measure] = {"exact_match": match_rate, **ROUGE}
_GENERATED_TOGETHER = 16
_MOST_NAMED = 5  # rows in a sentence


class Instruct(CausalLM):
    """Conversations; every answer's tokens, the end of the turn included, are targets.

    Perplexity and accuracy are those of the answers' tokens. Of ``data.test-answers`` test rows
    the last answer is also generated, and compared with the given one.
    """

    measures: ClassVar[Mapping[str, Measure]] = {"accuracy": word_accuracy, **_GENERATED}
    columns: ClassVar[tuple[str, ...]] = ("messages", "place")

    def read_columns(self, table: Dataset, name: str, *columns: str) -> dict[str, list[Any]]:
        others = [ours for ours in columns if ours not in self.columns]
        return {
            "messages": read_conversations(table, self.settings, name),
            "place": [f'row {row + 1} of "{name}"' for row in range(len(table))],
            **super().read_columns(table, name, *others),
        }

    def find_bad_rows(self, found: Mapping[str, Sequence[Any]]) -> dict[str, list[int]]:
        bad: dict[str, list[int]] = {}
        for row, conversation in enumerate(found["messages"]):
            if fault := find_faults(conversation):
                bad.setdefault(fault, []).append(row)
        return bad

    def select_usable(self, examples: Dataset, key: str) -> Dataset:
        del key
        return examples

    def examine(self) -> dict[str, str]:
        both = {"data.train": self.train, "data.test": self.test}
        found = {key: self._encode(rows)[1] for key, rows in both.items()}
        return {key: f"{key}: {told}" for key, told in found.items() if told}

    def make_examples(self, rows: Dataset) -> Dataset:
        """Make token ids with their labels of the rows; those without a target are left out."""
        examples, told = self._encode(rows)
        if not examples:
            raise DataError(f"no answer is left to learn from: {told}")
        return Dataset.from_list(examples)

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        batch = super().collate(examples)
        for row, example in enumerate(examples):
            batch["labels"][row, : len(example["labels"])] = torch.tensor(example["labels"])
        return batch

    def collate_for(self, examples: Sequence[Example], round_index: int) -> dict[str, Tensor]:
        """Collate for training: with ``data.pack`` the conversations share few rows.

        Their positions begin anew, by which attention tells them apart where there is no mask; a
        token of padding is a text of its own. No conversation predicts the next one's first token.
        """
        if not self.settings.pack:
            return super().collate_for(examples, round_index)
        lengths = [len(each["ids"]) for each in examples]
        rows = pack_rows(lengths, self.settings.max_source_length)
        batch = self.collate([_join([examples[place] for place in row]) for row in rows])
        positions = torch.zeros_like(batch.pop("attention_mask"))
        for number, row in enumerate(rows):
            found = torch.cat([torch.arange(lengths[place]) for place in row])
            positions[number, : len(found)] = found
        return {**batch, "position_ids": positions}

    def count(self, predictions: Sequence[str], references: Sequence[str]) -> Tally:
        return {"accuracy": word_accuracy.count(predictions, references)}

    def count_answers(self, model: Any, examples: Sequence[Example]) -> Tally:
        """Generate the last answers, greedily, of the first examples that are not cut."""
        whole = [e for e in examples if len(e["ids"]) < self.settings.max_source_length]
        tally: Tally = {}
        for asked in cut_batches(whole[: self.settings.test_answers], _GENERATED_TOGETHER):
            answers = self._answer(model, asked)
            wanted = self._decode(each["ids"][_find_answer(each) :] for each in asked)
            counts = {name: m.count(answers, wanted) for name, m in _GENERATED.items()}
            tally = add_counts(tally, counts)
        return tally

    def _answer(self, model: Any, examples: Sequence[Example]) -> list[str]:
        prompts = [each["ids"][: _find_answer(each)] for each in examples]
        length = max(map(len, prompts))
        padding = self.tokenizer.pad_token_id
        ids = torch.tensor([[padding] * (length - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
        room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        most = self.settings.max_target_length
        found = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=most if room is None else max(1, min(most, room - length)),
            do_sample=False,
            num_beams=1,
            pad_token_id=padding,
            eos_token_id=sorted({self.tokenizer.eos_token_id, *map(self._find_end, examples)}),
        )
        return self._decode(found[:, length:].tolist())

    def _find_end(self, example: Example) -> int:
        """Return the special token that ends the example's last answer, or else every text."""
        answer = example["ids"][_find_answer(example) :]
        special = (token for token in reversed(answer) if token in self._special_ids)
        return int(next(special, self.tokenizer.eos_token_id))

    def _decode(self, rows: Iterable[list[int]]) -> list[str]:
        texts = self.tokenizer.batch_decode(list(rows), skip_special_tokens=True)
        return [text.strip() for text in texts]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    def _make_tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = super()._make_tokenizer()
        set_template(tokenizer, self.settings.chat_template, self.settings.tokenizer)
        return tokenizer

    def _encode(self, rows: Dataset) -> tuple[list[Example], str]:
        """Return the examples of rows, and a sentence on those that are cut or left out."""
        limit = self.settings.max_source_length
        written, refused = self._write(rows)
        texts: Any = {"input_ids": [], "offset_mapping": []}
        if written:
            texts = self.tokenizer(
                [text for text, _ in written],
                add_special_tokens=False,
                return_attention_mask=False,
                return_offsets_mapping=True,
            )
        examples, longer = [], 0
        found = zip(texts["input_ids"], texts["offset_mapping"], written, strict=True)
        for ids, offsets, (_, spans) in found:
            targets = mark_tokens(offsets[:limit], spans)
            longer += len(ids) > limit
            if any(targets[1:]):  # nothing predicts the first token
                shown = ids[:limit]
                pairs = zip(shown, targets, strict=True)
                labels = [token if wanted else IGNORED_LABEL for token, wanted in pairs]
                examples.append({"ids": shown, "labels": labels})
        said = []
        if refused:
            said.append(
                f"the chat template refuses {len(refused)} of {len(rows)}, {_list(refused)}"
            )
        if longer:
            lost = len(written) - len(examples)
            what = (
                f"longer than data.max-source-length={limit} tokens: {longer} of {len(rows)} rows"
            )
            done = (
                f"{longer - lost} cut at their end, {lost} dropped, with no answer within the limit"
            )
            said.append(f"{what} ({done})")
        return examples, "; ".join(said)

    def _write(self, rows: Dataset) -> tuple[list[tuple[str, list[Span]]], list[str]]:
        """Write rows by the chat template; also return what it says of those that it refuses."""
        written, refused = [], []
        for row in rows:
            try:
                written.append(write_conversation(self.tokenizer, row["messages"]))
            except DataError as error:
                raise DataError(f"{row['place']}: {error}") from error
            except TemplateError as error:
                refused.append(f"{row['place']}: {error}")
        if refused and not self.settings.skip_bad_rows:
            raise DataError(
                f"the chat template refuses {_list(refused)}: correct or remove them, leave them "
                "out by data.skip-bad-rows=true, or name another data.chat-template"
            )
        return written, refused


def _join(examples: Sequence[Example]) -> Example:
    """Write examples one after the other; their first tokens are not targets."""
    labels = ([IGNORED_LABEL, *each["labels"][1:]] for each in examples)
    return {"ids": [*chain(*(each["ids"] for each in examples))], "labels": [*chain(*labels)]}


def _find_answer(example: Example) -> int:
    """Return the place of the last answer's first token."""
    labels: list[int] = example["labels"]
    stop = max(place for place, label in enumerate(labels) if label != IGNORED_LABEL)
    before = (p for p in range(stop, -1, -1) if labels[p] == IGNORED_LABEL)
    return next(before, -1) + 1


def _list(sentences: Sequence[str]) -> str:
    left = len(sentences) - _MOST_NAMED
    shown = "; ".join(sentences[:_MOST_NAMED])
    return f"{shown}; and {left} more" if left > 0 else shown


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
    """Return for each token of a text whether it is in one of the spans, at least in part.

    A token of blanks may have no characters of its own; within a span it belongs to it.
    """
    marked = [False] * len(offsets)
    for start, stop in spans:
        first = next((i for i, (_, end) in enumerate(offsets) if end > start), len(offsets))
        behind = next((i for i in range(first, len(offsets)) if offsets[i][0] >= stop), None)
        marked[first:behind] = [True] * len(marked[first:behind])
    return marked
