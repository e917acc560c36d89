"""Precision, re-computation, clipping and codecs: what each may change, and what it may not.

A cut changes nothing in bfloat16 either: the split run equals the unsplit one under the same
autocast. Against single precision, loss and gradients agree to the tolerances stated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster.unsplit import train_unsplit
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.optimizer import Optimizer
from tests.closeness import near
from tests.rounds import (
    SGD,
    Batch,
    Cut,
    steps_of,
    train_split,
)
from tests.thorough import few

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")

CUT = Cut(stops=(1, 2, 5), micro_batches=(2, 2, 1), schedule="1f1b")
BF16 = Execution(precision="bf16")
LOSS_TOLERANCE = {"bf16": 2e-2, "fp16": 1e-4, "int8": 2e-3}  # relative, first step
GRADIENT_TOLERANCE = {"bf16": 5e-2, "fp16": 2e-3, "int8": 5e-2}  # of the norm, all together


def unsplit(
    splitter: Splitter,
    weights: dict[str, Tensor],
    execution: Execution,
    steps: Sequence[Sequence[Batch]],
) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    model = splitter.build_whole(weights)
    model.config.use_cache = False
    optimizer = Optimizer(SGD, model.named_parameters())
    losses = train_unsplit(splitter, model, optimizer, steps, execution)
    state = model.state_dict()
    return losses, {key: state[key] for key in weights}


def norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.double().norm() for t in tensors]).norm())


def moves(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[Tensor]:
    """Minus the gradients: one SGD step at rate 1."""
    return [after[key] - before[key] for key in sorted(before) if before[key].is_floating_point()]


@pytest.mark.parametrize(
    "execution",
    few([BF16, Execution(clip_norm=0.05), replace(BF16, recompute=True)], 1, 2),
    ids=str,
)
def test_a_cut_changes_nothing(splitter: Splitter, execution: Execution) -> None:
    weights = splitter.initial_weights(seed=1)
    steps = steps_of(splitter, CUT)
    losses, cut = train_split(splitter, weights, CUT, steps, SGD, execution=execution)
    whole_losses, whole = unsplit(splitter, weights, execution, steps)
    assert losses == near(whole_losses)
    assert norm(moves(weights, whole)) > 1e-2
    assert norm(moves(whole, cut)) <= 1e-3 * norm(moves(weights, whole))


@pytest.mark.parametrize(
    ("name", "execution"),
    [("bf16", BF16), ("fp16", Execution(codec="fp16")), ("int8", Execution(codec="int8"))],
)
def test_what_is_approximate_stays_near(
    splitter: Splitter, name: str, execution: Execution
) -> None:
    weights = splitter.initial_weights(seed=1)
    steps = steps_of(splitter, CUT)
    (exact_loss,), exact = train_split(splitter, weights, CUT, steps, SGD)
    (loss,), near = train_split(splitter, weights, CUT, steps, SGD, execution=execution)
    error = norm(moves(exact, near)) / norm(moves(weights, exact))
    assert loss == pytest.approx(exact_loss, rel=LOSS_TOLERANCE[name])
    assert 0 < error <= GRADIENT_TOLERANCE[name]


def test_weights_stay_in_single_precision(splitter: Splitter) -> None:
    weights = splitter.initial_weights(seed=1)
    _, after = train_split(splitter, weights, CUT, steps_of(splitter, CUT), SGD, execution=BF16)
    assert {key: t.dtype for key, t in after.items()} == {k: t.dtype for k, t in weights.items()}


def test_clipping_bounds_the_whole_step(splitter: Splitter) -> None:
    weights = splitter.initial_weights(seed=1)
    steps, clipped = steps_of(splitter, CUT), Execution(clip_norm=0.05)
    _, after = train_split(splitter, weights, CUT, steps, SGD, execution=clipped)
    assert norm(moves(weights, after)) == pytest.approx(0.05, rel=1e-3)
