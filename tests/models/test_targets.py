"""What a mean loss runs over: every target, and nothing but targets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from collapipe_flwr.models.tasks import TASKS, count_labels


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 4)])
@pytest.mark.parametrize("task", ["sequence-classification", "image-classification"])
def test_a_quantity_of_minus_a_hundred_is_a_target(task: str, shape: tuple[int, ...]) -> None:
    labels = torch.full(shape, -100.0)
    assert TASKS[task].targets(labels) == labels.numel()


def test_a_quantity_per_example_is_never_a_mark() -> None:
    assert count_labels(torch.tensor([1.0, -100.0])) == 2


@pytest.mark.parametrize(
    "labels", [torch.tensor([1, -100]), torch.tensor([[0.5, -100.0]]), torch.tensor([[1, -100]])]
)
def test_classes_and_padding_are_marked_by_minus_a_hundred(labels: Tensor) -> None:
    assert count_labels(labels) == 1
