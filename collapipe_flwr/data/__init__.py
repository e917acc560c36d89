"""Tasks, their examples, tokenizer, partitions and metrics: all that a control unit feeds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from collapipe_flwr.data.config import TASK_CLASSES, DataConfig

if TYPE_CHECKING:
    from collapipe_flwr.data.tasks import Task
    from collapipe_flwr.data.tokenizer import Vocabulary


def load_task(
    settings: DataConfig,
    vocabulary: Vocabulary | None = None,
    *,
    known_labels: tuple[str, ...] = (),
) -> Task:
    """The task of ``settings``; data is read on first use.

    A control unit passes the ``vocabulary`` that the server sent, a server the ``known_labels`` of
    a checkpoint in their order. Raises ConfigError where the extra ``data`` is not installed.
    """
    module, _, name = TASK_CLASSES[settings.task].partition(":")
    kind: type[Task] = getattr(import_module(f"{__name__}.{module}"), name)
    task = kind(settings, vocabulary)
    task.known_labels = known_labels
    return task
