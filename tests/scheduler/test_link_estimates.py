"""Plans come to fit links that are not as promised, and stay as they are where links are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from collapipe_flwr.core.domain import (
    ClusterPlan,
    LinkRate,
    ModelProfile,
    Plan,
    Snapshot,
)
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.outcome import ClusterOutcome, LinkSample, RoundOutcome
from collapipe_flwr.costs.price import price, set_planned_rates
from collapipe_flwr.scheduler.link_estimates import (
    PATIENCE,
    LinkEstimate,
    LinkEstimates,
    apply_links,
    begin_links,
    learn_links,
    make_link_key,
)
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig, SchedulerState
from collapipe_flwr.simulation.world import World
from tests.worlds import draw_world

SETTINGS = SchedulerConfig(
    schedule="gpipe",
    micro_batch_sizes=(4,),
    micro_batches=(4,),
    codecs=("fp32", "int8"),
    hysteresis=0.0,
)
POLICY = "latency-only"  # what links are like alone decides, and no account of energy
Measure = Callable[[tuple[str, str], float], float]
"""Link and promised rate -> rate; promised is what gains, power and bandwidth give."""


def ends_of(plan: ClusterPlan) -> Iterator[tuple[str, str]]:
    control = next(name for name in plan.tx_power_w if name not in plan.gradient_power_w)
    return pairwise([control, *(s.device_id for s in plan.segments), ""])


def samples(plan: ClusterPlan, world: Snapshot, measure: Measure) -> tuple[LinkSample, ...]:
    """Every hop of the plan, measured."""
    alone = Plan(round_index=1, policy="", clusters=(plan,), latency_s=1.0, rho=1.0)
    promised = set_planned_rates(alone, world).clusters[0].hops
    found = []
    for ends, planned, full in zip(ends_of(plan), plan.hops, promised, strict=True):
        rate = 2 / (1 / full.forward_bit_per_s + 1 / full.backward_bit_per_s)
        there, back = planned.forward_bit_per_s, planned.backward_bit_per_s
        found.append(
            LinkSample(
                ends=ends,
                planned_bit_per_s=2 / (1 / there + 1 / back),
                measured_bit_per_s=measure(ends, rate),
            )
        )
    return tuple(found)


def rounds(
    world: World, model: ModelProfile, measure: Measure, count: int = 6
) -> tuple[list[Plan], SchedulerState]:
    """Plans of successive rounds that learn from what links did."""
    scheduler, plans = make_scheduler(POLICY, SETTINGS), []
    state = scheduler.init(world.snapshot(1, model))
    for _ in range(count):
        told = world.snapshot(1, model)
        seen = apply_links(told, state.links)
        plan, state = scheduler.step(state, seen)
        plan = set_planned_rates(plan, seen)
        plans.append(plan)
        priced = price(plan, seen, SETTINGS)
        clusters = tuple(
            ClusterOutcome(
                cluster_id=c.cluster_id,
                latency_s=p.latency_s,
                energy_j={},
                links=samples(c, told, measure),
            )
            for c, p in zip(plan.clusters, priced.clusters, strict=True)
        )
        outcome = RoundOutcome(round_index=1, latency_s=priced.latency_s, clusters=clusters)
        state = scheduler.observe(state, plan, outcome)
    return plans, state


def decided(plan: Plan) -> list[tuple[object, ...]]:
    return [(c.segments, tuple(hop.codec for hop in c.hops)) for c in plan.clusters]


def believing(book: LinkEstimates, world: World, model: ModelProfile) -> Plan:
    """The plan of one who is told the shares."""
    scheduler, told = make_scheduler(POLICY, SETTINGS), world.snapshot(1, model)
    seen = apply_links(told, book)
    return scheduler.step(scheduler.init(told), seen)[0]


@pytest.mark.parametrize("slower", [5, 70])
@pytest.mark.parametrize("hop", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("seed", range(3))
def test_the_second_plan_is_that_of_one_who_knew_the_true_rates(
    seed: int, hop: int, slower: int
) -> None:
    world, model = draw_world(seed, radio="wifi", channel="static")
    told, _ = rounds(world, model, lambda _, rate: rate, count=1)
    slow = list(ends_of(told[0].clusters[0]))[hop]
    plans, _ = rounds(world, model, lambda ends, rate: rate / slower if ends == slow else rate)
    truth = {"cluster-0": {make_link_key(*slow): LinkEstimate(believed=-math.log(slower))}}
    real = apply_links(world.snapshot(1, model), truth)
    knew = believing(truth, world, model)
    took_s = [price(plan, real, SETTINGS).latency_s for plan in plans]
    best_s = price(knew, real, SETTINGS).latency_s
    assert plans[0] == told[0] and decided(plans[0]) != decided(knew)
    assert took_s[0] > max(took_s[1:]) and max(took_s[1:]) < 1.01 * best_s
    for plan, real_s in zip(plans[1:], took_s[1:], strict=True):
        assert plan.latency_s == pytest.approx(real_s, rel=0.01)  # and they foretell it


@pytest.mark.parametrize("hop", [0, 1, -1], ids=["first", "second", "last"])
def test_a_link_that_was_measured_before_the_run_is_known_to_the_first_plan(hop: int) -> None:
    world, model = draw_world(1, clusters=1, radio="wifi", channel="static")
    told = world.snapshot(1, model)
    (plan,) = rounds(world, model, lambda _, rate: rate, count=1)[0][0].clusters
    full = replace(
        plan,
        bandwidth_hz=told.radio.bandwidth_hz,
        tx_power_w={m.device_id: m.tx_power_max_w for m in world.clusters[0].members},
        gradient_power_w={d.device_id: d.tx_power_max_w for d in world.clusters[0].devices},
    )
    links = [
        LinkRate(ends=sample.ends, bit_per_s=sample.measured_bit_per_s)
        for sample in samples(full, told, lambda _, rate: rate)
    ]
    slow = replace(links[hop], bit_per_s=links[hop].bit_per_s / 5)
    links[hop] = slow
    measured = replace(world.clusters[0], link_rates=tuple(links))
    snapshot = replace(world, clusters=(measured,)).snapshot(1, model)
    book = begin_links({}, snapshot)
    believed = {key: each.believed for key, each in book["cluster-0"].items() if each.believed}
    assert believed == {make_link_key(*slow.ends): pytest.approx(-math.log(5))}
    scheduler, seen = make_scheduler(POLICY, SETTINGS), apply_links(snapshot, book)
    first = scheduler.step(scheduler.init(seen), seen)[0]
    truth = {"cluster-0": {make_link_key(*slow.ends): LinkEstimate(believed=-math.log(5))}}
    assert decided(first) == decided(believing(truth, world, model))
    assert begin_links(book, snapshot) is book
    learned = {"cluster-0": dict.fromkeys(book["cluster-0"], LinkEstimate(believed=1.0))}
    assert begin_links(learned, snapshot) is learned  # rounds teach better


@pytest.mark.parametrize(
    ("ends", "rate"),
    [(("cluster-0/d1", "gone"), 1.0), (("", ""), 1.0), (("cluster-0/d1", ""), 0.0)],
)
def test_a_link_that_cannot_be_is_as_promised(ends, rate: float) -> None:
    world, model = draw_world(1, clusters=1)
    odd = replace(world.clusters[0], link_rates=(LinkRate(ends=ends, bit_per_s=rate),))
    snapshot = replace(world, clusters=(odd,)).snapshot(1, model)
    assert apply_links(snapshot, begin_links({}, snapshot)) is snapshot


def test_rates_as_promised_leave_plans_bit_equal() -> None:
    world, model = draw_world(1, radio="wifi", channel="static")
    told, _ = rounds(world, model, lambda _, __: math.nan)
    same, state = rounds(world, model, lambda _, rate: 1.1 * rate)
    assert same == told and state.links
    snapshot = world.snapshot(1, model)
    assert apply_links(snapshot, state.links) is snapshot


def test_one_bad_round_of_a_known_link_changes_nothing_and_two_are_believed() -> None:
    belief = LinkEstimate()
    for note in (0.0, -2.0, 0.1, 0.05, -2.0, 0.1, -0.1):
        belief = belief.add_note(note)
        assert belief.believed == 0.0
    assert belief.add_note(-2.0).add_note(-1.9).believed == -1.9


def test_a_first_look_is_believed_at_once_and_given_up_at_once_where_the_next_is_as_promised() -> (
    None
):
    first = LinkEstimate().add_note(-2.0)
    assert first.believed == -2.0
    assert first.add_note(-1.9).believed == -2.0  # within what agrees
    assert first.add_note(0.05).believed == 0.0
    assert first.add_note(0.05).add_note(-2.0).add_note(0.0).believed == 0.0


def test_a_rate_that_was_measured_before_the_run_is_the_first_look() -> None:
    world, model = draw_world(1, clusters=1)
    rate = LinkRate(ends=("cluster-0/d1", ""), bit_per_s=1.0)
    snapshot = replace(world, clusters=(replace(world.clusters[0], link_rates=(rate,)),)).snapshot(
        1, model
    )
    (begun,) = begin_links({}, snapshot)["cluster-0"].values()
    assert begun.believed < -5 and begun.notes == (begun.believed,)
    assert begun.add_note(begun.believed + 0.1).believed == begun.believed


def test_a_link_is_the_same_both_ways_and_shared_books_are_kept_apart() -> None:
    def told(*ends: str, cluster: str = "a") -> RoundOutcome:
        sample = LinkSample(ends=(ends[0], ends[1]), planned_bit_per_s=8.0, measured_bit_per_s=1.0)
        outcome = ClusterOutcome(cluster_id=cluster, latency_s=1.0, energy_j={}, links=(sample,))
        return RoundOutcome(round_index=1, latency_s=1.0, clusters=(outcome,))

    book: LinkEstimates = {}
    for outcome in (told("x", "y"), told("y", "x"), told("x", "z", cluster="b")):
        book = learn_links(book, outcome)
    (both_ways,) = book["a"].values()
    assert both_ways.believed == pytest.approx(-math.log(8)) and len(both_ways.notes) == 2
    assert list(book["b"]) == [make_link_key("x", "z")]


def test_a_pace_says_only_that_a_link_is_as_fast_as_promised() -> None:
    def told(planned: float) -> RoundOutcome:
        sample = LinkSample(
            ends=("x", ""), planned_bit_per_s=planned, measured_bit_per_s=1e9, paced=True
        )
        outcome = ClusterOutcome(cluster_id="a", latency_s=1.0, energy_j={}, links=(sample,))
        return RoundOutcome(round_index=1, latency_s=1.0, clusters=(outcome,))

    key = make_link_key("x", "")
    slow: LinkEstimates = {"a": {key: LinkEstimate(believed=-2.0, notes=(-2.0, -2.0, -2.0))}}
    for _ in range(2):
        slow = learn_links(slow, told(1e6))
    assert slow["a"][key].believed == 0.0


def test_links_that_nobody_used_are_tried_again_some_day_and_one_look_suffices() -> None:
    belief = LinkEstimate(believed=-1.6, notes=(-1.6, -1.6))
    for _ in range(PATIENCE):
        assert belief.believed == -1.6
        belief = belief.skip_round()
    assert belief.believed == 0.0
    assert belief.add_note(-1.6).believed == -1.6
    assert belief.add_note(0.0).add_note(0.0).believed == 0.0


def test_beliefs_are_in_the_checkpoint() -> None:
    _, state = rounds(*draw_world(0, channel="static"), lambda _, rate: rate / 4, count=3)
    again = from_json(SchedulerState, to_json(state), "state")
    assert again.links == state.links and any(b.believed for b in again.links["cluster-0"].values())
    before = to_json(replace(state, links={})).replace('"links":{},', "")
    assert from_json(SchedulerState, before, "state").links == {}
