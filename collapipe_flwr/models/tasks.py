"""The tasks: which transformers head learns them, what their loss is, and what it is a mean over.

The step of a batch that is cut into micro-batches is that of the mean over the whole batch: each
micro-batch counts with its share of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
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

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import load_class, load_function
from collapipe_flwr.models.foreign_errors import UNFIT, first_lines
from collapipe_flwr.models.spec import ModelSpec

Batch = Mapping[str, Tensor]
Loss = Callable[[Any, dict[str, Tensor]], Tensor]  # outputs of forward, batch -> scalar mean

CAUSAL_LM = "causal-lm"
LABELS = "labels"
LABEL_NAMES = (LABELS, "label")  # of a batch: as transformers, or as data sets call them
EXAMPLES = "examples"
SHIFTED = "shifted-labels"  # all but the first of a text, which no loss of the next token reads
COUNTED = (LABELS, SHIFTED, EXAMPLES)


def count_labels(labels: Tensor) -> int:
    """Count the labels that are not ignored.

    A fraction marks nothing, unless it pads a sequence: -100.0 may be a target like any other.
    """
    if labels.is_floating_point() and labels.dim() < 2:
        return labels.numel()
    return int((labels != IGNORED_LABEL).sum())


def _count_per_example(labels: Tensor) -> int:
    """Count as `count_labels` does, but labels that are never padded."""
    return count_labels(labels.flatten())


@dataclass(frozen=True, slots=True)
class ModelTask:
    """A task: the Auto classes that may hold its head, and how many targets a batch has."""

    name: str
    auto_classes: tuple[type, ...]
    targets: Callable[[Tensor], int] = count_labels
    labelled: bool = False  # whether the head's size is num_labels
    label_per_example: bool = False


_TASKS = (
    ModelTask(
        "sequence-classification",
        (AutoModelForSequenceClassification,),
        _count_per_example,
        labelled=True,
        label_per_example=True,
    ),
    ModelTask("token-classification", (AutoModelForTokenClassification,), labelled=True),
    ModelTask(
        "image-classification",
        (AutoModelForImageClassification,),
        _count_per_example,
        labelled=True,
        label_per_example=True,
    ),
    ModelTask("masked-lm", (AutoModelForMaskedLM,)),
    ModelTask(CAUSAL_LM, (AutoModelForCausalLM,), lambda labels_BT: count_labels(labels_BT[:, 1:])),
    ModelTask("seq2seq", (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)),
)
TASKS: Mapping[str, ModelTask] = {task.name: task for task in _TASKS}
OWN_TASK = ModelTask("own", ())  # of a class that learns something else


def find_task(name: str) -> ModelTask:
    """Return the task of that name; raises ModelError naming the nearest one."""
    if found := {**TASKS, OWN_TASK.name: OWN_TASK}.get(name):
        return found
    near = get_close_matches(name, TASKS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(TASKS)}"
    raise ModelError(f"unknown task {name!r}; {hint}")


def find_auto_class(task: str, config: PreTrainedConfig) -> Any:
    """Return the Auto class that puts the task's head on this architecture; None without one."""
    classes: tuple[Any, ...] = find_task(task).auto_classes
    return next((auto for auto in classes if type(config) in auto._model_mapping), None)


def model_class(spec: ModelSpec) -> type[PreTrainedModel] | None:
    """Return the class that ``spec`` names, None for that of its task; raises ModelError."""
    if not spec.model_class:
        return None
    found: type[PreTrainedModel] = load_class(spec.model_class, PreTrainedModel)
    return found


def recognize_task(kind: type) -> str:
    """Return the task whose head a class is or derives from; ``OWN_TASK``'s name if none is."""
    names = {base.__name__ for base in kind.__mro__ if is_transformers_class(base)}
    # BART's model is registered for masked-lm, too
    for task in sorted(_TASKS, key=lambda task: task.name != "seq2seq"):
        for auto in task.auto_classes:
            mapping: Any = auto._model_mapping  # type: ignore[attr-defined]
            heads = mapping._model_mapping.values()  # names, or tuples of names
            if any(names.intersection((h,) if isinstance(h, str) else h) for h in heads):
                return task.name
    return OWN_TASK.name


def find_built_class(task: str, config: PreTrainedConfig) -> type | None:
    """Return the library's class for the task on this architecture; None if there is none."""
    auto = find_auto_class(task, config)
    found: Any = auto and auto._model_mapping[type(config)]
    kind: type | None = found[0] if isinstance(found, tuple) else found
    return kind


def is_transformers_class(kind: type) -> bool:
    """Return whether a class is one of transformers itself."""
    return kind.__module__.partition(".")[0] == "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss and its weight.

    ``weight`` is what the mean runs over: ``labels`` (those that ``targets`` counts),
    ``shifted-labels``, ``examples``, or the name of a tensor of the batch, whose sum it is.
    ``loss`` None is the model's own.
    """

    weight: str
    targets: Callable[[Tensor], int]
    loss: Loss | None = None

    def weight_of(self, batch: Batch) -> float:
        """Return what this batch's mean loss runs over; raises ModelError if it lacks a tensor."""
        if self.weight == EXAMPLES:
            return _count_examples(batch)
        if self.weight == LABELS:
            return self.targets(labels_of(batch))
        if self.weight == SHIFTED:
            return count_labels(labels_of(batch)[:, 1:])
        weights = _tensor(batch, self.weight).to("cpu")  # not every accelerator supports float64
        return float(weights.sum(dtype=torch.float64))

    def loss_of(self, outputs: Any, batch: Batch) -> Tensor:
        """Compute the mean loss, a scalar; raises ModelError where there is none."""
        if self.loss is None:
            named = name_outputs(outputs)
            loss = named.get("loss") if isinstance(named, Mapping) else None
            if loss is None:
                raise ModelError(
                    "the model returned no loss: give the batch labels, or name a loss"
                )
        else:
            loss = _call(self.loss, outputs, batch)
        if not isinstance(loss, Tensor) or loss.dim():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(f"the loss must be one number, the mean over the batch, got {shape}")
        return loss


def _call(loss: Loss, outputs: Any, batch: Batch) -> Any:
    try:
        return loss(outputs, dict(batch))
    except UNFIT as cause:
        raise ModelError(
            f"the loss {loss.__module__}:{loss.__qualname__} fails: {type(cause).__name__}: "
            f"{first_lines(cause)}; the edge gets what forward does not read of a batch, here "
            f"{', '.join(sorted(repr(key) for key in batch if '/' not in key)) or 'nothing'}"
        ) from cause


def load_loss(path: str) -> Loss | None:
    """Load the loss at an import path; None for an empty one. Raises ModelError."""
    found: Loss | None = load_function(path) if path else None
    return found


def name_outputs(outputs: Any) -> Any:
    """Return outputs that have names as a mapping of their own fields; others as they are."""
    if isinstance(outputs, Mapping) or not is_dataclass(outputs):
        return outputs
    return {field.name: getattr(outputs, field.name) for field in fields(outputs)}


def scores_of(outputs: Any) -> Tensor:
    """Return the logits among what a model's forward returns; raises ModelError."""
    outputs = name_outputs(outputs)
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    elif isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    if not isinstance(outputs, Tensor):
        raise ModelError("the model's outputs hold no logits: let it return them as 'logits'")
    return outputs


def choose_best(scores: Tensor) -> Tensor:
    """Return predicted ids (B,) of scores (B, C), or (B, T) of (B, T, C)."""
    return scores.argmax(dim=-1)


def numbers_of(outputs: Any) -> list[Tensor]:
    """Return all floating-point tensors that a forward returns, in order."""
    outputs = name_outputs(outputs)
    leaves = tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def labels_of(batch: Batch) -> Tensor:
    """Return the labels of a batch, as transformers or data sets call them; raises ModelError."""
    return _tensor(batch, "label" if LABELS not in batch and "label" in batch else LABELS)


def _count_examples(batch: Batch) -> int:
    """Count by the labels, else by any tensor of a batch, else by the shape of one that stays."""
    if LABELS in batch or "label" in batch:
        return len(labels_of(batch))
    own = sorted(key for key in batch if "/" not in key)
    shapes = sorted(key for key in batch if key.startswith("shape/"))
    if own:
        return len(batch[own[0]])
    return int(_tensor(batch, shapes[0] if shapes else LABELS)[0])


def _tensor(batch: Batch, name: str) -> Tensor:
    if name not in batch:
        raise ModelError(
            f"the edge needs the tensor {name!r} to compute a loss: have the loader yield it, or "
            "give SplitModel another loss or weight"
        )
    return batch[name]
