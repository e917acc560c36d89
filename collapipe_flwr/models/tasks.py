"""The tasks: which transformers head learns them, and what their loss averages over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import load_class
from collapipe_flwr.models.spec import ModelSpec

IGNORED_LABEL = -100  # transformers' mark for positions without a target


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task: the Auto classes that may hold its head, and how many targets a batch has."""

    name: str
    auto_classes: tuple[type, ...]
    targets: Callable[[Tensor], int]
    labelled: bool = False  # whether the head's size is num_labels
    label_per_example: bool = False


def best_class(scores: Tensor) -> Tensor:
    """What a head holds for best: ids (B,) of scores (B, C), or (B, T) of (B, T, C)."""
    return scores.argmax(dim=-1)


def count_labels(labels: Tensor) -> int:
    """How many there are, without those that are ignored."""
    return int((labels != IGNORED_LABEL).sum())


def _next_labels(labels_BT: Tensor) -> int:
    return count_labels(labels_BT[:, 1:])


_TASKS = (
    Task(
        name="sequence-classification",
        auto_classes=(AutoModelForSequenceClassification,),
        targets=count_labels,
        labelled=True,
        label_per_example=True,
    ),
    Task(
        name="token-classification",
        auto_classes=(AutoModelForTokenClassification,),
        targets=count_labels,
        labelled=True,
    ),
    Task(
        name="image-classification",
        auto_classes=(AutoModelForImageClassification,),
        targets=count_labels,
        labelled=True,
        label_per_example=True,
    ),
    Task(name="masked-lm", auto_classes=(AutoModelForMaskedLM,), targets=count_labels),
    Task(name="causal-lm", auto_classes=(AutoModelForCausalLM,), targets=_next_labels),
    Task(
        name="seq2seq",
        auto_classes=(AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq),
        targets=count_labels,
    ),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _TASKS}
OWN_TASK = Task(name="own", auto_classes=(), targets=len)  # of a class that learns something else


def find_task(name: str) -> Task:
    """The task of that name; raises ModelError naming the nearest one."""
    if name in TASKS:
        return TASKS[name]
    if name == OWN_TASK.name:
        return OWN_TASK
    near = get_close_matches(name, TASKS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(TASKS)}"
    raise ModelError(f"unknown task {name!r}; {hint}")


def has_head(task: str, config: PreTrainedConfig) -> bool:
    """Whether transformers has a head for the task on this architecture."""
    return bool(_auto_classes(task, config))


def auto_class(task: str, config: PreTrainedConfig) -> Any:
    """The Auto class that puts the task's head on this architecture; raises ModelError."""
    for candidate in _auto_classes(task, config):
        return candidate
    raise ModelError(f"transformers has no {task!r} head for model type {config.model_type!r}")


def model_class(spec: ModelSpec) -> type[PreTrainedModel] | None:
    """The class that ``spec`` names, None for that of its task; raises ModelError."""
    if not spec.model_class:
        return None
    found: type[PreTrainedModel] = load_class(spec.model_class, PreTrainedModel)
    return found


def known_task(kind: type) -> str:
    """The task whose head a class is, or is derived from; that of ``OWN_TASK`` if none is."""
    names = {base.__name__ for base in kind.__mro__ if is_librarys(base)}
    # BART's model stands among the masked ones, too
    for task in sorted(_TASKS, key=lambda task: task.name != "seq2seq"):
        for auto_class in task.auto_classes:
            mapping: Any = auto_class._model_mapping  # type: ignore[attr-defined]
            heads = mapping._model_mapping.values()  # names, or several of them
            if any(names.intersection((h,) if isinstance(h, str) else h) for h in heads):
                return task.name
    return OWN_TASK.name


def built_class(auto_class: Any, config: PreTrainedConfig) -> type:
    """The class that an Auto class builds for a configuration."""
    found: Any = auto_class._model_mapping[type(config)]
    first: type = found[0] if isinstance(found, tuple) else found
    return first


def is_librarys(kind: type) -> bool:
    """Whether a class is one of transformers itself."""
    return kind.__module__.partition(".")[0] == "transformers"


def _auto_classes(task: str, config: PreTrainedConfig) -> list[Any]:
    candidates: tuple[Any, ...] = find_task(task).auto_classes
    return [candidate for candidate in candidates if type(config) in candidate._model_mapping]
