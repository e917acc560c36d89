"""A scheduler between the hooks: snapshots in, plans out, realised costs and measurements back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord

from collapipe_flwr.cluster.control_unit import join_reports
from collapipe_flwr.cluster.order import CONTROL_UNIT
from collapipe_flwr.core.domain import BlockCost, LinkRate, ModelProfile
from collapipe_flwr.core.errors import ConfigError, ScheduleError
from collapipe_flwr.core.links import LinkTraffic
from collapipe_flwr.core.measurements import CacheUse, ClusterMeasurement, StageMeasurement
from collapipe_flwr.core.outcome import Movement, RoundOutcome
from collapipe_flwr.federation.arrays import encode_tensors
from collapipe_flwr.federation.checkpoint import rng_state
from collapipe_flwr.federation.movement import MovementMeter
from collapipe_flwr.federation.planner import (
    KnownClusters,
)
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.round import ClosedRound
from collapipe_flwr.scheduler.link_estimates import make_link_key
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.rules import RuleScheduler
from collapipe_flwr.simulation.world import EnergyBudget, make_world

BLOCK = BlockCost(
    forward_flop=2e7,
    backward_flop=4e7,
    parameter_bytes=200_000,
    state_bytes=800_000,
    stash_bytes=50_000.0,
    output_bytes=8_000.0,
)
MODEL = ModelProfile(embedding=BLOCK, blocks=(BLOCK,) * 4, decoder=BLOCK)
NODES = {11: "cluster-0", 12: "cluster-1"}
EMPTY = ArrayRecord()


def rounds(policy: str = "uniform", **settings) -> KnownClusters:
    budget = EnergyBudget(joule=0.5)
    chosen = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(2,), **settings)
    world = make_world(
        cluster_devices=[["raspberry-pi-5", "jetson-nano", "raspberry-pi-4"]] * 2,
        examples=[64, 32],
        channel="block-fading",
        seed=5,
        budget=budget,
    )
    planning = Planning(policy=policy, settings=chosen, budget=budget)
    return KnownClusters(planning, world, MODEL, NODES)


def weights(value: float) -> ArrayRecord:
    mask = torch.full((2,), float("-inf"))
    return encode_tensors({"w": torch.full((4,), value), "steps": torch.tensor(1), "mask": mask})


def report(name: str, small: float, big: float) -> StageMeasurement:
    return StageMeasurement(
        name=name,
        steps=2,
        small_square_norm=small,
        big_square_norm=big,
        small_weight=8.0,
        small_squares=32.0,
        big_weight=64.0,
        big_squares=512.0,
        sent_down=LinkTraffic(bytes=100),
        received_down=LinkTraffic(bytes=10),
        sent_up=LinkTraffic(bytes=10),
        received_up=LinkTraffic(bytes=100),
        peak_tensor_bytes=7,
    )


def told(name: str) -> ClusterMeasurement:
    chain = (report("cu", 1.0, 0.5), report("d1", 2.0, 1.0), report("d2", 3.0, 1.5))
    return ClusterMeasurement(
        cluster_id=name,
        examples=64,
        wall_s=1.0,
        losses=(2.0, 1.0),
        reports=chain,
        edge=report("edge", 4.0, 2.0),
    )


def closed(plan, *names: str, after: ArrayRecord | None) -> ClosedRound:
    return ClosedRound(
        plan=plan,
        before=weights(0.0),
        after=after,
        models={name: weights(1.0) for name in names},
        examples=dict.fromkeys(names, 10.0),
        telemetry={name: told(name) for name in names},
        failures={},
    )


def test_every_described_cluster_gets_its_own_plan_that_covers_all_blocks():
    planned = rounds().plan(1, [11, 12])
    for node, name in NODES.items():
        plan = planned.cluster_plan(node)
        assert plan.cluster_id == name
        covered = [b for s in plan.segments for b in range(s.first_block, s.stop_block)]
        assert covered == [0, 1, 2, 3]
        assert all(s.device_id.startswith(f"{name}/") for s in plan.segments)


@pytest.mark.parametrize("policy", ["dssda", "random"])
def test_planning_draws_nothing_from_the_strategys_chance(policy: str) -> None:
    before = rng_state()
    rounds(policy).plan(1, [11, 12])
    assert rng_state() == before


def trusting(planner: KnownClusters, blocks: int, device: str) -> KnownClusters:
    """The planner that keeps so many blocks on the one device that every cluster trusts."""
    clusters = (
        replace(c, trusted_blocks=blocks).with_members(
            lambda member: replace(member, trusted=member.device_id.endswith(device))
        )
        for c in planner.world.clusters
    )
    planner.world = replace(planner.world, clusters=tuple(clusters))
    return planner


@pytest.mark.parametrize("policy", ["uniform", "latency-only"])
def test_the_first_blocks_are_planned_on_trusted_devices_alone(policy: str) -> None:
    planner = trusting(rounds(policy), 3, "/d2")
    for planned in (planner.plan(1, [11, 12]), planner.plan_evaluation(2, [11])):
        for plan in planned.plan.clusters:
            assert plan.segments[0].device_id.endswith("/d2")
            assert plan.segments[0].stop_block >= 3


def test_no_policy_is_trusted_to_heed_trust() -> None:
    """A scheduler may be the user's own."""

    class Careless(RuleScheduler):
        def step(self, state, snapshot):
            clusters = (
                replace(c, profile=replace(c.profile, trusted_blocks=0)) for c in snapshot.clusters
            )
            return RuleScheduler.step(self, state, replace(snapshot, clusters=tuple(clusters)))

    planner = trusting(rounds(), 1, "/d2")
    planner.controller._scheduler = Careless(planner.controller._scheduler.settings, "uniform")
    with pytest.raises(ScheduleError, match="which its cluster does not trust"):
        planner.plan(1, [11, 12])


def test_more_trusted_blocks_than_there_are_is_one_sentence() -> None:
    assert Planning(trusted_blocks=4).check(MODEL) is MODEL
    with pytest.raises(ConfigError, match="trusted-blocks is 5, but the model has 4 blocks"):
        Planning(trusted_blocks=5).check(MODEL)


def test_the_first_plan_knows_the_links_that_were_measured_before() -> None:
    planner = rounds("dssda")
    believed = planner.plan(1, [11, 12]).cluster_plan(11)
    device, rate = believed.device_ids[-1], 1e3
    first, second = planner.world.clusters
    known = replace(first, link_rates=(LinkRate(ends=(device, ""), bit_per_s=rate),))
    planner = rounds("dssda")
    planner.world = replace(planner.world, clusters=(known, second))
    for _ in range(2):  # again, as after a round that failed
        plan = planner.plan(1, [11, 12]).cluster_plan(11)
        assert plan.device_ids[-1] != device
        assert planner.controller.state.links["cluster-0"][make_link_key(device, "")].believed < -1


def test_a_node_that_never_described_itself_is_not_asked():
    planned = rounds().plan(1, [11, 12, 99])
    assert [planned.takes_part(n) for n in (11, 12, 99)] == [True, True, False]


def test_only_the_sampled_clusters_are_planned():
    planned = rounds().plan(1, [12])
    assert [c.cluster_id for c in planned.plan.clusters] == ["cluster-1"]


def test_the_realised_price_of_a_finished_round_is_the_predicted_one():
    planner = rounds()
    plan = planner.plan(1, [11, 12])
    outcome = planner.settle(closed(plan, "cluster-0", "cluster-1", after=weights(1.0)))
    assert outcome.latency_s == pytest.approx(plan.plan.latency_s)
    for cluster in plan.plan.clusters:
        assert outcome.energy_j[cluster.cluster_id] == pytest.approx(dict(cluster.energy_j))


def test_queues_grow_by_realised_energy_over_budget_and_only_for_those_who_finished():
    planner = rounds("latency-only", budget_margin=0.0, energy_advance=0.0)
    plan = planner.plan(1, [11, 12])
    outcome = planner.settle(closed(plan, "cluster-0", after=weights(1.0)))
    for device, spent in outcome.energy_j["cluster-0"].items():
        assert outcome.queues_j["cluster-0"][device] == pytest.approx(max(spent - 0.5, 0.0))
    assert "cluster-1" not in outcome.energy_j
    assert sum(outcome.queues_j["cluster-0"].values()) > 0


def test_a_cluster_that_joins_late_pays_for_the_plan_that_it_had():
    planner = rounds("latency-only", budget_margin=0.0, energy_advance=0.0)
    first = planner.plan(1, [11, 12])
    planner.settle(closed(first, "cluster-0", after=weights(1.0)))
    second = planner.plan(2, [11])
    assert set(planner.controller.state.energy_queue_j["cluster-1"].values()) == {0.0}
    later = closed(second, "cluster-0", "cluster-1", after=weights(2.0))
    later.joined["cluster-1"] = first.cluster_plan(12)
    outcome = planner.settle(later)
    worked = {d for s in first.cluster_plan(12).segments for d in s.device_ids}
    assert {d for d, joule in outcome.energy_j["cluster-1"].items() if joule > 0} >= worked
    assert sum(outcome.queues_j["cluster-1"].values()) > 0
    here = next(c for c in outcome.clusters if c.cluster_id == "cluster-0")
    assert outcome.latency_s == here.latency_s  # nobody waited for the other


def test_measurements_reach_the_estimators():
    planner, meter = rounds(), MovementMeter()
    for server_round in (1, 2):
        plan = planner.plan(server_round, [11, 12])
        done = closed(plan, "cluster-0", "cluster-1", after=weights(float(server_round)))
        planner.settle(replace(done, movement=meter.measure(done)))
    learning = planner.controller.state.learning
    # |G_4|^2 = 10 and |G_8|^2 = 5 leave no signal and sigma^2 = (10 - 5) / (1/4 - 1/8)
    assert learning.noise == pytest.approx(40.0)
    assert learning.loss == pytest.approx(1.5)
    assert learning.smoothness is not None
    assert learning.drift is not None


def test_a_round_that_nobody_finished_teaches_nothing_and_the_next_one_is_planned():
    planner = rounds()
    planner.settle(closed(planner.plan(1, [11, 12]), *NODES.values(), after=weights(1.0)))
    plan, before = planner.plan(2, [11, 12]), planner.controller.state
    outcome = planner.settle(closed(plan, after=None))
    assert outcome.latency_s is None and outcome.energy_j == {}
    assert outcome.queues_j == before.energy_queue_j
    assert planner.controller.state == before
    assert planner.plan(3, [11, 12]).plan.clusters


def test_a_round_that_the_inner_strategy_dropped_still_costs_energy():
    planner = rounds()
    plan = planner.plan(1, [11, 12])
    assert planner.settle(closed(plan, "cluster-0", after=None)).energy_j["cluster-0"]


def test_link_bytes_split_at_the_last_device():
    assert told("c").link_bytes == {"d2d": 220, "d2e": 110}
    assert told("c").peak_memory_bytes == {"cu": 7, "d1": 7, "d2": 7, "edge": 7}
    assert ClusterMeasurement(cluster_id="c", examples=1, wall_s=0.0, losses=()).loss is None


def test_a_round_that_lost_its_last_device_splits_bytes_and_norms_as_its_legs_did():
    wide = replace(report("d1", 2.0, 1.0), sent_down=LinkTraffic(bytes=500))
    before = (report(CONTROL_UNIT, 1.0, 0.5), wide, report("d2", 3.0, 1.5))
    after = (report(CONTROL_UNIT, 1.0, 0.5), report("d1", 5.0, 2.5))  # with the blocks of d2
    round_told = ClusterMeasurement(
        cluster_id="c",
        examples=128,
        wall_s=1.0,
        losses=(2.0, 1.5, 1.2, 1.0),
        reports=join_reports((before, after)),
        edge=report("edge", 4.0, 2.0) + report("edge", 4.0, 2.0),
    )
    assert round_told.link_bytes == {"d2d": 730, "d2e": 220}
    calm, hit = told("c").gradient_noise, round_told.gradient_noise
    assert calm == hit
    assert (calm.small_square_norm, calm.big_square_norm) == (10.0, 5.0)


def test_movement_is_that_of_the_averaged_arrays():
    meter = MovementMeter()
    models, examples = {"a": weights(1.0), "b": weights(5.0)}, {"a": 10.0, "b": 30.0}
    ended = replace(closed(None, after=weights(4.0)), models=models, examples=examples)
    first = meter.measure(ended)
    assert first.norm == pytest.approx(4 * 2.0)  # four entries of 4
    assert first.change_norm is None
    assert first.spread == pytest.approx(0.25 * 4 * 9 + 0.75 * 4 * 1)
    second = meter.measure(replace(ended, before=weights(4.0), after=weights(5.0)))
    assert second.change_norm == pytest.approx(math.sqrt(4 * 9))
    assert meter.measure(replace(ended, after=None)) == Movement()


@pytest.mark.parametrize(
    "policy", ["dssda", "uniform", pytest.param("static", marks=pytest.mark.slow)]
)
def test_a_planner_loaded_from_its_dump_goes_on_like_the_one_that_never_stopped(policy):
    alive, dead = rounds(policy), rounds(policy)
    for planner in (alive, dead):
        plan = planner.plan(1, [11, 12])
        planner.settle(closed(plan, "cluster-0", "cluster-1", after=weights(1.0)))
    back = rounds(policy)
    back.load(dead.dump())
    for server_round in (2, 3):
        plans = [p.plan(server_round, [11, 12]) for p in (alive, back)]
        assert plans[0] == plans[1]
        after = weights(float(server_round))
        outcomes = [
            p.settle(closed(plan, "cluster-0", "cluster-1", after=after))
            for p, plan in zip((alive, back), plans, strict=True)
        ]
        assert outcomes[0] == outcomes[1]
    assert alive.controller.state == back.controller.state


def keeping(planner: KnownClusters, **shares: float) -> list[RoundOutcome]:
    """Two rounds, of which the first tells what clusters keep of frozen blocks."""
    outcomes = []
    for number in (1, 2):
        planned = planner.plan(number, [11, 12])
        done = closed(planned, "cluster-0", "cluster-1", after=weights(1.0))
        for name, share in shares.items():
            cluster = name.replace("_", "-")
            measured = done.telemetry[cluster]
            first, *rest = measured.reports
            first = replace(first, cache=CacheUse(hits=3, misses=1, stored=1, spared_s=9.0))
            done.telemetry[cluster] = replace(measured, reports=(first, *rest), kept_share=share)
        outcomes.append(planner.settle(done))
    return outcomes


def test_what_control_units_keep_is_priced_by_the_cluster_that_keeps_least() -> None:
    def seconds(**shares: float) -> list[float]:
        found = [outcome.latency_s for outcome in keeping(rounds(), **shares)]
        return [second or 0.0 for second in found]

    nothing, all_of_it = seconds(), seconds(cluster_0=1.0, cluster_1=1.0)
    half, one = seconds(cluster_0=0.5, cluster_1=1.0), seconds(cluster_0=1.0)
    assert nothing[0] == all_of_it[0] == half[0]  # nobody had told yet
    assert all_of_it[1] < half[1] < nothing[1] == one[1]


def test_what_was_spared_is_priced_as_the_control_unit_computes() -> None:
    planner = rounds()
    first, _ = keeping(planner, cluster_0=1.0)
    unit = planner.world.clusters[0].control_unit
    assert set(first.spared) == {"cluster-0"}
    spared = first.spared["cluster-0"]
    assert (spared.hits, spared.visits) == (3, 4)
    assert spared.seconds == pytest.approx(3 * BLOCK.forward_flop / unit.speed_flop_per_s)
    assert spared.joules == pytest.approx(3 * BLOCK.forward_flop * unit.energy_per_flop_j)


def test_ranks_are_chosen_once_for_clusters_that_have_none() -> None:
    planner, asked = rounds("dssda"), list[tuple[int, str]]()
    first, second = planner.world.clusters
    planner.world = replace(planner.world, clusters=(replace(first, lora_rank=3), second))

    def of_rank(rank: int, cluster_id: str) -> ModelProfile:
        asked.append((rank, cluster_id))
        return MODEL

    planner = KnownClusters(
        Planning(settings=SchedulerConfig(micro_batch_sizes=(4,)), ranks=(2, 4)),
        planner.world,
        MODEL,
        NODES,
        of_rank,
    )
    planned = planner.plan(1, [11, 12])
    assert planned.ranks == {first.cluster_id: 3, second.cluster_id: 4}
    assert (2, second.cluster_id) in asked and (3, first.cluster_id) in asked
    asked.clear()
    assert planner.plan(2, [11, 12]).ranks == planned.ranks
    assert (2, second.cluster_id) not in asked
