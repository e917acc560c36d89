"""A cluster that sleeps does not hold up a run whose rounds have a deadline."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message

from client_app.app import app as client_app
from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.checkpoint import Checkpoint, Checkpoints
from collapipe_flwr.federation.late import RoundDeadline
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from server_app.app import run
from tests.integration.conftest import TINY

SLEEPY, ROUND = 2, 3
LIMIT_S = 200.0
TIMEOUT_S = 86_400.0  # no round is planned to take that long, on any machine


class WaitingGrid(LocalGrid):
    """Nodes answer in a thread, the sleepy one last; time passes at once while it sleeps."""

    def __init__(self, nodes: Mapping[int, Any], idle: threading.Event, **more: Any) -> None:
        super().__init__(nodes, **more)
        self.training_s: list[float | None] = []  # that rounds were given
        self._idle, self._work = idle, threading.Lock()

    def send_and_receive(self, messages, *, timeout=None):
        ids: list[str] = []
        sent = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        if sent and sent[0].metadata.message_type == "train":
            self.training_s.append(timeout)

        def answer() -> None:
            for message in sent:
                with self._work:
                    ids.extend(self.push_messages([message]))
            self._idle.set()

        self._idle.clear()
        threading.Thread(target=answer, daemon=True).start()
        assert self._idle.wait(LIMIT_S)
        return self.pull_messages(list(ids))


class Sleeper:
    """Trains, but in one round only after it was woken."""

    def __init__(self) -> None:
        self.idle, self.wake, self.over = (threading.Event() for _ in range(3))
        self.trained = 0

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            self.trained += 1
            if self.trained == ROUND:
                self.idle.set()
                self.wake.wait(LIMIT_S)
                self.over.set()
        return client_app(message, context)


def test_a_round_closes_at_its_deadline_without_the_cluster_that_sleeps(tmp_path: Path) -> None:
    service, sleeper = HostService(), Sleeper()
    places = {i + 1: {"partition-id": i, "num-partitions": 2} for i in range(2)}
    with HostServer("127.0.0.1:0", service) as edge:
        values = {
            **TINY,
            "num-server-rounds": ROUND,
            "output-dir": str(tmp_path),
            "edge.address": edge.address,
            "round-slack": 2.0,
            "round-timeout-s": TIMEOUT_S,
        }
        nodes = {1: client_app, SLEEPY: sleeper}
        grid = WaitingGrid(nodes, sleeper.idle, node_configs=places, run_config=values)
        run(grid, parse(values))
        assert service.measure_load().sessions == 0  # also that of the cluster that sleeps
        assert grid.training_s[0] == TIMEOUT_S > grid.training_s[-1]
        assert sleeper.trained == ROUND and not sleeper.over.is_set()
        sleeper.wake.set()
        assert sleeper.over.wait(120)
    saved = Checkpoints(folder=tmp_path / "run" / "checkpoints").read_newest()
    assert saved is not None and '"cluster-0"' in saved.memories["clock"].text
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    failures = [json.loads(line)["failures"] for line in lines]
    assert failures[:2] == [[], []]
    assert len(failures[2]) == 1
    assert failures[2][0].startswith("cluster-1: late: the round was planned to close after ")


class WakingGrid(WaitingGrid):
    """Wakes the sleeper when the round after its own begins."""

    def __init__(self, nodes: Mapping[int, Any], sleeper: Sleeper, **more: Any) -> None:
        super().__init__(nodes, sleeper.idle, **more)
        self._sleeper = sleeper

    def send_and_receive(self, messages, *, timeout=None):
        if len(self.training_s) == ROUND and not self._sleeper.wake.is_set():
            self._idle.clear()
            self._sleeper.wake.set()
            assert self._idle.wait(LIMIT_S)
        return super().send_and_receive(messages, timeout=timeout)


def test_what_a_late_cluster_learnt_spent_and_measured_counts_in_the_next_round(
    tmp_path: Path,
) -> None:
    sleeper = Sleeper()
    places = {i + 1: {"partition-id": i, "num-partitions": 2} for i in range(2)}
    with HostServer("127.0.0.1:0", HostService()) as edge:
        values = {
            **TINY,
            "num-server-rounds": ROUND + 1,
            "output-dir": str(tmp_path),
            "edge.address": edge.address,
            "round-slack": 2.0,
            "round-late": "join",
            "round-timeout-s": TIMEOUT_S,
        }
        nodes = {1: client_app, SLEEPY: sleeper}
        run(WakingGrid(nodes, sleeper, node_configs=places, run_config=values), parse(values))
    assert sleeper.over.is_set()
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    *_, without, joined = map(json.loads, lines)
    assert set(without["clusters"]) == {"cluster-0"}
    assert set(joined["clusters"]) == {"cluster-0", "cluster-1"}
    assert [c["cluster_id"] for c in joined["plan"]["clusters"]] == ["cluster-0"]
    late = joined["clusters"]["cluster-1"]
    assert late["predicted_s"] > 0
    assert sum(energy["energy_j"] for energy in late["energy"].values()) > 0
    assert [told["kind"] for told in joined["incidents"]] == ["late"]


def test_a_clock_expects_what_rounds_took_in_proportion_to_their_plans() -> None:
    clock = RoundDeadline(2.0)
    assert clock.deadline_s({"A": 10.0}) is None
    clock.learn({"A": 10.0, "B": 20.0}, {"A": 1.0, "B": 3.0}, exchange_s=3.5)
    assert clock.deadline_s({"A": 10.0, "B": 20.0}) == pytest.approx(2 * (0.5 + 3.0))
    assert clock.deadline_s({"A": 40.0}) == pytest.approx(2 * (0.5 + 4.0))
    assert clock.deadline_s({"A": 10.0, "C": 1.0}) is None  # nobody knows C


def test_a_round_that_somebody_missed_does_not_stretch_the_next() -> None:
    clock = RoundDeadline(2.0)
    clock.learn({"A": 10.0, "B": 10.0}, {"A": 1.0, "B": 1.0}, exchange_s=1.5)
    before = clock.deadline_s({"A": 10.0, "B": 10.0})
    clock.learn({"A": 10.0, "B": 10.0}, {"A": 1.0}, exchange_s=60.0)
    assert clock.deadline_s({"A": 10.0, "B": 10.0}) == before


def test_a_clock_from_a_checkpoint_expects_to_the_bit_what_the_first_did(tmp_path: Path) -> None:
    clock, again = RoundDeadline(2.0), RoundDeadline(2.0)
    for took_s in (0.1, 1 / 3, 0.7):
        clock.learn({"A": 0.3, "B": 0.7}, {"A": took_s, "B": took_s / 7}, exchange_s=took_s + 0.2)
    saved = Checkpoint(
        server_round=3,
        arrays=ArrayRecord(),
        strategy="FedAvg",
        memories={"clock": clock.dump()},
    )
    Checkpoints(folder=tmp_path).save(saved)
    read = Checkpoints(folder=tmp_path).read_newest()
    assert read is not None
    again.load(read.memories["clock"])
    for predicted_s in ({"A": 1.1}, {"A": 0.3, "B": 9.9}):
        assert again.deadline_s(predicted_s) == clock.deadline_s(predicted_s) is not None
    for both in (clock, again):
        both.learn({"A": 0.3, "B": 0.7}, {"A": 0.01, "B": 0.01}, exchange_s=0.02)
    assert again.deadline_s({"B": 1.0}) == clock.deadline_s({"B": 1.0})


def test_slack_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="round-slack must be 0 or >= 1"):
        parse({**TINY, "round-slack": 0.5})
