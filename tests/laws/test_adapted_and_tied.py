"""Laws: tied tables, shared parameters and adapters train across machines as in one process."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.models import next_tokens
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.saving import save_whole
from collapipe_flwr.models.spec import LoraConfig
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import Execution, StageConfig
from collapipe_flwr.pipeline.link import make_memory_pair
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.roles import FirstStage, LastStage, MiddleStage
from collapipe_flwr.pipeline.step import MicroBatch
from tests.closeness import assert_near, near
from tests.models.conftest import OVERRIDES, TOKENS
from tests.rounds import (
    ADAMW,
    SGD,
    Batch,
    Cut,
    largest_difference,
    micro_batches,
    train_split,
    train_whole,
)
from tests.thorough import few

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")

BLOCKS = 4
CUT = Cut(stops=(1, 2, 4), micro_batches=(2, 2, 1), schedule="1f1b")
TIED = [
    ("t5", "seq2seq", {"shared": "sum", "ties": "rows"}),
    ("t5", "seq2seq", {"shared": "sum"}),
    ("mt5", "seq2seq", {"shared": "sum"}),
    ("deberta-v2", "token-classification", {"shared": "sum"}),
    ("deberta-v2", "masked-lm", {"shared": "sum", "ties": "rows", "edge_blocks": 1}),
    ("bart", "seq2seq", {"ties": "rows"}),
    ("marian", "seq2seq", {"ties": "rows"}),
    ("bert", "masked-lm", {"ties": "rows", "edge_blocks": 1}),
    ("gpt2", "causal-lm", {"ties": "rows", "edge_blocks": 1}),
]


def _splitter(model_type: str, task: str, choices: dict[str, Any]) -> Splitter:
    labels = {"num_labels": 3} if "classification" in task else {}
    sizes = dict(OVERRIDES[model_type])
    if model_type == "deberta-v2":
        sizes["initializer_range"] = 0.3  # else its relative embeddings hardly learn
    return Splitter(
        make_spec(task, model_type=model_type, overrides=sizes, **TOKENS, **labels, **choices)
    )


def _cut(splitter: Splitter) -> Cut:
    return Cut(stops=(1, 2, splitter.num_blocks), micro_batches=(2, 2, 1), schedule="1f1b")


def _batch(splitter: Splitter, size: int, seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (size, 7), generator=rng)
    mask = (torch.arange(7)[None] < torch.randint(3, 8, (size, 1), generator=rng)).long()
    labels = (ids % 3) if "classification" in splitter.spec.task else ids
    if splitter.spec.task == "sequence-classification":
        labels = labels[:, 0]
    else:
        labels = labels.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def _steps(splitter: Splitter, cut: Cut, count: int) -> list[list[Batch]]:
    sizes = list(enumerate(cut.micro_batches))
    return [[_batch(splitter, n, seed=100 * step + i) for i, n in sizes] for step in range(count)]


@pytest.mark.parametrize(("model_type", "task", "choices"), few(TIED, 0, 4, 6, 8))
def test_ties_across_machines_are_exact(
    model_type: str, task: str, choices: dict[str, Any]
) -> None:
    splitter = _splitter(model_type, task, choices)
    assert splitter.sums_shared == (choices.get("shared") == "sum")
    assert bool(splitter.ties) == ("ties" in choices)
    weights, cut = splitter.initial_weights(seed=1), _cut(splitter)
    for rule, count in ((SGD, 1), (ADAMW, 3)):
        steps = _steps(splitter, cut, count)
        split_losses, split = train_split(splitter, weights, cut, steps, rule)
        whole_losses, whole = train_whole(splitter, weights, steps, rule)
        assert split_losses == near(whole_losses)
        assert_near(split, whole)
        for keys in filter(None, (tuple(splitter.ties), _trained_shared(splitter))):
            tied = {key: whole[key] for key in keys}  # the law is about these
            assert largest_difference(tied, {key: weights[key] for key in keys}) > 2e-4


def _trained_shared(splitter: Splitter) -> tuple[str, ...]:
    return tuple(key for key in splitter.shared_keys if key not in splitter.constant_keys)


def test_without_the_sum_replicas_would_learn_something_else() -> None:
    """The test above can fail: freezing the shared table gives another model."""
    exact = _splitter("t5", "seq2seq", {"shared": "sum"})
    frozen = _splitter("t5", "seq2seq", {"shared": "freeze"})
    weights, steps = exact.initial_weights(seed=1), _steps(exact, CUT, 1)
    _, summed = train_split(exact, weights, CUT, steps, SGD)
    _, kept = train_split(frozen, weights, CUT, steps, SGD)
    (key,) = exact.shared_keys
    assert float((summed[key] - kept[key]).abs().max()) > 1e-4


def test_clipping_counts_a_shared_parameter_once() -> None:
    splitter = _splitter("t5", "seq2seq", {"shared": "sum", "ties": "rows"})
    weights = splitter.initial_weights(seed=1)
    batch = _batch(splitter, 3, seed=1)
    whole = splitter.build_whole(weights).train()
    whole(**batch, use_cache=False).loss.backward()
    norm = float(clip_grad_norm_(whole.parameters(), max_norm=0.1))
    torch.optim.SGD(whole.parameters(), lr=1.0).step()
    result, parts = _one_clipped_step(splitter, weights, batch, clip_norm=0.1)
    assert norm > 0.2
    assert result == near(norm)
    trained = whole.state_dict()
    found = {key: value for part in parts for key, value in part.state_dict().items()}
    assert_near(found, {key: trained[key] for key in found})


def _one_clipped_step(
    splitter: Splitter, weights: dict[str, Tensor], batch: Batch, clip_norm: float
) -> tuple[float | None, list[Any]]:
    parts = [
        splitter.build_embedding(weights),
        splitter.build_segment(0, 2, weights),
        splitter.build_segment(2, splitter.num_blocks, weights),
        splitter.build_edge(weights),
    ]
    names = ["cu", "d1", "d2", "edge"]
    pairs = [make_memory_pair(a, b) for a, b in pairwise(names)]
    own = [
        (
            part,
            Optimizer(SGD, part.named_parameters()),
            StageConfig(name=name, deadline_s=20.0, execution=Execution(clip_norm=clip_norm)),
        )
        for part, name in zip(parts, names, strict=True)
    ]
    first = FirstStage(*own[0], downstream=pairs[0][0], shared=True)
    followers = [
        MiddleStage(*own[1], upstream=pairs[0][1], downstream=pairs[1][0]),
        MiddleStage(*own[2], upstream=pairs[1][1], downstream=pairs[2][0]),
        LastStage(*own[3], upstream=pairs[2][1]),
    ]
    threads = [threading.Thread(target=stage.serve, daemon=True) for stage in followers]
    for thread in threads:
        thread.start()
    weight = splitter.task.targets(batch["labels"])
    result = first.train_step(
        [MicroBatch(inputs=batch, context=splitter.context(batch), weight=weight)]
    )
    first.finish()
    for thread in threads:
        thread.join(20.0)
    return result.gradient_norm, parts


@pytest.fixture(params=[("llama", "causal-lm", 1), ("bert", "sequence-classification", 0)])
def adapted(request: pytest.FixtureRequest, tmp_path: Path) -> Splitter:
    model_type, task, edge_blocks = request.param
    plain = _splitter(model_type, task, {})
    save_whole(plain.spec, plain.initial_weights(seed=1), tmp_path)
    lora = LoraConfig(rank=2, dropout=0.2)
    return Splitter(make_spec(task, pretrained=str(tmp_path), edge_blocks=edge_blocks, lora=lora))


def test_adapters_train_alike_whatever_the_cut(adapted: Splitter) -> None:
    weights = adapted.initial_weights(seed=1)
    steps = _steps(adapted, CUT, count=3)
    one = Cut(stops=(adapted.num_blocks,), micro_batches=CUT.micro_batches)
    losses, expected = train_split(adapted, weights, one, steps, ADAMW, dropout_seed=4)
    cut_losses, found = train_split(adapted, weights, _cut(adapted), steps, ADAMW, dropout_seed=4)
    assert set(found) == set(adapted.all_keys())
    assert cut_losses == near(losses)
    assert_near(found, expected)
    assert largest_difference(found, weights) > 1e-3
    without = train_split(adapted, weights, one, steps, ADAMW, dropout_seed=5)[0]
    assert without != near(losses)


@pytest.mark.parametrize(
    ("execution", "tolerance"),
    [
        (Execution(), 1e-5),
        (Execution(recompute=True), 1e-5),
        (Execution(precision="bf16"), 1e-3),  # numbers that round to others in it
    ],
    ids=str,
)
def test_adapters_train_alike_whatever_a_head_scores_at_once(
    execution: Execution, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _splitter("llama", "causal-lm", {})
    save_whole(plain.spec, plain.initial_weights(seed=1), tmp_path)
    lora = LoraConfig(rank=2, dropout=0.2)
    spec = make_spec("causal-lm", pretrained=str(tmp_path), edge_blocks=1, lora=lora)
    splitter = Splitter(spec)
    weights, steps = splitter.initial_weights(seed=1), _steps(splitter, CUT, count=3)
    runs = []
    for tokens in (50, 5, 3):
        monkeypatch.setattr(next_tokens, "PIECE_BYTES", 4 * 50 * tokens)
        assert splitter.build_edge(weights).piece_tokens == tokens
        cut = _cut(splitter)
        runs.append(
            train_split(splitter, weights, cut, steps, SGD, dropout_seed=4, execution=execution)
        )
    (losses, expected), *others = runs
    moved = largest_difference(expected, weights)
    assert moved > 1e-4
    for cut_losses, found in others:
        assert cut_losses == pytest.approx(losses, rel=tolerance)
        assert largest_difference(found, expected) <= 10 * tolerance * moved


def test_nothing_goes_back_to_a_frozen_embedding(adapted: Splitter) -> None:
    """The control unit hears losses, a few numbers each; the lowest adapters get gradients."""
    weights, cut = adapted.initial_weights(seed=1), _cut(adapted)
    rule = OptimizerConfig(name="sgd", learning_rate=1.0)
    order = TrainingOrder(
        plan=cut.plan(),
        weights=weights,
        learning=LearningSettings(optimizer=rule, deadline_s=20.0),
    )
    batches = micro_batches(adapted, _steps(adapted, cut, count=1))
    result = train_round(adapted, order, batches, ThreadFleet(ThreadEdge()))
    control_unit, lowest, *_ = result.reports
    assert control_unit.received_down.bytes == 0
    assert lowest.sent_up.bytes == 0
    assert lowest.received_down.bytes > 0
    lowest_b = next(key for key in adapted.segment_keys(0, 1) if "lora_B" in key)
    assert not torch.equal(result.weights[lowest_b], weights[lowest_b])
