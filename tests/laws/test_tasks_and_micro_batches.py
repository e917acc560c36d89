"""For every task: the gradient of a step does not feel how it is cut into micro-batches.

The examples have uneven numbers of targets, so a mean of micro-batch means would be wrong. One SGD
step with rate 1 moves every weight by minus its gradient.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster.local_data import DataPlace, LocalData
from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.keys import Value
from collapipe_flwr.federation.run.learner import make_learner
from tests.closeness import assert_near, near
from tests.rounds import (
    SGD,
    Cut,
    largest_difference,
    train_split,
    train_whole,
)
from tests.thorough import few
from tests.tiny_tasks import (
    TASKS,
    own_cache,  # noqa: F401
    task_values,
)

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")

EXAMPLES = 7


def values_of(task: str, folder: Path) -> dict[str, Value]:
    return {**task_values(task, folder), "train.examples-per-round": EXAMPLES, "clusters": 1}


def step(values: dict[str, Value], size: int, bucketing: str = "none") -> list[dict[str, Tensor]]:
    """The micro-batches of the one step of round 1."""
    config = parse({**values, "data.bucketing": bucketing})
    local = LocalData(config, DataPlace(index=0, count=1), None)
    chosen = local.draw_examples(1)
    (found,) = local.cut_steps(chosen, 1, batch_size=EXAMPLES, micro_batch_size=size)
    return found


@pytest.mark.parametrize("task", few(TASKS, 1, 5, 6))
def test_cut_and_bucketed_steps_have_the_gradient_of_one_batch(task: str, tmp_path: Path) -> None:
    values = values_of(task, tmp_path)
    splitter = make_learner(parse(values)).splitter
    assert splitter.num_blocks == 5
    weights = splitter.initial_weights(seed=1)
    whole_step = step(values, EXAMPLES)
    whole_losses, whole = train_whole(splitter, weights, [whole_step], SGD)
    assert largest_difference(whole, weights) > 1e-3  # the comparisons below can fail
    for bucketing in ("none", "tokens"):
        cut_step = step(values, 3, bucketing)
        sizes = tuple(len(micro_batch["labels"]) for micro_batch in cut_step)
        assert len(sizes) == 3
        cut = Cut(stops=(2, 5), micro_batches=sizes)
        losses, split = train_split(splitter, weights, cut, [cut_step], SGD)
        assert_near(split, whole)
        assert losses == near(whole_losses)


@pytest.mark.parametrize("task", ["masked-lm", "translation", "token-classification"])
def test_the_law_could_fail(task: str, tmp_path: Path) -> None:
    """Micro-batches do count differently: the mean of their means is another gradient."""
    values = values_of(task, tmp_path)
    splitter = make_learner(parse(values)).splitter
    targets = splitter.task.targets
    cut_step = step(values, 3)
    counts = [targets(batch["labels"]) for batch in cut_step]
    shares = torch.tensor(counts) / sum(counts)
    assert (shares - 1 / len(counts)).abs().max() > 0.05


@pytest.mark.parametrize("task", ["masked-lm", "translation", "token-classification"])
def test_bucketing_pads_less(task: str, tmp_path: Path) -> None:
    values = values_of(task, tmp_path)

    def computed(bucketing: str) -> tuple[int, int]:
        found = step(values, 2, bucketing)
        return (
            sum(batch["input_ids"].numel() for batch in found),
            max(batch["input_ids"].numel() for batch in found),
        )

    (plain, largest_plain), (bucketed, largest) = computed("none"), computed("tokens")
    assert bucketed < plain
    assert largest <= largest_plain


def test_the_first_bucket_of_a_step_is_any_and_the_same_one_again(tmp_path: Path) -> None:
    """It stands for all where gradient noise is measured: not the one of the shortest examples."""
    config = parse({**values_of("translation", tmp_path), "data.bucketing": "tokens"})
    local = LocalData(config, DataPlace(index=0, count=1), None)
    chosen = local.draw_examples(1)

    def orders() -> list[list[int]]:
        return [
            [micro_batch["input_ids"].shape[1] for micro_batch in step]
            for index in range(12)
            for step in local.cut_steps(chosen, index, batch_size=EXAMPLES, micro_batch_size=2)
        ]

    found = orders()
    assert found == orders()
    assert len({step[0] for step in found}) > 1
    assert all(sorted(step) == sorted(found[0]) for step in found)
