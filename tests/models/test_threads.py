"""Devices may be threads of one process: parts are built and run at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter


def test_parts_built_and_run_in_threads_equal_those_of_one_thread(tiny: Any) -> None:
    specs = [tiny.spec(*case) for case in (("bert", "masked-lm"), ("opt", "causal-lm"))]
    batches = [tiny.batch("bert", "masked-lm"), tiny.batch("opt", "causal-lm")]

    def step(number: int) -> tuple[float, float]:
        splitter, batch = Splitter(specs[number % 2]), batches[number % 2]
        weights = {key: torch.full(size, 0.1) for key, (size, _) in splitter.shapes.items()}
        context = splitter.context(batch)
        hidden_BTD = splitter.build_embedding(weights)(batch)
        for first in range(0, splitter.num_blocks, 2):
            segment = splitter.build_segment(first, first + 2, weights)
            hidden_BTD = segment(hidden_BTD, context)
        loss = splitter.build_edge(weights)(hidden_BTD, context)
        return loss.item(), profile_model(splitter, BatchShape(source_length=6)).blocks[
            0
        ].forward_flop

    expected = [step(number) for number in range(2)]
    with ThreadPoolExecutor(max_workers=3) as pool:
        found = list(pool.map(step, range(4), timeout=120))
    assert found == [expected[number % 2] for number in range(4)]
