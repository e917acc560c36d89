"""The run-config's ``data.*`` keys."""

from __future__ import annotations

from dataclasses import dataclass

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import (
    above,
    at_least,
    between,
    check_keys,
    key,
    numbers,
    one_of,
    words,
)

# Modules of this package and their classes: a new task is one class and one line here.
TASK_CLASSES = {
    "number-words": "seq2seq:NumberWords",
    "classification": "classification:Classification",
    "token-classification": "classification:TokenClassification",
    "image-classification": "classification:ImageClassification",
    "masked-lm": "language:MaskedLM",
    "causal-lm": "language:CausalLM",
    "instruct": "instruct:Instruct",
    "translation": "seq2seq:Translation",
    "summarisation": "seq2seq:Summarisation",
}
_PAIR = ("source", "target")
TASK_COLUMNS = {  # of the user's data, by task
    "classification": ("text", "label"),
    "token-classification": ("tokens", "tags"),
    "image-classification": ("image", "label"),
    "masked-lm": ("text",),
    "causal-lm": ("text",),
    "translation": _PAIR,
    "summarisation": _PAIR,
}
TRAIN_TOKENIZER = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data: the built-in task, or your own files or hub data set.

    ``seed`` is the run's. Raises ConfigError, naming the key, for unusable values.
    """

    task: str = key("number-words", one_of(*TASK_CLASSES))
    train: str = key("")  # csv, json, parquet, txt or conll file (also .gz), folder or hub name
    test: str = key("")  # the same; empty: a seeded share of the training data is held out
    text_column: str = key("text")
    label_column: str = key("label")
    source_column: str = key("source")
    target_column: str = key("target")
    tokens_column: str = key("tokens")  # token-classification: a list of words per row
    tags_column: str = key("tags")  # and a tag for each
    messages_column: str = key("messages")  # instruct: a list of objects with role and content
    chat_template: str = key("")  # instruct: a file or the text; empty: the tokenizer's own
    label_names: tuple[str, ...] = key((), words())  # of numbered labels, from 0: "O B-PER I-PER"
    image_column: str = key("image")  # pictures, file names or nested lists of 0 .. 255
    image_size: int = key(32, at_least(1))  # pixels; pictures are resized to a square
    image_channels: int = key(3, one_of(1, 3))  # gray or color
    image_mean: tuple[float, ...] = key((0.5,), numbers())  # subtracted from 0 .. 1; or per channel
    image_std: tuple[float, ...] = key((0.5,), numbers())
    mask_share: float = key(0.15, between(0, 1))  # masked-lm: tokens to guess
    partition: str = key("auto", one_of("auto", "natural", "iid", "dirichlet"))
    partition_column: str = key("")  # what natural and dirichlet go by; empty: the task's choice
    alpha: float = key(0.5, above(0))  # dirichlet: small is more skewed
    tokenizer: str = key(TRAIN_TOKENIZER)  # BPE learned here; else folder or name; empty: model's
    source_language: str = key("")  # that tokenizers of many languages write into texts: en_XX
    target_language: str = key("")
    vocab_size: int = key(384, between(260, 1_000_000))
    max_source_length: int = key(64, at_least(2))  # of a block or conversation, too
    max_target_length: int = key(64, at_least(2))
    bucketing: str = key("none", one_of("none", "tokens"))  # tokens: micro-batches of like lengths
    pack: bool = key(False)  # instruct: several conversations of a micro-batch in a row, kept apart
    stream: str = key("")  # folder that grows, STREAM/<cluster number>/FILE; empty: none
    stream_replay: float = key(0.5, between(0, 1))  # share of a round drawn from earlier examples
    skip_bad_rows: bool = key(False)  # without a text, or with other tags than words; else refused
    train_examples: int = key(0, at_least(0))  # 0: all
    test_examples: int = key(0, at_least(0))  # 0: all
    test_answers: int = key(16, at_least(0))  # instruct: test rows whose answers are generated
    seed: int = 0

    def __post_init__(self) -> None:
        check_keys(self, "data.")
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, got {self.seed}")
        if self.task == "instruct" and self.tokenizer == TRAIN_TOKENIZER:
            raise ConfigError(
                'data.tokenizer is "train", but data.task "instruct" needs one with a chat '
                "template: leave it empty for that of model.pretrained, or name a directory"
            )
        if self.pack and self.task != "instruct":
            raise ConfigError(
                f'data.pack is true, but data.task is "{self.task}": only conversations of the '
                'task "instruct" are packed; leave it out'
            )
        self._check_columns()
        for name in ("train", "test"):
            if self.task == "number-words" and (given := getattr(self, name)):
                raise ConfigError(
                    f'data.{name} is "{given}", but data.task "number-words" makes up its own '
                    "examples: set data.task to the task of your data"
                )

    def _check_columns(self) -> None:
        fields = [f"{ours}_column" for ours in TASK_COLUMNS.get(self.task, ())]
        names = {getattr(self, field): key_of(field) for field in fields}
        if len(names) < len(fields):
            name, last = names.popitem()
            raise ConfigError(
                f'{key_of(fields[0])} and {last} are both "{name}", so nothing would be left to '
                "learn: name another column in one of them"
            )


def key_of(field: str) -> str:
    """Return the run-config key of a field: ``text_column`` -> ``data.text-column``."""
    return f"data.{field.replace('_', '-')}"
