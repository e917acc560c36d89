"""Task names to tasks: a new task is one class and one line here."""

from __future__ import annotations

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.data.classification import Classification
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.images import ImageClassification
from collapipe_flwr.data.language import CausalLM, MaskedLM
from collapipe_flwr.data.seq2seq import NumberWords, Summarisation, Translation
from collapipe_flwr.data.tasks import Task
from collapipe_flwr.data.token_classification import TokenClassification
from collapipe_flwr.data.tokenizer import Vocabulary

TASKS: dict[str, type[Task]] = {
    "number-words": NumberWords,
    "classification": Classification,
    "token-classification": TokenClassification,
    "image-classification": ImageClassification,
    "masked-lm": MaskedLM,
    "causal-lm": CausalLM,
    "translation": Translation,
    "summarisation": Summarisation,
}


def load_task(
    settings: DataConfig,
    vocabulary: Vocabulary | None = None,
    *,
    known_labels: tuple[str, ...] = (),
) -> Task:
    """The task of ``settings``; data is read on first use.

    A control unit passes the ``vocabulary`` that the server sent, a server the ``known_labels`` of
    a checkpoint in their order. Raises ConfigError for a task that is not there.
    """
    if settings.task not in TASKS:
        raise ConfigError(f'data.task must be one of {", ".join(TASKS)}, got "{settings.task}"')
    task = TASKS[settings.task](settings, vocabulary)
    task.known_labels = known_labels
    return task
