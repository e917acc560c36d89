"""Devices and clusters that are gone: planned without them, and with them once they are back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from collapipe_flwr.cluster.control_unit import ClusterResult
from collapipe_flwr.cluster.evaluation import EvalResult
from collapipe_flwr.cluster.recovery import Interruption
from collapipe_flwr.core.errors import InfeasibleError, ScheduleError
from collapipe_flwr.core.measurements import StageMeasurement
from collapipe_flwr.federation.client.pipeline_round import build_telemetry as telemetry_of
from collapipe_flwr.federation.planner import KnownClusters
from collapipe_flwr.pipeline.offload import LazyMapping
from collapipe_flwr.scheduler.controller import MOST_ROUNDS, Absence, drop_absent
from tests.federation.test_planner import NODES, closed, rounds, told, weights
from tests.rounds import Cut

CUT = Cut(stops=(1, 3, 5), micro_batches=(2, 1), schedule="1f1b")
CLUSTERS = ("cluster-0", "cluster-1")


def devices_of(planned, node: int) -> set[str]:
    return {segment.device_id for segment in planned.cluster_plan(node).segments}


def settle(planner: KnownClusters, planned, **absent: tuple[str, ...]) -> None:
    """A round in which all replied and said who is missing."""
    done = closed(planned, *CLUSTERS, after=weights(0.5))
    telemetry = {
        name: replace(told(name), absent=absent.get(name.replace("-", "_"), ()))
        for name in CLUSTERS
    }
    planner.settle(replace(done, telemetry=telemetry))


def test_a_lost_device_is_left_out_until_it_is_back():
    planner = rounds("uniform")
    everyone = devices_of(planned := planner.plan(1, [11, 12]), 11)
    assert everyone == {"cluster-0/d1", "cluster-0/d2"}
    settle(planner, planned, cluster_0=("cluster-0/d1",))
    planned = planner.plan(2, [11, 12])
    assert devices_of(planned, 11) == {"cluster-0/d2"}
    assert devices_of(planned, 12) == {"cluster-1/d1", "cluster-1/d2"}
    settle(planner, planned)
    assert devices_of(planner.plan(3, [11, 12]), 11) == everyone


@pytest.mark.parametrize("policy", ["dssda", "fedavg", "throughput"])
def test_every_policy_plans_with_who_is_there(policy):
    planner = rounds(policy)
    settle(planner, planner.plan(1, [11, 12]), cluster_1=("cluster-1/d2",))
    planned = planner.plan(2, [11, 12])
    assert devices_of(planned, 12) == {"cluster-1/d1"}
    settle(planner, planned, cluster_1=("cluster-1/d2",))


def test_a_cluster_without_devices_sits_out_and_the_others_go_on():
    planner = rounds()
    gone = ("cluster-0/d1", "cluster-0/d2")
    settle(planner, planner.plan(1, [11, 12]), cluster_0=gone)
    planned = planner.plan(2, [11, 12])
    assert not planned.takes_part(11) and planned.takes_part(12)
    assert planned.plan.fallback is None
    # It says nothing while it sits out, so the next round finds out whether it is back.
    assert planner.plan(3, [11, 12]).takes_part(11)


def test_a_checkpoint_remembers_who_is_absent():
    dead = rounds("uniform")
    settle(dead, dead.plan(1, [11, 12]), cluster_0=("cluster-0/d1",))
    back = rounds("uniform")
    back.load(dead.dump())
    assert devices_of(back.plan(2, [11, 12]), 11) == {"cluster-0/d2"}


def test_who_sat_out_for_want_of_memory_is_tried_again():
    planner = rounds()
    settle(planner, planner.plan(1, [11, 12]), cluster_0=("cluster-0/d1",))
    step, calls = planner.controller._scheduler.step, []

    def tight(state, snapshot):
        calls.append([len(c.profile.devices) for c in snapshot.clusters])
        if 1 not in calls[-1]:
            return step(state, snapshot)
        raise InfeasibleError("cluster 'cluster-0': no plan fits", ["cluster-0"])

    planner.controller._scheduler = type("Tight", (), {"step": staticmethod(tight)})()
    planned = planner.plan(2, [11, 12])
    assert calls == [[1, 2], [1], [2]]
    assert not planned.takes_part(11) and planned.takes_part(12)
    assert "without cluster-0/d1: cluster 'cluster-0': no" in planned.left_out["cluster-0"]
    assert planner.plan(3, [11, 12]).takes_part(11)


def test_nobody_left_is_an_error():
    planner = rounds()
    settle(
        planner,
        planner.plan(1, [11, 12]),
        cluster_0=("cluster-0/d1", "cluster-0/d2"),
        cluster_1=("cluster-1/d1", "cluster-1/d2"),
    )
    with pytest.raises(ScheduleError, match="no device is reachable"):
        planner.plan(2, [11, 12])


def test_a_round_is_priced_by_the_plan_that_it_ended_with():
    planner = rounds("uniform")
    planned = planner.plan(1, [11, 12])
    plan = planned.cluster_plan(11)
    last = replace(plan.segments[0], device_id="cluster-0/d2", stop_block=4)
    ended = replace(
        plan,
        segments=(last,),
        warmup_depth=plan.warmup_depth[1:],
        gradient_power_w={"cluster-0/d2": plan.gradient_power_w["cluster-0/d2"]},
    )
    done = closed(planned, *CLUSTERS, after=weights(0.5))
    telemetry = {
        "cluster-0": replace(told("cluster-0"), replanned=ended, absent=("cluster-0/d1",)),
        "cluster-1": told("cluster-1"),
    }
    outcome = planner.settle(replace(done, telemetry=telemetry))
    calm = rounds("uniform")
    usual = calm.settle(closed(calm.plan(1, [11, 12]), *CLUSTERS, after=weights(0.5)))
    assert outcome.energy_j["cluster-0"].get("cluster-0/d1", 0.0) == 0.0
    assert (
        outcome.energy_j["cluster-0"]["cluster-0/d2"] > usual.energy_j["cluster-0"]["cluster-0/d2"]
    )
    assert outcome.energy_j["cluster-1"] == usual.energy_j["cluster-1"]


def test_channels_follow_their_devices():
    planner = rounds()
    snapshot = planner.world.snapshot(1, planner._model, list(NODES.values()))
    before = snapshot.clusters[0]
    after = drop_absent(snapshot, {"cluster-0": ("cluster-0/d1",)}).clusters[0]
    assert [d.device_id for d in after.profile.devices] == ["cluster-0/d2"]
    assert after.channel.edge_gain == (before.channel.edge_gain[0], before.channel.edge_gain[2])
    assert after.channel.d2d_gain[0][1] == before.channel.d2d_gain[0][2]
    assert after.channel.d2d_gain[1][1] == before.channel.d2d_gain[2][2]


def test_a_device_that_was_at_fault_is_left_out_for_a_while_and_longer_each_time():
    planner, left_out = rounds("uniform"), []
    for server_round in range(1, 12):
        planned = planner.plan(server_round, [11, 12])
        used = devices_of(planned, 11)
        left_out.append("cluster-0/d1" not in used)
        done = closed(planned, *CLUSTERS, after=weights(0.5))
        found = {"cluster-0/d1": "it sent NaN"} if "cluster-0/d1" in used else {}
        telemetry = {name: replace(told(name), reports=()) for name in CLUSTERS}
        telemetry["cluster-0"] = replace(telemetry["cluster-0"], quarantined=found)
        planner.settle(replace(done, telemetry=telemetry))
        again = rounds("uniform")
        again.load(planner.dump())  # a resumed run remembers
        planner = again
    assert left_out == [False, True, True, False, *[True] * 4, False, True, True]


def test_a_device_that_dies_in_every_round_is_planned_ever_less_often():
    planner, left_out = rounds("uniform"), []
    for server_round in range(1, 14):
        planned = planner.plan(server_round, [11, 12])
        used = devices_of(planned, 11)
        left_out.append("cluster-0/d1" not in used)
        done = closed(planned, *CLUSTERS, after=weights(0.5))
        telemetry = {name: replace(told(name), reports=()) for name in CLUSTERS}
        died = ("cluster-0/d1",) if "cluster-0/d1" in used else ()
        telemetry["cluster-0"] = replace(telemetry["cluster-0"], lost=died)  # and is back
        planner.settle(replace(done, telemetry=telemetry))
    assert left_out == [False, False, *[True] * 4, False, *[True] * 6]


def test_a_device_that_died_once_and_then_worked_has_no_offence():
    absence, worked = Absence(), StageMeasurement(name="A/d1")
    for server_round in range(1, 6, 2):
        absence.learn(server_round, "A", replace(told("A"), lost=("A/d1",), reports=()))
        assert absence.list_devices(server_round + 1) == {"A": ()}
        absence.learn(server_round + 1, "A", replace(told("A"), reports=(worked,)))


def test_a_control_unit_tells_who_was_lost_and_who_was_at_fault():
    incident = Interruption(reason="", lost=("A/d1",), from_step=0, noticed_s=0.0, resumed_s=1.0)
    at_fault = replace(incident, lost=("A/d2",), quarantined=True)
    untrue = replace(at_fault, lost=("A/d0",), untrue=True)
    result = ClusterResult(
        weights=LazyMapping({}),
        losses=(),
        probe=EvalResult.average([]),
        reports=(),
        wall_s=1.0,
        plan=CUT.plan(),
        incidents=(incident, at_fault, untrue),
        quarantined={"A/d2": "it sent NaN", "A/d0": "an audit found"},
    )
    batches = SimpleNamespace(examples=1, epochs=1, fresh_examples=0)
    measured = telemetry_of(result, batches, (), wall_s=1.0)
    assert measured.lost == ("A/d1",) and set(measured.quarantined) == {"A/d2", "A/d0"}
    assert measured.untrue == ("A/d0",)


def test_whom_an_audit_found_is_left_out_for_long_even_where_nothing_else_can_train():
    absence = Absence()
    found = {"A/d1": "an audit found", "A/d2": "it sent NaN"}
    lied = replace(told("A"), reports=(), quarantined=found, untrue=("A/d1",))
    absence.learn(1, "A", lied)
    assert set(absence.list_devices(2)["A"]) == {"A/d1", "A/d2"}
    absence.lift(["A"])
    for server_round in (2, 1 + MOST_ROUNDS):
        assert absence.list_devices(server_round)["A"] == ("A/d1",)
    assert absence.list_devices(2 + MOST_ROUNDS)["A"] == ()


def test_a_cluster_that_cannot_do_without_a_device_in_quarantine_is_tried_in_full():
    planner = rounds()
    planned = planner.plan(1, [11, 12])
    gone = dict.fromkeys(("cluster-0/d1", "cluster-0/d2"), "it sent NaN")
    done = closed(planned, *CLUSTERS, after=weights(0.5))
    telemetry = {name: replace(told(name), reports=()) for name in CLUSTERS}
    telemetry["cluster-0"] = replace(telemetry["cluster-0"], quarantined=gone)
    planner.settle(replace(done, telemetry=telemetry))
    assert not planner.plan(2, [11, 12]).takes_part(11)
    assert planner.plan(3, [11, 12]).takes_part(11)


def test_a_cluster_that_is_not_asked_keeps_its_absences_and_quarantines():
    planner = rounds("uniform")
    planned = planner.plan(1, [11, 12])
    done = closed(planned, *CLUSTERS, after=weights(0.5))
    telemetry = {name: replace(told(name), reports=()) for name in CLUSTERS}
    for name, device in (("cluster-0", "cluster-0/d1"), ("cluster-1", "cluster-1/d2")):
        wrong = {device: "it sent NaN"} if name == "cluster-0" else {}
        away = (device,) if name == "cluster-1" else ()
        telemetry[name] = replace(telemetry[name], absent=away, quarantined=wrong)
    planner.settle(replace(done, telemetry=telemetry))
    for _ in range(2):
        assert devices_of(planner.plan(2, [11]), 11) == {"cluster-0/d2"}
        assert devices_of(planner.plan(2, [12]), 12) == {"cluster-1/d1"}


def test_of_a_cluster_that_is_not_asked_nobody_says_that_it_cannot_take_part(caplog):
    planner = rounds("uniform")
    settle(planner, planner.plan(1, [11, 12]), cluster_1=("cluster-1/d2",))
    step, calls = planner.controller._scheduler.step, []

    def kept(state, snapshot):
        calls.append(snapshot)
        plan, state = step(state, snapshot)
        return replace(plan, fallback="kept the plan of round 1: no plan fits"), state

    planner.controller._scheduler = type("Kept", (), {"step": staticmethod(kept)})()
    assert planner.plan(2, [11]).takes_part(11)
    assert len(calls) == 1 and "cannot take part" not in caplog.text


def test_a_round_that_is_planned_again_is_planned_from_the_same_state():
    planner, once = rounds(), rounds()
    first = planner.plan(1, [11, 12])
    assert planner.plan(1, [11, 12]) == first == once.plan(1, [11, 12])
    assert planner.controller.state == once.controller.state
