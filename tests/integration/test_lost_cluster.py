"""One cluster of two is late or gone: the round closes with the other, and the run goes on."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from client_app.app import app as client_app
from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.core.keys import Value
from collapipe_flwr.federation import attempts
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.reporting.console import summary_table
from server_app.app import run
from tests.integration.conftest import TINY

CALM = {**TINY, "num-server-rounds": 3}


class UnreliableGrid(LocalGrid):
    """Node 2's replies to training get lost in some rounds; from ``gone`` on it is away.

    From ``back`` on its SuperNode runs again, as node 3.
    """

    late: tuple[int, ...] = ()
    silent = False  # every reply gets lost
    gone = back = 99
    trained = 0

    def __init__(self, *args: Any, service: HostService, **more: Any) -> None:
        super().__init__(*args, **more)
        self.service, self.open_sessions = service, []

    def get_node_ids(self) -> list[int]:
        ids = super().get_node_ids()
        if self.trained + 1 >= self.back:
            return [1, 3]
        return [1] if self.trained + 1 >= self.gone else [i for i in ids if i < 3]

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if not messages or messages[0].metadata.message_type != "train":
            return super().send_and_receive(messages, timeout=timeout)
        self.open_sessions.append(self.service.measure_load().sessions)
        self.trained += 1
        replies = super().send_and_receive(messages, timeout=timeout)
        lost = self.trained in self.late
        heard = [r for r in replies if not (lost and r.metadata.src_node_id == 2)]
        return [] if self.silent else heard


def _lost(folder: Path) -> dict[str, list[int]]:
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"
    lost: dict[str, list[int]] = summary["lost"]
    return lost


def _run(
    folder: Path, more: dict[str, Value] | None = None, **fate: Any
) -> tuple[UnreliableGrid, list[dict[str, Any]]]:
    service = HostService()
    places = {i + 1: {"partition-id": i, "num-partitions": 2} for i in range(2)}
    with HostServer("127.0.0.1:0", service) as edge:
        values = {**CALM, **(more or {}), "output-dir": str(folder), "edge.address": edge.address}
        places[3] = places[2]  # the same machine, started again
        nodes = dict.fromkeys(places, client_app)
        grid = UnreliableGrid(nodes, node_configs=places, run_config=values, service=service)
        for name, value in fate.items():
            setattr(grid, name, value)
        run(grid, parse(values))
        assert service.measure_load().sessions == 0
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return grid, [json.loads(line) for line in lines]


def test_a_late_cluster_does_not_stop_the_round(tmp_path: Path) -> None:
    grid, events = _run(tmp_path, late=(2,))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["never_trained"] == []
    assert [event["failures"] for event in events] == [
        [],
        ["cluster-1: no reply before the round's timeout"],
        [],
    ]
    assert grid.open_sessions == [0, 0, 0]  # none of the round before
    assert _lost(tmp_path) == {"cluster-1": [2]}
    queues = [sum(v for k, v in e["queues_j"].items() if k.startswith("cluster-1")) for e in events]
    assert queues[1] <= queues[0]  # who did not finish is charged nothing
    assert all(not k.startswith("cluster-1") for k in events[1]["energy_j"])


def test_a_cluster_that_comes_back_as_another_node_takes_part_again(tmp_path: Path) -> None:
    grid, events = _run(tmp_path, gone=2, back=3)
    planned = [[c["cluster_id"] for c in event["plan"]["clusters"]] for event in events]
    assert planned == [["cluster-0", "cluster-1"], ["cluster-0"], ["cluster-0", "cluster-1"]]
    assert grid.open_sessions == [0, 0, 0]
    assert _lost(tmp_path) == {"cluster-1": [2]}
    asked = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert sorted(asked) == [1, 1, 1, 2, 3]


def test_a_cluster_that_vanishes_is_planned_without(tmp_path: Path) -> None:
    grid, events = _run(tmp_path, gone=2)
    planned = [[c["cluster_id"] for c in event["plan"]["clusters"]] for event in events]
    assert planned == [["cluster-0", "cluster-1"], ["cluster-0"], ["cluster-0"]]
    assert grid.open_sessions == [0, 0, 0]
    assert _lost(tmp_path) == {"cluster-1": [2, 3]}


def test_a_plain_strategy_says_as_well_whom_a_round_lost(tmp_path: Path) -> None:
    _run(tmp_path, more={"runtime": "whole"}, late=(2,), gone=3)
    assert _lost(tmp_path) == {"cluster-1": [2, 3]}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    shown = Console(file=io.StringIO(), width=100)
    shown.print(summary_table(summary))
    assert isinstance(shown.file, io.StringIO)
    assert "2 rounds went on without a cluster: cluster-1 (2, 3)" in shown.file.getvalue()


def test_a_run_says_who_never_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _run(tmp_path, more={"num-server-rounds": 2}, late=(1, 2))
    assert _lost(tmp_path) == {"cluster-1": [1, 2]}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["never_trained"] == ["cluster-1"]
    shown = Console(file=io.StringIO(), width=100)
    shown.print(summary_table(summary))
    assert isinstance(shown.file, io.StringIO)
    for told in (shown.file.getvalue(), caplog.text):
        assert any("never trained" in line and "cluster-1" in line for line in told.splitlines())


def test_a_plain_strategy_that_loses_all_clusters_fails_after_its_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(attempts, "sleep", pauses.append)
    with pytest.raises(RunError, match=r"round 1: all 2 clusters failed, .*\(tried 3 times in "):
        _run(tmp_path, more={"runtime": "whole", "round-retries": 2}, silent=True)
    assert pauses == [2.0, 4.0]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
