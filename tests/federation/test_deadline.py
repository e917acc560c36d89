"""Law: who slows down is waited for longer, until it fits; who never answers, only once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr.core.domain import ClusterPlan, Segment
from collapipe_flwr.core.measurements import ClusterMeasurement
from collapipe_flwr.federation.checkpoint import ComponentState
from collapipe_flwr.federation.late import RoundDeadline
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.members import ClusterGrid
from collapipe_flwr.federation.records import (
    LATE,
    TaskAssignment,
    write_assignment,
    write_telemetry,
)
from collapipe_flwr.federation.strategy import CollaPipe

TIMEOUT_S = 600.0
NODES = {1: "A", 2: "B"}
PLAN = ClusterPlan(
    cluster_id="",
    segments=(Segment(device_id="d", first_block=0, stop_block=1),),
    micro_batch_size=1,
    micro_batches=1,
    warmup_depth=(1, 1, 1),
    local_steps=1,
    bandwidth_hz=1.0,
    tx_power_w={},
    gradient_power_w={},
    latency_s=40.0,
    step_s=1.0,
    energy_j={},
    memory_bytes={},
)


class TimedGrid(LocalGrid):
    """Nodes that need their seconds; a wait ends at its timeout."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        super().__init__({})
        self.seconds = dict(seconds)
        self.told_s: dict[int, float] = {}  # by nodes whose clocks are wrong
        self.now_s = 0.0
        self.waited_s: list[float] = []

    def send_and_receive(self, messages, *, timeout=None):
        sent = list(messages)
        for number, message in enumerate(sent):
            message.metadata.__dict__["_message_id"] = f"{len(self.waited_s)}-{number}"
        needed = [self.seconds[m.metadata.dst_node_id] for m in sent]
        self.waited_s.append(min(max(needed) + 0.5, timeout))
        self.now_s += self.waited_s[-1]
        return [
            _done(m, self.told_s.get(m.metadata.dst_node_id, s))
            for m, s in zip(sent, needed, strict=True)
            if s + 0.5 <= self.waited_s[-1]
        ]


def _done(message: Message, seconds: float) -> Message:
    name = NODES[message.metadata.dst_node_id]
    told = ClusterMeasurement(cluster_id=name, examples=1, wall_s=seconds, losses=())
    return Message(write_telemetry(RecordDict(), told), reply_to=message)


def members(grid: TimedGrid, slack: float = 1.5) -> ClusterGrid:
    names = {node: NODES[node] for node in grid.seconds}
    return ClusterGrid(grid, names, RoundDeadline(slack, now=lambda: grid.now_s))


def train(run: ClusterGrid, server_round: int) -> set[str]:
    """One round; the clusters that finished it."""
    sent = []
    for node, name in run.clusters.items():
        plan = replace(PLAN, cluster_id=name)
        assignment = TaskAssignment(server_round=server_round, cluster_id=name, plan=plan)
        sent.append(Message(write_assignment(RecordDict(), assignment), node, "train"))
    replies = run.send_and_receive(sent, timeout=TIMEOUT_S)
    return {NODES[r.metadata.src_node_id] for r in replies if r.has_content()}


@pytest.mark.parametrize("slack", [1.0, 1.5, 4.0])
@pytest.mark.parametrize("names", ["A", "AB"])
def test_a_cluster_that_becomes_ten_times_slower_is_in_again_after_a_few_rounds(
    names: str, slack: float
) -> None:
    grid = TimedGrid({node: 10.0 for node, name in NODES.items() if name in names})
    run = members(grid, slack)
    assert all(train(run, r) == set(names) for r in (1, 2))
    grid.seconds[len(names)] = 100.0
    rounds = [train(run, r) for r in range(3, 11)]
    assert rounds[0] == set(names[:-1])
    back = rounds.index(set(names))
    assert back <= 4
    assert all(found == set(names) for found in rounds[back:])
    grid.seconds[len(names)] = 10.0  # and when it is fast again, so are the deadlines
    for server_round in range(11, 17):
        assert train(run, server_round) == set(names)
    grid.seconds[1] = 100.0
    assert "A" not in train(run, 17)


def test_a_cluster_that_never_answers_costs_the_runs_timeout_once() -> None:
    grid = TimedGrid({1: 10.0, 2: 10.0})
    run = members(grid, slack=2.0)
    assert train(run, 1) == {"A", "B"}
    grid.seconds[2] = 10 * TIMEOUT_S
    assert all(train(run, r) == {"A"} for r in range(2, 22))
    waits = grid.waited_s[1:]
    assert waits[0] == waits[-1] == pytest.approx(21.0)
    assert waits.count(TIMEOUT_S) == 1
    assert waits == sorted(waits[: waits.index(TIMEOUT_S) + 1]) + [waits[0]] * (
        len(waits) - waits.index(TIMEOUT_S) - 1
    )
    assert run._clock.deadline_s({"B": PLAN.latency_s}) is None  # nobody else to go on with
    grid.seconds[2] = 10.0
    assert train(run, 22) == {"A", "B"}
    grid.seconds[2] = 100.0  # it is again worth a wait
    assert {"A", "B"} in [train(run, r) for r in range(23, 27)]


@pytest.mark.parametrize("wall_s", [math.nan, math.inf, -1e9])
def test_seconds_that_cannot_be_do_not_enter_a_deadline(wall_s: float) -> None:
    grid = TimedGrid({1: 10.0, 2: 10.0})
    run = members(grid, slack=2.0)
    grid.told_s[2] = wall_s
    assert train(run, 1) == {"A", "B"}
    grid.told_s.clear()
    assert train(run, 2) == train(run, 3) == {"A", "B"}
    deadline_s = run._clock.deadline_s({"A": PLAN.latency_s, "B": PLAN.latency_s})
    assert deadline_s == pytest.approx(21.0)


def test_a_checkpoint_remembers_who_was_late() -> None:
    clock, again, fresh = RoundDeadline(2.0), RoundDeadline(2.0), RoundDeadline(2.0)
    clock.learn({"A": 10.0}, {"A": 1.0}, exchange_s=1.5)
    before = clock.dump()
    clock.miss({"A": 10.0}, planned_s=3.0)
    again.load(clock.dump())
    fresh.load(before)
    assert again.deadline_s({"A": 10.0}) == clock.deadline_s({"A": 10.0})
    assert clock.deadline_s({"A": 10.0}) >= 6.0 > fresh.deadline_s({"A": 10.0})
    again.load(ComponentState())
    assert again.deadline_s({"A": 10.0}) is None


def test_a_round_for_which_all_clusters_were_late_by_plan_does_not_end_the_run(
    floats, drifting
) -> None:
    class Late(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            (message,) = messages
            reply = super().send_and_receive([message], timeout=timeout)
            trains = message.metadata.message_type == "train"
            if trains and message.content["config"]["server-round"] == 2:
                return [Message(Error(LATE, "late"), reply_to=message)]
            return reply

    records = []
    strategy = CollaPipe(
        FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1),
        on_round=records.append,
    )
    strategy.start(Late({1: drifting(0.1)}), floats, num_rounds=3)
    assert [record.failures for record in records] == [{}, {"node-1": "late"}, {}]
