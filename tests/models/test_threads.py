"""Devices may be threads of one process: parts are built and run at the same time."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from collapipe_flwr.models.generation import Prompt
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


def test_texts_at_one_edge_do_not_mix_though_its_type_has_no_record(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("pegasus", "seq2seq"))
    weights = {key: 9 * tensor for key, tensor in splitter.initial_weights(seed=5).items()}
    edge = splitter.build_edge(weights).train(False)
    settings = json.dumps({"max_new_tokens": 8, "do_sample": True, "seed": 1})
    random = torch.Generator().manual_seed(3)
    prompts = [
        Prompt(hidden_BTD=hidden_BTD, settings_json=settings)
        for hidden_BTD in torch.randn(2, 1, 6, 32, generator=random)
    ]

    def text(prompt: Prompt) -> list[int]:
        with torch.no_grad():
            return edge.generate(prompt, lambda _: True, lambda *_: torch.zeros(0)).tolist()

    alone = [text(prompt) for prompt in prompts]
    assert alone[0] != alone[1]
    others: list[Future[list[int]]] = []

    def begin_the_other(*_: Any) -> None:  # while the first one runs through the encoder
        hook.remove()
        others.append(pool.submit(text, prompts[1]))
        wait(others, timeout=0.5)

    with ThreadPoolExecutor() as pool:
        hook = edge.model.get_encoder().layers[0].register_forward_pre_hook(begin_the_other)
        assert [text(prompts[0]), others[0].result(timeout=60)] == alone
