"""Laws: hidden states behind trusted blocks are clipped and noised alike, however a model is cut.

The peer is the unsplit model of transformers with a hook behind a block.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.special import ndtr

from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.cluster.privacy import draw_activation_noise
from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.models.describing import keep_frozen, make_spec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import ActivationNoise, Execution, NoiseConfig
from collapipe_flwr.pipeline.link import HIDDEN, FrameKind
from collapipe_flwr.pipeline.private_gradients import draw_normal
from collapipe_flwr.pipeline.roles import MiddleStage
from tests.cluster.faults import Fault, failing
from tests.models.conftest import OVERRIDES, TOKENS
from tests.rounds import (
    ADAMW,
    BLOCKS,
    SGD,
    Batch,
    Cut,
    Replicated,
    bert,
    largest_difference,
    make_splitter,
    micro_batches,
    one_to_three_devices,
    order_of,
    recovery,
    steps_of,
    train_split,
)

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")

SIZES = (2, 1)
CUTS = one_to_three_devices(SIZES)
NOISE = ActivationNoise(behind=2, norm=9.4, deviation=0.05, secret="aa")  # norms are 6.9 to 11.3


def train_reference(
    weights: dict[str, Tensor],
    steps: list[list[Batch]],
    noise: ActivationNoise,
    keeps: frozenset[str] = frozenset(),
) -> dict[str, Tensor]:
    """Micro-batches of the whole model, whose states are clipped one example after the other."""
    model: Any = bert().build_whole(weights)
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in keeps)
    place = {"step": 0, "micro_batch": 0}
    secret = bytes.fromhex(noise.secret)

    def perturb(*call: Any) -> Any:
        states, mask = call[-1], batch["attention_mask"]
        name = f"activations/{place['micro_batch']}"
        drawn = draw_normal(secret, place["step"], name, states.numel()).view(states.shape)
        rows = []
        for row, seen, own in zip(states, mask, drawn, strict=True):
            length = int(seen.sum())
            norm = row[:length].square().sum().sqrt()
            kept = row[:length] * min(1.0, noise.norm / norm) + noise.deviation * own[:length]
            rows.append(torch.cat([kept, torch.zeros_like(row[length:])]))
        return torch.stack(rows)

    model.bert.encoder.layer[noise.behind - 1].register_forward_hook(perturb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for place["step"], step in enumerate(steps):
        total = sum(len(batch["labels"]) for batch in step)
        optimizer.zero_grad()
        for place["micro_batch"], batch in enumerate(step):
            (model(**batch).loss * len(batch["labels"]) / total).backward()
        optimizer.step()
    return bert().trained_weights(model)


def test_every_cut_clips_and_adds_noise_as_an_unsplit_model() -> None:
    """With gradients through the clip, also where devices recompute or replicate a stage."""
    weights, steps = bert().initial_weights(seed=3), steps_of(bert(), CUTS[0], 2)
    wanted = train_reference(weights, steps, NOISE)
    _, plain = train_split(bert(), weights, CUTS[0], steps, SGD)
    assert largest_difference(plain, wanted) > 1e-3
    both = Replicated(stops=(2, BLOCKS), micro_batches=SIZES, replicas=(2, 1))
    again = Execution(recompute=True)
    for cut, execution in [*((cut, None) for cut in (*CUTS, both)), (CUTS[1], again)]:
        _, found = train_split(
            bert(), weights, cut, steps, SGD, activations=NOISE, execution=execution
        )
        assert largest_difference(found, wanted) <= 1e-6, cut.stops


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_no_noise_and_a_wide_clip_change_no_bit(cut: Cut) -> None:
    weights, steps = bert().initial_weights(seed=3), steps_of(bert(), cut, 2)
    off, on = (
        train_split(bert(), weights, cut, steps, ADAMW, activations=noise)
        for noise in (None, replace(NOISE, norm=1e6, deviation=0.0))
    )
    assert on[0] == off[0]
    assert all(torch.equal(on[1][key], tensor) for key, tensor in off[1].items())


def sent_behind(noise: ActivationNoise, cut: Cut, steps: list[list[Batch]]) -> list[Tensor]:
    """What the device that holds block ``noise.behind`` sends on."""
    seen: list[Tensor] = []

    class Tapped(MiddleStage):
        def _send(self, link: Any, frame: Any) -> None:
            last = self.part.block_range.stop == noise.behind
            if last and link is self.downstream and frame.kind is FrameKind.ACTIVATION:
                seen.append(frame.tensors[HIDDEN])
            super()._send(link, frame)

    asked = order_of(cut, bert().initial_weights(seed=3), SGD, activations=noise)
    batches = micro_batches(bert(), steps)
    train_round(bert(), asked, batches, ThreadFleet(ThreadEdge(), Tapped))
    return seen


def test_a_frame_holds_clipped_states_and_noise_of_its_place_alone() -> None:
    steps = steps_of(bert(), CUTS[1], 1)
    masks = [batch["attention_mask"].bool() for batch in steps[0]]
    quiet = sent_behind(replace(NOISE, deviation=0.0), CUTS[1], steps)
    norms = torch.cat([states.flatten(1).norm(dim=1) for states in quiet])
    assert float(norms.max()) == pytest.approx(NOISE.norm, rel=1e-5)  # some are clipped
    assert float(norms.min()) < 0.95 * NOISE.norm  # and some are not
    drawn = []
    for secret in ("aa", "aa", "bb"):
        loud = sent_behind(replace(NOISE, secret=secret), CUTS[1], steps)
        for states, mask in zip(loud, masks, strict=True):
            assert not states[~mask].any()
        noise = [(s - q)[m] for s, q, m in zip(loud, quiet, masks, strict=True)]
        drawn.append(torch.cat(noise).flatten())
        assert not torch.allclose(noise[0][:3], noise[1][:3], atol=1e-3)  # of two micro-batches
    assert float(drawn[0].std()) == pytest.approx(NOISE.deviation, rel=0.1)
    assert torch.equal(drawn[0], drawn[1])
    assert float((drawn[0] - drawn[2]).std()) > NOISE.deviation


def test_only_the_device_that_adds_noise_is_told_its_secret() -> None:
    for behind, holder, own in ((2, 2, 1), (3, 2, 2), (5, 3, 2), (0, 0, 0)):
        noise = replace(NOISE, behind=behind)
        asked = order_of(CUTS[2], {}, SGD, activations=noise)
        told: list[ActivationNoise | None] = [None] * 4
        told[holder] = replace(noise, behind=own)
        assert [asked.configure_stage(stage).activations for stage in range(4)] == told
        assert asked.edge_settings.activations is None
    assert "aa" not in repr(NOISE)


def test_a_round_that_loses_a_device_draws_the_same_noise_again() -> None:
    """The frames that are sent again tell nothing new, and the weights are those of no loss."""
    weights = bert().initial_weights(seed=3)
    cut = Cut(stops=(2, 4, BLOCKS), micro_batches=SIZES, schedule="1f1b")
    batches = micro_batches(bert(), steps_of(bert(), cut, 3))
    asked = order_of(cut, weights, SGD, activations=NOISE)
    fleet = ThreadFleet(ThreadEdge(), failing(Fault(device_id="A/d2", step=1, phase="backward")))
    found = train_round(bert(), asked, batches, fleet, recovery=recovery(bert()))
    assert [incident.lost for incident in found.incidents] == [("A/d2",)]
    plain = replace(asked, plan=found.plan)
    wanted = train_round(bert(), plain, batches, ThreadFleet(ThreadEdge()))
    assert all(torch.equal(found.weights[key], t) for key, t in wanted.weights.items())


def test_states_without_a_norm_are_refused() -> None:
    weights = bert().initial_weights(seed=3)
    key = next(key for key in weights if key.endswith("layer.1.output.dense.bias"))
    weights[key] = torch.full_like(weights[key], math.inf)
    with pytest.raises(LinkError, match="hidden states of an example in step 0 are not finite"):
        train_split(bert(), weights, CUTS[1], steps_of(bert(), CUTS[1]), SGD, activations=NOISE)


LEARNING = LearningSettings(
    trusted_blocks=2,
    privacy=NoiseConfig(noise_on="activations", clip_norm=4.0, noise_multiplier=0.5),
)


def frozen(splitter: Splitter) -> Splitter:
    return Splitter(replace(splitter.spec, frozen=splitter.front_keys(2)))


def test_a_control_unit_that_keeps_frozen_blocks_adds_the_noise_itself() -> None:
    held = Splitter(keep_frozen(frozen(bert()).spec))
    noise = draw_activation_noise(held, replace(LEARNING, trusted_blocks=0))
    assert noise is not None and noise.behind == 0
    weights, steps = bert().initial_weights(seed=3), steps_of(bert(), CUTS[0], 2)
    wanted = train_reference(weights, steps, NOISE, keeps=frozen(bert()).constant_keys)
    cut = Cut(stops=(1, BLOCKS - 2), micro_batches=SIZES)
    _, found = train_split(held, weights, cut, steps, SGD, activations=replace(NOISE, behind=0))
    assert largest_difference(found, wanted) <= 1e-6
    assert largest_difference(weights, wanted) > 1e-3


def test_every_order_draws_a_secret_of_its_own() -> None:
    one, other = (draw_activation_noise(frozen(bert()), LEARNING) for _ in range(2))
    assert one is not None and other is not None
    assert one.secret != other.secret
    assert (one.behind, one.norm, one.deviation) == (2, 4.0, 2.0)
    assert draw_activation_noise(bert(), LearningSettings()) is None


def gpt2() -> Splitter:
    return Splitter(
        make_spec(
            "sequence-classification",
            model_type="gpt2",
            overrides=OVERRIDES["gpt2"],
            num_labels=2,
            **TOKENS,
        )
    )


@pytest.mark.parametrize(
    ("make", "learning", "said"),
    [
        (bert, replace(LEARNING, trusted_blocks=0), "privacy.trusted-blocks of 1 or more"),
        (bert, LEARNING, r"tell of earlier examples, so set model\.frozen-blocks=2"),
        (lambda: make_splitter("marian", 0.0), LEARNING, "its labels are texts"),
        (gpt2, LEARNING, "input_ids would travel to the edge"),
    ],
)
def test_what_would_break_the_guarantee_is_refused(
    make: Any, learning: LearningSettings, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        draw_activation_noise(make(), learning)


def test_epsilon_is_that_of_gaussian_noise_on_every_visit() -> None:
    """By the exact curve of Balle and Wang (2018), which the account bounds from above."""
    pytest.importorskip("dp_accounting")
    from collapipe_flwr.federation.privacy_account import Charge, count_epsilon

    delta, visits, noise = 1e-5, 3, 4.0
    due = Charge(examples=500, batch=500, noise_multiplier=noise, steps=visits)
    epsilon = torch.tensor(count_epsilon([due], delta), dtype=torch.float64)

    def delta_at(epsilon: Tensor) -> float:
        move = 2 * visits**0.5 / noise  # of one example's states, in deviations: 2 C each time
        tails = ndtr(move / 2 - epsilon / move), ndtr(-move / 2 - epsilon / move)
        return float(tails[0] - epsilon.exp() * tails[1])

    assert delta_at(epsilon) <= delta
    assert delta_at(0.85 * epsilon) > delta
