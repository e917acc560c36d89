"""The baseline of every comparison: the same model, batches and optimizer, in one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from collapipe_flwr.cluster.evaluation import EvalResult, PredictionConfig, predict_unsplit
from collapipe_flwr.core.errors import DataError
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.tasks import scores_of
from collapipe_flwr.pipeline.backward import fuse_accumulation
from collapipe_flwr.pipeline.compute import CPU, bring, compute_in, find_place, use_one_thread
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.soundness import describe_odd

PLAIN = Execution()
CONSTANT = repeat(1.0)


def train_unsplit(
    splitter: AnySplitter,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Sequence[Mapping[str, Tensor]]],
    execution: Execution = PLAIN,
    rates: Iterator[float] = CONSTANT,
) -> tuple[float, ...]:
    """Take one optimizer step per batch of micro-batches with labels; return their losses.

    ``splitter`` built the ``model``. A micro-batch counts with its share of the weight that the
    mean loss runs over, so a step's gradient is that of the mean over the whole batch under any
    cut. ``rates`` are the factors of the learning rates, one per step.
    """
    model.train()
    fuse_accumulation(model)  # as stages do
    place = find_place(model)
    losses = []
    for batch in batches:
        counts = [splitter.weight_of(micro_batch) for micro_batch in batch]
        if not sum(counts):
            continue
        step_loss = 0.0
        for micro_batch, count in zip(batch, counts, strict=True):
            if count == 0:
                continue  # the library's mean over nothing is not a number
            micro_batch = bring(micro_batch, place)
            with compute_in(execution.precision, place):
                outputs = splitter.run_whole(model, micro_batch)
                loss: Any = splitter.loss_of(outputs, micro_batch) * (count / sum(counts))
            with use_one_thread(place):
                loss.backward()
            step_loss += float(loss.detach())
            if not math.isfinite(step_loss) and (odd := describe_odd(micro_batch)):
                raise DataError(
                    f"the model computes no finite loss of a batch that has {odd}: mend or leave "
                    "out such examples"
                )
        optimizer.add_proximal()
        if execution.clip_norm:
            torch.nn.utils.clip_grad_norm_(optimizer.parameters, execution.clip_norm)
        optimizer.step(next(rates))
        optimizer.zero_grad()
        losses.append(step_loss)
    return tuple(losses)


def evaluate_unsplit(
    splitter: AnySplitter,
    model: nn.Module,
    batches: Iterable[Sequence[Mapping[str, Tensor]]],
    wanted: PredictionConfig | None = None,
) -> EvalResult:
    """Compute the mean loss over all labels, and predictions where they are ``wanted``."""
    model.train(False)
    losses: list[tuple[float, float]] = []
    predictions = []
    with torch.inference_mode():
        for batch in batches:
            found = []
            for micro_batch in batch:
                count = splitter.weight_of(micro_batch)
                if not count and wanted is None:
                    continue
                micro_batch = bring(micro_batch, find_place(model))
                outputs = splitter.run_whole(model, micro_batch)
                # the library's mean over no labels is NaN
                loss = float(splitter.loss_of(outputs, micro_batch)) if count else 0.0
                losses.append((loss, count))
                if wanted is not None:
                    best = predict_unsplit(model, micro_batch, scores_of(outputs), wanted)
                    found.append(best.to(CPU))
            predictions.append(tuple(found))
    return EvalResult.average(losses, tuple(predictions) if wanted else ())
