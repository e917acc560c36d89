"""Conversations as examples: what rows may look like, which tokens are targets, what is told."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import ConfigError, DataError
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.instruct import Instruct
from collapipe_flwr.data.tokenizer import Vocabulary
from collapipe_flwr.federation.run.learner import make_learner
from tests.chats import CHATML, MARKED, chat_tokenizer, conversations, message, write_lines

ASKED, ANSWERED = message("user", "it was"), message("assistant", "the best")
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


def instruct(train: str, tokenizer: str, **changes: Any) -> Instruct:
    values = {"max_source_length": 200, "test_examples": 1, **changes}
    return Instruct(DataConfig(task="instruct", train=train, tokenizer=tokenizer, **values))


def texts(task: Instruct) -> tuple[str, str]:
    """The first example, and its targets."""
    (example,) = task.make_examples(task.every_row.select([0])).to_list()
    targets = [label for label in example["labels"] if label != IGNORED_LABEL]
    return task.tokenizer.decode(example["ids"]), task.tokenizer.decode(targets)


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"messages": [ASKED, ANSWERED], "prompt": "x"}, "it was"),
        ({"prompt": "it was", "completion": "the best"}, "it was"),
        ({"instruction": "it", "input": "was", "output": "the best"}, "it\n\nwas"),
        ({"instruction": "it", "input": " ", "output": "the best"}, "it"),
        ({"instruction": "it", "output": "the best"}, "it"),
    ],
)
def test_rows_of_every_kind_become_conversations(
    tmp_path: Path, tokenizer: str, row: dict[str, Any], question: str
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" * 3).encode()))
    text, targets = texts(instruct(str(path), tokenizer))
    answer = "the best<|im_end|>\n"
    assert targets == answer
    assert text == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}"


def test_messages_may_have_another_name(tmp_path: Path, tokenizer: str) -> None:
    train = write_lines(tmp_path / "rows.jsonl", [{"talk": [ASKED, ANSWERED]}] * 3)
    assert texts(instruct(train, tokenizer, messages_column="talk"))[1] == "the best<|im_end|>\n"
    with pytest.raises(
        DataError, match=r"the columns talk, .*data\.messages-column.* or prompt and"
    ):
        _ = instruct(train, tokenizer).every_row
    wrong = write_lines(tmp_path / "wrong.jsonl", [{"messages": ["it was"]}] * 3)
    with pytest.raises(DataError, match=r"holds \['it was'\] where the messages of a conversation"):
        _ = instruct(wrong, tokenizer).every_row


def test_bad_rows_are_named_or_left_out_and_counted(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"messages": [ASKED, ANSWERED]} for _ in range(9)]
    rows[1] = {"messages": [ASKED, message("bot", "the best")]}
    rows[3] = {"messages": [ASKED]}
    rows[4] = {"messages": [ASKED, message("assistant", " ")]}
    rows[6] = {"messages": []}
    rows[8] = {"messages": [{"content": "it was"}, ANSWERED]}
    task = instruct(write_lines(tmp_path / "rows.jsonl", rows), tokenizer)
    with pytest.raises(DataError) as refusal:
        _ = task.train
    said = str(refusal.value)
    assert said.startswith(f'5 of 9 rows of "{task.settings.train}" cannot be used: ')
    assert 'the unknown role "bot" (known are system, user, assistant) in row 2' in said
    assert "no answer (a message of the role assistant) in row 4" in said
    assert "an empty message of the assistant in row 5" in said
    assert "no messages in row 7" in said and "a message without a role in row 9" in said
    kept = Instruct(replace(task.settings, skip_bad_rows=True))
    assert len(kept.every_row) == 4
    assert kept.skipped[task.settings.train].startswith("5 of 9 rows of ")


def test_rows_that_the_template_refuses_are_named_or_left_out(
    tmp_path: Path, tokenizer: str
) -> None:
    rows = [{"messages": [ASKED, ANSWERED]} for _ in range(5)]
    rows[2]["messages"].insert(0, message("system", "be brief"))
    train = write_lines(tmp_path / "rows.jsonl", rows)
    task = instruct(train, tokenizer, chat_template=STRICT + CHATML)
    with pytest.raises(
        DataError, match=r'refuses row 3 of ".*": no system here: correct .* by data.skip-bad'
    ):
        task.make_examples(task.every_row)
    task = instruct(train, tokenizer, chat_template=STRICT + CHATML, skip_bad_rows=True)
    assert len(task.make_examples(task.every_row)) == 4
    assert "the chat template refuses 1 of" in "".join(task.examine().values())


def test_long_rows_are_cut_or_dropped_and_counted(tmp_path: Path, tokenizer: str) -> None:
    long_answer, long_question = message("assistant", "best " * 90), message("user", "it " * 90)
    rows = [{"messages": [ASKED, ANSWERED]} for _ in range(6)]
    rows[1], rows[4] = {"messages": [ASKED, long_answer]}, {"messages": [long_question, ANSWERED]}
    train = write_lines(tmp_path / "rows.jsonl", rows)
    task = instruct(
        train, tokenizer, max_source_length=40, test=write_lines(tmp_path / "test.jsonl", rows[:1])
    )
    examples = task.make_examples(task.train).to_list()
    assert len(examples) == 5 and max(len(each["ids"]) for each in examples) == 40
    assert task.examine() == {
        "data.train": "data.train: longer than data.max-source-length=40 tokens: 2 of 6 rows "
        "(1 cut at their end, 1 dropped, with no answer within the limit)"
    }
    with pytest.raises(DataError, match="no answer is left to learn from: longer than"):
        task.make_examples(task.train.select([4]))


def test_conversations_are_packed_only_where_they_stay_apart(
    tmp_path: Path, tokenizer: str
) -> None:
    values = {
        "data.task": "instruct",
        "data.train": write_lines(tmp_path / "rows.jsonl", conversations(4)),
        "data.tokenizer": tokenizer,
        "data.test-examples": 1,
        "data.pack": True,
        "model.type": "lfm2",
        "model.overrides": "hidden_size=16 intermediate_size=24 num_hidden_layers=2 "
        "num_attention_heads=2 num_key_value_heads=1 full_attn_idxs=[1]",
    }
    with pytest.raises(ConfigError, match=r"data\.pack is true, but in model type 'lfm2' the"):
        make_learner(parse(values))
    with pytest.raises(ConfigError, match=r'data\.pack is true, but data\.task is "causal-lm"'):
        parse({**values, "data.task": "causal-lm"})


def test_the_template_travels_and_stays_with_the_model(tmp_path: Path, tokenizer: str) -> None:
    train = write_lines(tmp_path / "rows.jsonl", conversations(5))
    (tmp_path / "marked.jinja").write_text(MARKED)
    task = instruct(train, tokenizer, chat_template=str(tmp_path / "marked.jinja"))
    unit = Instruct(task.settings, Vocabulary.from_json(task.vocabulary.to_json()))
    assert unit.tokenizer.chat_template == MARKED
    task.save_inputs(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == MARKED


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    train = write_lines(tmp_path / "rows.jsonl", conversations(5))
    bare = chat_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(DataError, match=r"has no chat template, .* in data\.chat-template"):
        _ = instruct(train, str(tmp_path / "bare")).vocabulary
    with pytest.raises(DataError, match=r'data\.chat-template "none\.jinja" cannot be read'):
        _ = instruct(train, str(tmp_path / "bare"), chat_template="none.jinja").vocabulary
    with pytest.raises(ConfigError, match=r"needs one with a chat template: leave it empty"):
        instruct(train, "train")


def test_an_empty_tokenizer_is_that_of_the_checkpoint() -> None:
    values = {"data.task": "instruct", "data.tokenizer": "", "model.pretrained": "owner/model"}
    assert parse(values).seeded_data.tokenizer == "owner/model"
    with pytest.raises(ConfigError, match=r"data\.tokenizer is empty, .* that is empty, too"):
        parse({"data.tokenizer": ""})


def test_answers_are_generated_after_the_question_alone(tmp_path: Path, tokenizer: str) -> None:
    """Padding at the left changes nothing: each is what the model writes by itself."""
    train = write_lines(tmp_path / "rows.jsonl", conversations(9))
    task = instruct(train, tokenizer, test_answers=3, max_target_length=7)
    examples = task.make_examples(task.every_row).to_list()
    config = LlamaConfig(
        vocab_size=len(task.tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=200,
        pad_token_id=task.tokenizer.pad_token_id,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    end = task.tokenizer.convert_tokens_to_ids("<|im_end|>")
    wanted = []
    for example in examples[:3]:
        last = task.tokenizer.decode(example["ids"]).rindex("assistant\n") + len("assistant\n")
        prompt = task.tokenizer(
            task.tokenizer.decode(example["ids"])[:last],
            add_special_tokens=False,
            return_tensors="pt",
        )
        found = model.generate(**prompt, max_new_tokens=7, do_sample=False, eos_token_id=end)
        new = found[0, prompt["input_ids"].shape[1] :]
        wanted.append(task.tokenizer.decode(new, skip_special_tokens=True).strip())
    assert task._answer(model, examples[:3]) == wanted
    assert {counts[1] for counts in task.count_answers(model, examples).values()} == {3.0}


def test_a_perfect_answer_matches(tmp_path: Path, tokenizer: str) -> None:
    train = write_lines(tmp_path / "rows.jsonl", conversations(4))
    task = instruct(train, tokenizer)
    examples = task.make_examples(task.every_row).to_list()

    class Parrot:
        """Answers from the book."""

        config, device = LlamaConfig(), torch.device("cpu")

        def generate(self, ids: torch.Tensor, **_: Any) -> torch.Tensor:
            answers = [
                each["ids"][len(p) :] for each, p in zip(examples, self._prompts(ids), strict=True)
            ]
            longest = max(map(len, answers))
            padding = task.tokenizer.pad_token_id
            rows = [a + [padding] * (longest - len(a)) for a in answers]
            return torch.cat([ids, torch.tensor(rows)], dim=1)

        def _prompts(self, ids: torch.Tensor) -> list[torch.Tensor]:
            return [row[row != task.tokenizer.pad_token_id] for row in ids]

    scores = task.score(task.count_answers(Parrot(), examples))
    assert scores["exact_match"] == scores["rougeL"] == 1.0
