"""The laws hold where parts compute on an accelerator.

All parts of a chain are there; the unsplit model that they are compared with is on the CPU. On the
pretended accelerator every operation that takes tensors of both places fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.evaluation import PredictionConfig
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.unsplit import evaluate_unsplit, train_unsplit
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.saving import save_whole
from collapipe_flwr.models.spec import LoraConfig
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.compute import bring_home, find_place, hold, use_one_thread
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig, optimizer_config
from collapipe_flwr.pipeline.randomness import SeededRandomness
from collapipe_flwr.pipeline.state import copy_optimizer_state, load_optimizer_state, view_state
from tests.accelerators import accelerator, everything_at  # noqa: F401
from tests.closeness import assert_near, near
from tests.cluster import recovered as recovery
from tests.cluster.faults import Fault
from tests.generation import test_backends as generation
from tests.laws import test_adapted_and_tied as tied
from tests.laws import test_cluster_equals_whole as law
from tests.laws import test_execution as execution
from tests.laws import test_replicas_equal_whole as replicas
from tests.rounds import (
    ADAMW,
    SGD,
    make_splitter,
    micro_batches,
    order_of,
    steps_of,
    train_split,
    train_whole,
)
from tests.thorough import few

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")
CUT = law.CUTS[4]  # three devices, 1F1B


@pytest.fixture
def everywhere(accelerator: torch.device) -> Iterator[torch.device]:  # noqa: F811
    """All parts compute on the accelerator; no stage may have been elsewhere."""
    with everything_at(accelerator) as seen:
        yield accelerator
    assert seen <= {accelerator}


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("model_type", few(["marian", "bert"], 0))
def test_a_cut_changes_nothing(model_type: str) -> None:
    splitter = make_splitter(model_type, dropout=0.0)
    weights = splitter.initial_weights(seed=1)
    for rule, count in ((SGD, 1), (ADAMW, 3)):
        steps = steps_of(splitter, CUT, count)
        losses, split = train_split(splitter, weights, CUT, steps, rule)
        whole_losses, whole = train_whole(splitter, weights, steps, rule)
        assert losses == near(whole_losses)
        assert_near(split, whole)


@pytest.mark.parametrize("model_type", few(["marian", "bert"], 1))
def test_dropout_is_that_of_a_cpu(accelerator: torch.device, model_type: str) -> None:  # noqa: F811
    dropping = make_splitter(model_type, dropout=0.2)
    weights, cut = dropping.initial_weights(seed=5), law.CUTS[2]
    steps = steps_of(dropping, cut, 2)
    train = partial(train_split, dropping, weights, cut, steps, ADAMW, dropout_seed=1)
    losses, expected = train()
    with everything_at(accelerator):
        there, found = train()
    assert there == near(losses)
    assert_near(found, expected)
    assert train_whole(dropping, weights, steps, ADAMW)[0] != near(losses)


class Attention(nn.Module):
    """What draws besides dropout layers: torch's own attention, with and without its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.second = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.alpha = nn.AlphaDropout(0.3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(hidden)
        hidden = self.alpha(self.second(hidden, hidden, hidden)[0])
        noise = torch.rand_like(hidden) + torch.bernoulli(torch.full_like(hidden, 0.5))
        noise = noise + torch.randn(hidden.shape, device=str(hidden.device))
        noise = noise + torch.empty_like(hidden).exponential_()
        hidden = nn.functional.gumbel_softmax(hidden)
        query = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(
            query, query, query, is_causal=True, dropout_p=0.3
        )
        return mixed.transpose(1, 2).flatten(-2) * noise


def test_whatever_draws_draws_as_on_a_cpu(accelerator: torch.device) -> None:  # noqa: F811
    torch.manual_seed(0)
    net, hidden = Attention(), torch.randn(3, 5, 8)

    def drawn(place: torch.device) -> list[torch.Tensor]:
        part = hold(net, place)
        with SeededRandomness(part, 7).seed_at(0, 1):
            found = part(hidden.to(place))
        with use_one_thread(place):
            found.square().sum().backward()
        return [found.cpu(), *(p.grad.cpu() for p in part.parameters() if p.grad is not None)]

    expected = drawn(torch.device("cpu"))
    assert_near(drawn(accelerator), expected)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("case", [tied.TIED[0], tied.TIED[8]], ids=lambda case: case[0])
def test_tied_tables_and_shared_parameters(case) -> None:
    splitter = tied._splitter(*case)
    weights, cut = splitter.initial_weights(seed=1), tied._cut(splitter)
    steps = tied._steps(splitter, cut, 2)
    losses, split = train_split(splitter, weights, cut, steps, ADAMW)
    whole_losses, whole = train_whole(splitter, weights, steps, ADAMW)
    assert losses == near(whole_losses)
    assert_near(split, whole)


@pytest.mark.parametrize("frozen", few(["float32", "bfloat16", "int8"], 2))
def test_adapters_on_frozen_weights(
    accelerator: torch.device,  # noqa: F811
    tmp_path: Path,
    frozen: str,
) -> None:
    plain = tied._splitter("bert", "sequence-classification", {})
    save_whole(plain.spec, plain.initial_weights(seed=1), tmp_path)
    lora = LoraConfig(rank=2, frozen_dtype=frozen)
    splitter = Splitter(make_spec("sequence-classification", pretrained=str(tmp_path), lora=lora))
    weights, cut = splitter.initial_weights(seed=1), tied._cut(splitter)
    steps = tied._steps(splitter, cut, 2)
    losses, expected = train_split(splitter, weights, cut, steps, ADAMW)
    with everything_at(accelerator):
        there, found = train_split(splitter, weights, cut, steps, ADAMW)
    assert there == near(losses)
    assert_near(found, expected)


@pytest.mark.usefixtures("everywhere")
def test_replicas_of_a_stage() -> None:
    splitter, cut = make_splitter("bert", dropout=0.0), replicas.CUTS[3]
    weights = splitter.initial_weights(seed=1)
    steps = steps_of(splitter, cut, 2)
    losses, split = replicas.train_replicated(splitter, weights, cut, steps, ADAMW)
    whole_losses, whole = train_whole(splitter, weights, steps, ADAMW)
    assert losses == near(whole_losses)
    assert_near(split, whole)


@pytest.mark.usefixtures("everywhere")
def test_recomputed_and_clipped_steps() -> None:
    splitter = make_splitter("bert", dropout=0.0)
    weights, steps = splitter.initial_weights(seed=1), steps_of(splitter, execution.CUT)
    asked = Execution(recompute=True, clip_norm=0.05, check_finite=True)
    losses, split = train_split(splitter, weights, execution.CUT, steps, SGD, execution=asked)
    whole_losses, whole = execution.unsplit(splitter, weights, asked, steps)
    assert losses == near(whole_losses)
    assert_near(split, whole)


@pytest.mark.usefixtures("everywhere")
def test_a_round_that_loses_a_device_is_replayed() -> None:
    """With snapshots every step: from states that came home from the accelerator."""
    splitter = make_splitter("bert", dropout=0.1)
    first = splitter.initial_weights(seed=1)
    lost = Fault(step=1, device_id="A/d1", phase="backward")
    result, weights = recovery.run(splitter, first, lost, every=1)
    assert [incident.lost for incident in result.incidents] == [("A/d1",)]
    undisturbed, expected = recovery.run(splitter, first)
    assert result.losses == near(undisturbed.losses)
    assert_near(weights, expected)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("model_type", ["marian", "gpt2"])
@pytest.mark.parametrize("chosen", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_texts_are_those_of_the_unsplit_model(model_type: str, chosen: dict[str, object]) -> None:
    case, prompt = generation.Case(model_type), generation.PROMPTS[0]
    torch.manual_seed(3)
    expected = case.unsplit(prompt, **chosen)
    settings = case.settings(**chosen, **({"seed": 3} if "do_sample" in chosen else {}))
    with generation.local(case) as driver:
        assert generation.written(driver, prompt, settings) == expected


def test_an_unsplit_client(accelerator: torch.device) -> None:  # noqa: F811
    splitter = make_splitter("bert", dropout=0.0)
    weights, steps = splitter.initial_weights(seed=2), steps_of(splitter, CUT, 2)
    model = hold(splitter.build_whole(weights, trains=True), accelerator)
    optimizer = Optimizer(ADAMW, model.named_parameters())
    losses = train_unsplit(splitter, model, optimizer, steps)
    whole_losses, whole = train_whole(splitter, weights, steps, ADAMW)
    assert losses == near(whole_losses)
    assert_near(dict(bring_home(splitter.trained_weights(model))), whole)
    wanted = PredictionConfig(logits=True)
    found = evaluate_unsplit(splitter, model, steps, wanted)
    expected = evaluate_unsplit(splitter, splitter.build_whole(whole), steps, wanted)
    assert found.loss == near(expected.loss)
    assert all(logits.device.type == "cpu" for step in found.predictions for logits in step)


@pytest.mark.parametrize(
    "rule",
    [
        ADAMW,
        replace(SGD, momentum=0.9, proximal_mu=0.5),
        optimizer_config(partial(torch.optim.NAdam, lr=1e-2)),
        optimizer_config(partial(torch.optim.Adam, lr=1e-2, fused=True)),
    ],
    ids=lambda rule: rule.name,
)
def test_what_an_optimizer_keeps_goes_home_and_back(
    accelerator: torch.device,  # noqa: F811
    rule: OptimizerConfig,
) -> None:
    """Three steps are one step there, one here and one there again."""

    def step(place: torch.device, weights, slots):
        torch.manual_seed(1)
        net = nn.Linear(3, 2)
        net.load_state_dict(weights or net.state_dict())
        optimizer = Optimizer(rule, hold(net, place).named_parameters())
        load_optimizer_state(optimizer, slots)
        with use_one_thread(place):
            net(torch.arange(6.0).reshape(2, 3).to(place)).square().sum().backward()
        optimizer.add_proximal()
        optimizer.step()
        state = view_state(net, optimizer).copy()
        assert {t.device.type for t in state.flatten().values()} == {"cpu"}
        return state.weights, copy_optimizer_state(optimizer)

    cpu = torch.device("cpu")
    found = expected = (None, {})
    for place in (accelerator, cpu, accelerator):
        found, expected = step(place, *found), step(cpu, *expected)
    assert_near(found[0], expected[0])
    for name, tensors in expected[1].items():
        assert_near(found[1][name], tensors)


def test_a_host_reports_the_peak_of_the_allocator(accelerator: torch.device) -> None:  # noqa: F811
    """With all that a session counts itself, and temporaries besides."""
    if accelerator.type == "mps":
        pytest.skip("Metal's allocator keeps no peak")
    splitter = make_splitter("bert", dropout=0.0)
    weights, steps = splitter.initial_weights(seed=1), steps_of(splitter, law.CUTS[0], 2)

    def peak() -> int:
        order, batches = order_of(law.CUTS[0], weights, ADAMW), micro_batches(splitter, steps)
        result = train_round(splitter, order, batches, ThreadFleet(ThreadEdge()))
        return result.reports[-1].peak_tensor_bytes

    counted = peak()
    with everything_at(accelerator):
        assert peak() > counted


def test_tied_tensors_stay_one(accelerator: torch.device) -> None:  # noqa: F811
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    empty = nn.Parameter(torch.zeros(()).expand(50, 50), requires_grad=False)
    net.register_parameter("empty", empty)
    moved = hold(net, accelerator)
    assert moved[1].weight is moved[0].weight
    assert find_place(moved) == accelerator
    assert moved.get_parameter("empty").stride() == (0, 0)  # takes no memory there either
