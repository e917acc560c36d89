"""The first law: a plan decides where blocks run, never what they compute.

One SGD step with rate 1 moves every weight by minus its gradient, so equal weights after a step
mean equal gradients; AdamW over several steps covers the state that lives between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster.control_unit import evaluate_batches, train_round
from collapipe_flwr.cluster.evaluation import PredictionConfig
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings, RoundOrder
from collapipe_flwr.cluster.unsplit import evaluate_unsplit, train_unsplit
from collapipe_flwr.core.domain import ClusterPlan, Segment
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import SessionKey
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.step import MicroBatch
from tests.closeness import assert_near, near

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")

TOKEN = "0123456789abcdef"
BLOCKS = 5
SGD = OptimizerConfig(name="sgd", learning_rate=1.0, weight_decay=0.0)
ADAMW = OptimizerConfig(name="adamw", learning_rate=1e-3)
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["marian", "bert"])
def splitter(request: pytest.FixtureRequest) -> Splitter:
    return make_splitter(request.param, dropout=0.0)


def make_splitter(model_type: str, dropout: float) -> Splitter:
    if model_type == "marian":
        sizes = {"d_model": 16, "encoder_layers": BLOCKS, "decoder_layers": 1}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        rest = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32}
        off = {"dropout": dropout, "attention_dropout": dropout}
        spec = make_spec(
            "seq2seq",
            model_type="marian",
            overrides={**sizes, **heads, **rest, **off},
            vocab_size=50,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            decoder_start_token_id=0,
        )
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": BLOCKS, "num_attention_heads": 2}
        off = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        spec = make_spec(
            "sequence-classification",
            model_type="bert",
            overrides={**sizes, "intermediate_size": 24, "max_position_embeddings": 32, **off},
            vocab_size=50,
            pad_token_id=0,
            num_labels=4,
        )
    return Splitter(spec)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where blocks go and how a batch is cut; sizes of micro-batches may be uneven."""

    stops: tuple[int, ...]
    micro_batches: tuple[int, ...]
    schedule: str = "gpipe"

    def plan(self) -> ClusterPlan:
        starts = (0, *self.stops[:-1])
        return ClusterPlan(
            cluster_id="A",
            segments=tuple(
                Segment(device_id=f"A/d{i}", first_block=first, stop_block=stop)
                for i, (first, stop) in enumerate(zip(starts, self.stops, strict=True))
            ),
            micro_batch_size=max(self.micro_batches),
            micro_batches=len(self.micro_batches),
            warmup_depth=self.warmup_depth(),
            local_steps=1,
            bandwidth_hz=1.0,
            tx_power_w={},
            gradient_power_w={},
            latency_s=1.0,
            step_s=1.0,
            energy_j={},
            memory_bytes={},
        )

    def warmup_depth(self) -> tuple[int, ...]:
        stages = len(self.stops) + 2
        if self.schedule == "gpipe":
            return (len(self.micro_batches),) * stages
        return tuple(range(stages, 0, -1))


CUTS = [
    Cut(stops=(5,), micro_batches=(4,)),
    Cut(stops=(5,), micro_batches=(3, 3, 1)),
    Cut(stops=(2, 5), micro_batches=(2, 2)),
    Cut(stops=(1, 2, 5), micro_batches=(2, 2, 2, 1)),
    Cut(stops=(1, 2, 5), micro_batches=(2, 2, 2, 1), schedule="1f1b"),
    Cut(stops=(1, 2, 3, 4, 5), micro_batches=(1, 1, 1), schedule="1f1b"),
]


def tiny_batch(splitter: Splitter, size: int, seed: int) -> Batch:
    """Padded examples of different lengths, with labels to match the task."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (size,), generator=rng)
    mask = (torch.arange(8)[None] < lengths[:, None]).long()
    ids = torch.randint(3, 50, (size, 8), generator=rng) * mask
    if splitter.task.name == "seq2seq":
        labels = torch.randint(3, 50, (size, 6), generator=rng)
        labels[torch.arange(6)[None] >= lengths[:, None]] = -100
    else:
        labels = torch.randint(0, 4, (size,), generator=rng)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def session_key(session_id: str) -> SessionKey:
    return SessionKey(session_id=session_id, token=TOKEN)


def without_labels(batch: Batch) -> Batch:
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


def _steps(splitter: Splitter, cut: Cut, count: int) -> list[list[Batch]]:
    return [
        [
            tiny_batch(splitter, size, seed=100 * step + i)
            for i, size in enumerate(cut.micro_batches)
        ]
        for step in range(count)
    ]


def _micro_batches(splitter: Splitter, steps: Sequence[Sequence[Batch]]) -> list[list[MicroBatch]]:
    count = splitter.weight_of
    return [
        [MicroBatch(inputs=b, context=splitter.context(b), weight=count(b)) for b in step]
        for step in steps
    ]


def _train_split(
    splitter: Splitter,
    weights: dict[str, Tensor],
    cut: Cut,
    steps: Sequence[Sequence[Batch]],
    rule: OptimizerConfig,
    dropout_seed: int | None = None,
) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    order = RoundOrder(
        plan=cut.plan(),
        weights=weights,
        learning=LearningSettings(optimizer=rule, schedule=cut.schedule, deadline_s=20.0),
        dropout_seed=dropout_seed,
    )
    batches = _micro_batches(splitter, steps)
    result = train_round(splitter, order, batches, ThreadFleet(ThreadEdge()))
    return result.losses, dict(result.weights)


def _train_unsplit(
    splitter: Splitter,
    weights: dict[str, Tensor],
    steps: Sequence[Sequence[Batch]],
    rule: OptimizerConfig,
) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    model = splitter.build_whole(weights)
    optimizer = Optimizer(rule, model.named_parameters())
    rates = rule.rates(batches=len(steps))
    losses = train_unsplit(splitter, model, optimizer, steps, rates=rates)
    return losses, {key: model.state_dict()[key] for key in weights}


def _largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert set(left) == set(right)
    return max(float((left[key] - right[key]).abs().max()) for key in left)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_loss_and_every_gradient_equal_the_unsplit_model(splitter: Splitter, cut: Cut) -> None:
    weights = splitter.initial_weights(seed=1)
    steps = _steps(splitter, cut, count=1)
    split_losses, split = _train_split(splitter, weights, cut, steps, SGD)
    whole_losses, whole = _train_unsplit(splitter, weights, steps, SGD)
    moved = _largest_difference(whole, weights)
    assert moved > 1e-3  # the comparison below can fail
    assert split_losses == near(whole_losses)
    assert_near(split, whole)


@pytest.mark.parametrize("cut", CUTS[1:5], ids=str)
def test_many_adamw_steps_stay_on_the_unsplit_path(splitter: Splitter, cut: Cut) -> None:
    weights = splitter.initial_weights(seed=2)
    steps = _steps(splitter, cut, count=4)
    split_losses, split = _train_split(splitter, weights, cut, steps, ADAMW)
    whole_losses, whole = _train_unsplit(splitter, weights, steps, ADAMW)
    assert split_losses == near(whole_losses)
    assert_near(split, whole)
    assert _largest_difference(whole, weights) > 1e-3


def test_micro_batches_give_the_gradient_of_one_large_batch(splitter: Splitter) -> None:
    weights = splitter.initial_weights(seed=3)
    cut = Cut(stops=(2, 5), micro_batches=(3, 3, 1))
    steps = _steps(splitter, cut, count=1)
    joined = {key: torch.cat([b[key] for b in steps[0]]) for key in steps[0][0]}
    _, split = _train_split(splitter, weights, cut, steps, SGD)
    _, whole = _train_unsplit(splitter, weights, [[joined]], SGD)
    assert_near(split, whole)


@pytest.mark.parametrize("rule", [SGD, ADAMW], ids=lambda rule: rule.name)
def test_a_step_without_labels_is_none(splitter: Splitter, rule: OptimizerConfig) -> None:
    """Neither weights nor optimiser state feel it, not even by weight decay."""
    weights, cut = splitter.initial_weights(seed=3), CUTS[2]
    first, last = _steps(splitter, cut, count=2)
    empty = [without_labels(batch) for batch in last]
    for train in (partial(_train_split, cut=cut), _train_unsplit):
        expected_losses, expected = train(splitter, weights, steps=[first, last], rule=rule)
        losses, found = train(splitter, weights, steps=[empty, first, empty, last], rule=rule)
        assert losses == expected_losses and len(losses) == 2
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        losses, found = train(splitter, weights, steps=[empty], rule=rule)
        assert losses == ()
        assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_a_micro_batch_without_labels_counts_nothing(splitter: Splitter) -> None:
    weights, cut = splitter.initial_weights(seed=3), Cut(stops=(2, 5), micro_batches=(2, 2, 2))
    ((first, second, third),) = _steps(splitter, cut, count=1)
    steps = [[without_labels(first), second, without_labels(third)]]
    losses, split = _train_split(splitter, weights, cut, steps, SGD)
    for same in (steps, [[second]]):
        whole_losses, whole = _train_unsplit(splitter, weights, same, SGD)
        assert losses == near(whole_losses)
        assert_near(split, whole)


@pytest.mark.parametrize(
    "guessing",
    [None, PredictionConfig(most_tokens=4), PredictionConfig(logits=True)],
    ids=["loss", "guesses", "logits"],
)
def test_a_test_set_without_labels_has_no_loss(splitter: Splitter, guessing) -> None:
    """And guesses all the same, which are those of the unsplit model."""
    weights, cut = splitter.initial_weights(seed=3), CUTS[2]
    steps = [[without_labels(batch) for batch in step] for step in _steps(splitter, cut, count=2)]
    order = RoundOrder(
        plan=cut.plan(),
        weights=weights,
        learning=LearningSettings(optimizer=SGD, schedule="gpipe", deadline_s=20.0),
    )
    batches, fleet = _micro_batches(splitter, steps), ThreadFleet(ThreadEdge())
    found = evaluate_batches(splitter, order, batches, fleet, wanted=guessing)
    whole = evaluate_unsplit(splitter, splitter.build_whole(weights), steps, guessing)
    assert (found.loss, found.targets) == (whole.loss, whole.targets) == (0.0, 0.0)
    ours, theirs = ([ids for step in of.predictions for ids in step] for of in (found, whole))
    assert len(ours) == len(theirs) == (0 if guessing is None else 2 * len(cut.micro_batches))
    if guessing is not None and guessing.logits:
        assert all(left.dtype == torch.float32 for left in ours)
        assert_near(dict(enumerate(ours)), dict(enumerate(theirs)))
    elif not splitter.decodes:  # generated texts are padded in their own ways
        assert all(map(torch.equal, ours, theirs))


def test_weights_given_to_a_round_stay_as_they_were(splitter: Splitter) -> None:
    weights = splitter.initial_weights(seed=4)
    copy = {key: tensor.clone() for key, tensor in weights.items()}
    cut = Cut(stops=(5,), micro_batches=(2,))
    _train_split(splitter, weights, cut, _steps(splitter, cut, count=1), SGD)
    assert _largest_difference(weights, copy) == 0.0


@pytest.mark.parametrize("model_type", ["marian", "bert"])
def test_dropout_is_the_same_for_every_cut_and_another_for_another_seed(model_type: str) -> None:
    dropping = make_splitter(model_type, dropout=0.2)
    weights = dropping.initial_weights(seed=5)
    one = Cut(stops=(5,), micro_batches=(3, 3))
    three = Cut(stops=(1, 2, 5), micro_batches=(3, 3), schedule="1f1b")
    steps = _steps(dropping, one, count=2)
    losses, reference = _train_split(dropping, weights, one, steps, ADAMW, dropout_seed=1)
    cut_losses, cut = _train_split(dropping, weights, three, steps, ADAMW, dropout_seed=1)
    other_losses, _ = _train_split(dropping, weights, one, steps, ADAMW, dropout_seed=2)
    assert cut_losses == near(losses)
    assert_near(cut, reference)
    assert other_losses != near(losses)
