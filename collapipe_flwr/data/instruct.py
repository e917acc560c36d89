"""Instruct models: the assistant's answers in conversations, written by the chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import DataError, extra
from collapipe_flwr.data.batches import Example, cut_batches, pack_rows
from collapipe_flwr.data.chat import (
    Span,
    find_faults,
    mark_tokens,
    read_conversations,
    set_template,
    write_conversation,
)
from collapipe_flwr.data.language import CausalLM
from collapipe_flwr.data.metrics import (
    ROUGE,
    Measure,
    Tally,
    add_counts,
    match_rate,
    word_accuracy,
)

with extra("data"):
    from datasets import Dataset

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
    """Write examples one behind the other; their first tokens are no targets."""
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
