"""What a run learns, from its run-config: the task and the model, which have to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from collapipe_flwr.cluster.evaluation import EvalResult, TestPart, choose_prediction, count_metrics
from collapipe_flwr.cluster.unsplit import evaluate_unsplit
from collapipe_flwr.config.schema import AppConfig
from collapipe_flwr.core.errors import ConfigError, DataError, prefix_errors
from collapipe_flwr.core.hub import expand_home
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.config import TRAIN_TOKENIZER
from collapipe_flwr.data.metrics import Tally, add_counts
from collapipe_flwr.data.seq2seq import Seq2Seq
from collapipe_flwr.data.tasks import Task, load_task
from collapipe_flwr.models.any_splitter import DescribedModel
from collapipe_flwr.models.checkpoint import read_pretrained_config
from collapipe_flwr.models.describing import keep_frozen, make_spec
from collapipe_flwr.models.spec import FACTORS, BatchShape, ModelSpec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.compute import CPU, hold
from collapipe_flwr.reporting.progress import ClusterProgress

_MOST_SHOWN = 6  # tensors in a sentence
_LAST_TOKEN_FIRST = ("mbart", "plbart")  # training puts a target's last token before it
_SHAPE_EXAMPLES, _SHAPE_BATCH = 256, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The task and the model of a run."""

    task: Task
    splitter: Splitter
    shape: BatchShape

    @property
    def model(self) -> DescribedModel:
        lora = self.splitter.spec.lora
        aggregate = lora.aggregate if lora else FACTORS
        return DescribedModel(self.splitter, self.shape, aggregate=aggregate)


def make_learner(config: AppConfig) -> Learner:
    """Load the task and build the model for it; raises ConfigError, DataError or ModelError."""
    _refuse_foreign_tokenizer(config)
    known_labels = _known_labels(config.model.pretrained)
    task = load_task(config.seeded_data, known_labels=known_labels)
    task.skipped |= task.examine()
    splitter = Splitter(_spec(config, task))
    _refuse_long_texts(config, task, splitter.most_tokens)
    _refuse_packing(config, splitter)
    _refuse_small_test(config, task)
    return Learner(task=task, splitter=splitter, shape=_shape(task))


def _known_labels(pretrained: str) -> tuple[str, ...]:
    """Read the class names of a checkpoint's head, in order; ``LABEL_0`` and so on by default.

    Raises ModelError if there is no checkpoint.
    """
    if not pretrained:
        return ()
    with prefix_errors("model.pretrained"):
        names = read_pretrained_config(pretrained).id2label or {}
    return tuple(name for _, name in sorted(names.items()))


def _refuse_foreign_tokenizer(config: AppConfig) -> None:
    """Raise ConfigError where a checkpoint would read the token ids of another tokenizer."""
    folder = expand_home(config.model.pretrained)
    files = ("tokenizer.json", "tokenizer_config.json")
    brings_one = config.model.pretrained and any((folder / name).is_file() for name in files)
    if brings_one and config.data.tokenizer == TRAIN_TOKENIZER:
        raise ConfigError(
            'data.tokenizer is "train", but model.pretrained has learnt from the tokens of its '
            f"own: set data.tokenizer={folder}"
        )


def _refuse_long_texts(config: AppConfig, task: Task, most_tokens: int | None) -> None:
    """Raise ConfigError where texts may be longer than the model's positions."""
    if not task.text_columns or most_tokens is None:
        return
    lengths = {"max-source-length": config.data.max_source_length}
    if task.model_task == "seq2seq":
        lengths["max-target-length"] = config.data.max_target_length
    for name, length in lengths.items():
        if length > most_tokens:
            raise ConfigError(
                f"data.{name} is {length}, but the model has only {most_tokens} positions: set "
                f"data.{name}={most_tokens}, or raise max_position_embeddings in model.overrides"
            )


def _refuse_packing(config: AppConfig, splitter: Splitter) -> None:
    """Raise ConfigError where texts in one row might read one another.

    Only types whose masks are rebuilt from positions keep them apart: those that generate.
    """
    if config.data.pack and not splitter.generates:
        raise ConfigError(
            f"data.pack is true, but in model type {splitter.spec.model_type!r} the conversations "
            "of a row may read one another, as by convolutions or states that run over all of it: "
            "leave it out"
        )


def _refuse_small_test(config: AppConfig, task: Task) -> None:
    """Raise DataError where a cluster would have nothing to evaluate."""
    if config.evaluation.federated and len(task.test) < config.run.clusters:
        raise DataError(
            f"{len(task.test)} test examples are too few for {config.run.clusters} clusters to "
            "evaluate: raise data.test-examples or set evaluation.federated to false"
        )


def drawn_sentence(pretrained: str, keys: Sequence[str]) -> str:
    """Format a note on the randomly initialised tensors that a checkpoint does not have."""
    shown = ", ".join(keys[:_MOST_SHOWN]) + (", ..." if len(keys) > _MOST_SHOWN else "")
    return (
        f"new in this run, drawn by chance, because {pretrained} has none that fit: {len(keys)} "
        f"tensors ({shown}); they are the head of the task and have to be trained"
    )


def _spec(config: AppConfig, task: Task) -> ModelSpec:
    labels = dict(enumerate(task.labels))
    pretrained = config.model.pretrained
    tokens = _token_settings(config, task)
    keys = "model.pretrained" if pretrained else "model.type, model.overrides"
    with prefix_errors(f"{keys}, model.edge-blocks" if config.model.edge_blocks else keys):
        spec = make_spec(
            task.model_task,
            model_type=None if pretrained else config.model.type,
            pretrained=pretrained or None,
            overrides={**config.model.settings, **_image_settings(config, task)},
            num_labels=len(labels) or None,
            id2label=labels or None,
            edge_blocks=config.model.edge_blocks,
            frozen_blocks=config.model.frozen_blocks,
            ties=config.model.ties,
            shared=config.model.shared,
            lora=config.lora,
            **tokens,
        )
    if not config.cache.active:
        return spec
    with prefix_errors("cache.max-gb"):
        return keep_frozen(spec, without_dropout=config.cache.dropout == "off")


def _token_settings(config: AppConfig, task: Task) -> dict[str, Any]:
    """Return the model's vocabulary settings; none for a task without text."""
    if not task.text_columns:
        return {}
    tokenizer = task.tokenizer
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": _decoder_start(config, task),
    }


def _decoder_start(config: AppConfig, task: Task) -> int | None:
    """Choose the token before targets; None keeps a checkpoint's own: BART's is not the padding."""
    if not isinstance(task, Seq2Seq):
        return None
    pretrained = config.model.pretrained
    kind = read_pretrained_config(pretrained).model_type if pretrained else config.model.type
    if kind in _LAST_TOKEN_FIRST:
        last: int = task.target_tokenizer("")["input_ids"][-1]
        return last
    return None if pretrained else task.tokenizer.pad_token_id


def _image_settings(config: AppConfig, task: Task) -> dict[str, object]:
    """Return the model's image settings; raises ConfigError if the data does not fit them."""
    if task.model_task != "image-classification":
        return {}
    ours: dict[str, object] = {
        "image_size": config.data.image_size,
        "num_channels": config.data.image_channels,
    }
    theirs = config.model.settings
    if not config.model.pretrained and not _takes_pictures(config.model.type):
        raise ConfigError(
            f'model.type "{config.model.type}" takes no pictures, which data.task '
            '"image-classification" gives it: choose one that does, such as vit'
        )
    if config.model.pretrained:
        theirs = {**read_pretrained_config(config.model.pretrained).to_dict(), **theirs}
    for key, name in (("image_size", "image-size"), ("num_channels", "image-channels")):
        if theirs.get(key, ours[key]) != ours[key]:
            raise ConfigError(
                f"data.{name} is {ours[key]}, but the model takes {theirs[key]}: "
                f"set data.{name}={theirs[key]}"
            )
    return {} if config.model.pretrained else ours


def _takes_pictures(model_type: str) -> bool:
    """Whether a model type has an image size; unknown types may have one."""
    if model_type not in CONFIG_MAPPING:
        return True
    return hasattr(CONFIG_MAPPING[model_type](), "image_size")


def _shape(task: Task) -> BatchShape:
    """Mean padded lengths of some micro-batches, from which blocks are profiled."""
    first = task.train.select(range(min(_SHAPE_EXAMPLES, len(task.train))))
    rows = task.make_examples(first).to_list()
    starts = range(0, len(rows), _SHAPE_BATCH)
    parts = [rows[start : start + _SHAPE_BATCH] for start in starts]
    batches = [task.collate_for(part, 0) for part in parts]
    pairs = [*zip(batches, map(len, parts), strict=True)]  # packed, a batch has fewer rows
    targets = [b["labels"].numel() / size if b["labels"].dim() > 1 else 1 for b, size in pairs]
    sources = [b["input_ids"].numel() / size if "input_ids" in b else 1 for b, size in pairs]
    return BatchShape(
        source_length=round(mean(sources)),
        target_length=round(mean(targets)),
    )


class Evaluator:
    """Scores global weights on the test set of a task."""

    def __init__(
        self, splitter: Splitter, task: Task, batch_size: int, compute: torch.device = CPU
    ) -> None:
        self._splitter = splitter
        self._compute = compute
        self.task = task
        rows: list[Example] = task.make_examples(task.test).to_list()
        self._batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        self._batch_size, self._done = batch_size, 0

    def progress(self) -> dict[str, ClusterProgress]:
        """How far the running evaluation is; from any thread."""
        size, count = self._batch_size, len(self._batches)
        return {"": ClusterProgress(tested=self._done, of=count, examples=size)}

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """``loss`` (mean over labels) and every metric of the task."""
        model = hold(self._splitter.build_whole(weights), self._compute)
        wanted = choose_prediction(self.task)
        losses: list[tuple[float, float]] = []
        tally: Tally = {}
        for done, rows in enumerate(self._batches):
            self._done = done
            part = TestPart.from_examples(self.task, rows)
            tested = evaluate_unsplit(self._splitter, model, [[part.tensors]], wanted)
            losses.append((tested.loss, tested.targets))
            tally = add_counts(tally, count_metrics(self.task, [part], tested.predictions[0]))
        tally |= self.task.count_answers(model, [row for rows in self._batches for row in rows])
        return scores(self.task, EvalResult.average(losses).loss, tally)


def scores(task: Task, loss: float, tally: Tally) -> dict[str, float]:
    return {"loss": loss, **task.score_loss(loss), **task.score(tally)}
