"""A device that answers and yet computes wrongly is found out, and nobody else is blamed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import TrainingOrder
from collapipe_flwr.cluster.suspects import EDGE, Suspects
from collapipe_flwr.core.domain import ClusterPlan, EdgeProfile
from collapipe_flwr.core.errors import (
    Blame,
    CollaPipeError,
    DataError,
    Diverged,
    InfeasibleError,
    MemberFailed,
    ModelError,
)
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.link import GRAD
from collapipe_flwr.pipeline.roles import MiddleStage
from collapipe_flwr.pipeline.state import PartState
from tests.closeness import assert_same
from tests.cluster.recovered import CUT, STEPS, order
from tests.rounds import DEVICES, micro_batches, recovery, steps_of

Make = Callable[..., MiddleStage]


def sick(*device_ids: str, how: str, step: int = 1) -> Make:
    """Stages of which those of some devices are ``how`` from a step on."""

    class SickStage(MiddleStage):
        def _is_ill(self, at: int) -> bool:
            return self.settings.name in device_ids and at >= step

        def _compute(self, frame, hidden):
            output = super()._compute(frame, hidden)
            if not self._is_ill(frame.step):
                return output
            if how == "raising":
                raise DataError(f"{self.settings.name} has no class Blocks")
            if how == "spoiling its weights":
                output.register_hook(self._spoil)
                return output
            factor = {"nan": torch.nan, "infinite": torch.inf, "absurd": 1e30}.get(how, 1.0)
            return output * factor

        def _spoil(self, _):
            """Memory that breaks where gradients are kept; what is sent is computed from others."""
            weight = next(iter(self.part.parameters()))
            weight.register_hook(lambda gradient: gradient * torch.nan)

        def _emit_gradient(self, frame):
            if self._is_ill(frame.step) and how.startswith("gradient"):
                wrong = frame.tensors[GRAD] * torch.nan
                if how == "gradient shape":
                    wrong = frame.tensors[GRAD][:, :1]
                frame = replace(frame, tensors={GRAD: wrong})
            super()._emit_gradient(frame)

        def _apply(self, step_):
            super()._apply(step_)
            if self._is_ill(step_.index) and how == "weights":
                with torch.no_grad():
                    next(iter(self.part.parameters())).fill_(torch.nan)

    return SickStage


def trained(
    splitter,
    first,
    make: Make,
    every: int = 0,
    **options,
) -> ClusterResult:
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    asked, plans = order(first, every=every), recovery(splitter, **options)
    return train_round(splitter, asked, batches, ThreadFleet(ThreadEdge(), make), recovery=plans)


def test_with_clipping_who_has_gradients_that_are_not_finite_is_named(splitter, first) -> None:
    def clipped(plan: ClusterPlan | None = None) -> TrainingOrder:
        asked = order(first, plan)
        learning = replace(asked.learning, execution=Execution(clip_norm=0.01))
        return replace(asked, learning=learning)

    def run(asked: TrainingOrder, make: Make) -> tuple[ClusterResult, dict[str, Tensor]]:
        batches, plans = micro_batches(splitter, steps_of(splitter, CUT, STEPS)), recovery(splitter)
        fleet = ThreadFleet(ThreadEdge(), make)
        result = train_round(splitter, asked, batches, fleet, recovery=plans)
        return result, dict(result.weights)

    make = sick("A/d1", how="spoiling its weights")
    result, weights = run(clipped(), make)
    assert set(result.quarantined) == {"A/d1"}
    _, expected = run(clipped(result.plan), MiddleStage)
    assert_same(weights, expected)


HOWS = ("raising", "nan", "infinite", "absurd", "gradient", "gradient shape", "weights")
QUICK = set(zip(HOWS, cycle(DEVICES), strict=False))  # each way and each device at least once


@pytest.mark.parametrize(
    ("how", "device_id"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(HOWS, DEVICES)
    ],
)
def test_who_computes_wrongly_is_named_and_the_round_is_done_without_it(
    splitter,
    first,
    undisturbed,
    how: str,
    device_id: str,
) -> None:
    result = trained(splitter, first, sick(device_id, how=how))
    assert set(result.quarantined) == {device_id}
    (incident,) = result.incidents
    assert incident.lost == (device_id,) and "quarantined" in str(incident)
    assert device_id in incident.reason
    weights = dict(result.weights)
    assert_same(weights, undisturbed(result.plan))


@pytest.mark.parametrize("every", [0, 1])
def test_what_all_devices_fail_with_is_nobodys_fault_and_tried_twice(
    splitter,
    first,
    every: int,
) -> None:
    make = sick("A/d0", "A/d1", "A/d2", how="raising")
    words = r"A/d0 and A/d\d fail alike, so no device is to blame: A/d0 has no class Blocks$"
    with pytest.raises(ModelError, match=words):
        trained(splitter, first, make, every=every)


def test_an_edge_that_raises_in_the_replay_too_is_not_compared_with_itself() -> None:
    suspects, plan = Suspects(), CUT.plan()
    error = MemberFailed(EDGE, "edge has no class Blocks", Blame.RAISED)
    assert suspects.quarantine(error, plan, last=False) == EDGE
    with pytest.raises(ModelError, match=r"^edge fails in a replay, too: edge has no "):
        suspects.quarantine(error, plan, last=False)


@pytest.mark.parametrize(
    ("blame", "told"),
    [
        (Blame.RAISED, "the edge one and the edge two fail alike, so no device is to blame"),
        (Blame.UNSOUND, "replayed without the edge one, .* no device is to blame, the training"),
    ],
)
def test_what_two_edges_do_alike_is_tried_on_no_third(blame: Blame, told: str) -> None:
    """As an error in the user's loss."""
    suspects = Suspects()
    error = MemberFailed(EDGE, "edge has no class Loss", blame)
    assert suspects.quarantine(error, replace(CUT.plan(), edge="one"), last=False) == EDGE
    with pytest.raises(CollaPipeError, match=told):
        suspects.quarantine(error, replace(CUT.plan(), edge="two"), last=False)


@pytest.mark.parametrize("how", ["nan", "gradient", "weights"])
def test_numbers_that_two_devices_make_infinite_are_the_trainings(
    splitter,
    first,
    how: str,
) -> None:
    make = sick("A/d0", "A/d1", "A/d2", how=how)
    with pytest.raises(Diverged, match=r"no device is to blame, the training diverged; lower the"):
        trained(splitter, first, make)


def test_before_any_step_no_learning_rate_is_to_blame(splitter, first) -> None:
    make = sick("A/d0", "A/d1", "A/d2", how="nan", step=0)
    with pytest.raises(Diverged) as failure:
        trained(splitter, first, make)
    assert "no step was taken yet" in str(failure.value)
    assert "learning rate" not in str(failure.value)


class Edges(ThreadEdge):
    """The edges of plans, of which some fail; each chain is noted with the one that it ends on."""

    def __init__(self, failing: dict[str, str]) -> None:
        super().__init__()
        self.failing, self.tried = failing, []

    @contextmanager
    def open(self, splitter, order):
        how = self.failing.get(order.plan.edge, "")
        self.tried.append(order.plan.edge)
        with super().open(splitter, order) as part:

            def collect(*more):
                if how == "loss":
                    why = "ValueError: the loss of edge has no class 7"
                    raise MemberFailed(EDGE, why, Blame.RAISED)
                found = part.collect(*more)
                if how == "nan":
                    spoilt = {key: value * torch.nan for key, value in found.state.weights.items()}
                    found = replace(found, state=PartState(weights=spoilt))
                return found

            yield replace(part, collect=collect)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("loss", "the edge one and the edge two fail alike, so no device is to blame: ValueError"),
        ("nan", "replayed without the edge one, the edge two: .*the training diverged; lower"),
    ],
)
def test_an_edge_that_answers_wrongly_is_replaced_and_an_error_of_all_is_told_at_once(
    splitter,
    first,
    undisturbed,
    how: str,
    told: str,
) -> None:
    def trained_on(edges: Edges) -> ClusterResult:
        plans = recovery(splitter)
        one, *others = (
            EdgeProfile(
                id=name, name=name, speed_flop_per_s=1e9, memory_bytes=2**30, tx_power_w=1.0
            )
            for name in ("one", "two", "three", "four")
        )
        known = replace(plans.profile, edge=one, other_edges=tuple(others))
        asked = order(first, replace(CUT.plan(), edge="one"))
        batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
        fleet, plans = ThreadFleet(edges), replace(plans, profile=known)
        return train_round(splitter, asked, batches, fleet, recovery=plans)

    edges = Edges({"one": how})
    result = trained_on(edges)
    assert edges.tried == ["one", "two"]
    assert (result.plan.edge, list(result.quarantined)) == ("two", ["one"])
    (incident,) = result.incidents
    assert incident.quarantined and incident.lost == ("one",)
    assert_same(dict(result.weights), undisturbed(CUT.plan()))
    edges = Edges(dict.fromkeys(("one", "two", "three", "four"), how))
    with pytest.raises(CollaPipeError, match=told):
        trained_on(edges)
    assert edges.tried == ["one", "two"]


def test_who_clips_already_is_not_told_to_clip() -> None:
    suspects, plan = Suspects(clips=True), CUT.plan()
    error = MemberFailed(EDGE, "edge has NaN", Blame.UNSOUND)
    assert suspects.quarantine(error, plan, last=False) == EDGE
    with pytest.raises(Diverged, match=r"lower the learning rate or train\.clip-norm$"):
        suspects.quarantine(error, plan, last=False)


def test_a_learning_rate_that_is_too_high_is_nobodys_fault(splitter, first) -> None:
    fast = order(first)
    rule = replace(fast.learning.optimizer, learning_rate=1e12)
    fast = replace(fast, learning=replace(fast.learning, optimizer=rule))
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    fleet, plans = ThreadFleet(ThreadEdge()), recovery(splitter)
    with pytest.raises(Diverged, match="the training diverged"):
        train_round(splitter, fast, batches, fleet, recovery=plans)


def test_without_another_device_the_sentence_names_the_one_and_the_doubt(
    splitter,
    first,
) -> None:
    make = sick("A/d2", how="nan")
    with pytest.raises(InfeasibleError) as failure:
        trained(splitter, first, make, memory_bytes=25_000)
    said = str(failure.value)
    assert said.startswith("A/d2 sent hidden states of step 1 with values that are not finite; ")
    assert "whether it computes wrongly or the training diverges shows only where" in said


def test_sentences_pass_through_the_chain_without_growing(splitter, first) -> None:
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    fleet = ThreadFleet(ThreadEdge(), sick("A/d2", how="raising"))
    with pytest.raises(CollaPipeError) as failure:
        train_round(splitter, order(first), batches, fleet)
    assert str(failure.value) == "A/d2 failed: A/d2 has no class Blocks"


@pytest.mark.parametrize(
    ("witness", "accused", "side", "blamed"),
    [
        ("A/d0", "A/d1", 1, "A/d1"),
        ("A/d3", "d0", -1, "A/d0"),
        ("A/d1", "A/d3", 1, "A/d3"),  # its sibling
        ("A/d0", "", 1, ""),  # one of two
        ("A/d1", "", -1, "A/d0"),
        ("edge", "", -1, "A/d2"),
        ("A/d2", "edge", 1, EDGE),
        ("a stranger", "A/d0", -1, ""),
        ("A/d0", "A/d2", 1, ""),  # no neighbour of its
        ("B/d0", "", 0, ""),  # of another cluster
    ],
)
def test_the_blamed_is_the_neighbour_that_the_witness_accuses(
    witness: str, accused: str, side: int, blamed: str
) -> None:
    error = MemberFailed(witness, "nonsense came", Blame.MALFORMED, side, accused)
    assert Suspects().quarantine(error, replicated("A/d0", "A/d1", "A/d2", "A/d3"), last=False) == (
        blamed
    )


@pytest.mark.parametrize("accused", ["A/1", "1", "A/3", "3"])
def test_numbers_in_a_sentence_accuse_no_board_that_is_called_so(accused: str) -> None:
    plan = replicated("A/0", "A/1", "A/2", "A/3")
    why = "gradients of step 2 of 1 and 3 micro-batches are not finite"
    error = MemberFailed("A/0", why, Blame.UNSOUND, MemberFailed.DOWNSTREAM, accused)
    found = Suspects().quarantine(error, plan, last=False)
    assert found == f"A/{accused[-1]}"
    unknown = MemberFailed("A/0", why, Blame.UNSOUND, MemberFailed.DOWNSTREAM)
    assert Suspects().quarantine(unknown, plan, last=False) == ""


def test_boards_that_are_called_by_words_fail_alike() -> None:
    suspects, plan = Suspects(), replicated("A/kitchen", "A/garage", "A/attic", "A/cellar")
    words = "{} cannot compute blocks {}: no class Blocks"
    broken = MemberFailed("A/kitchen", words.format("A/kitchen", 0), Blame.RAISED)
    assert suspects.quarantine(broken, plan, last=False) == "A/kitchen"
    again = MemberFailed("A/garage", words.format("A/garage", 3), Blame.RAISED)
    with pytest.raises(ModelError, match="A/kitchen and A/garage fail alike"):
        suspects.quarantine(again, plan, last=False)


def replicated(ahead: str, second: str, third: str, beside: str) -> ClusterPlan:
    """A plan of three stages, of which ``beside`` holds the second one, too."""
    plan = CUT.plan()
    devices = zip(plan.segments, (ahead, second, third), strict=True)
    one, two, three = (replace(segment, device_id=name) for segment, name in devices)
    return replace(plan, segments=(one, replace(two, replicas=(beside,)), three))
