"""An edge that dies in the middle of a round: one sentence, soon, and a run marked as failed."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from collapipe_flwr.core.errors import CollaPipeError
from collapipe_flwr.transport.client import HostClient
from tests.cluster.daemon_processes import Daemon, running
from tests.integration.conftest import RunApp

START_S, NOTICE_S = 120.0, 60.0


def _kill_when_busy(edge: Daemon, killed_s: list[float]) -> None:
    deadline = time.monotonic() + START_S
    with HostClient(edge.address, deadline_s=START_S) as client:
        while time.monotonic() < deadline:
            if client.ask_health().running:
                edge.process.kill()
                killed_s.append(time.monotonic())
                return
            time.sleep(0.01)


@pytest.mark.long
def test_killing_the_edge_in_a_round_ends_the_run_with_a_sentence(
    run_app: RunApp, tmp_path: Path
) -> None:
    killed_s: list[float] = []
    with running(Daemon("edge")) as (edge,):
        address = edge.address
        killer = threading.Thread(target=_kill_when_busy, args=(edge, killed_s))
        killer.start()
        with pytest.raises(CollaPipeError, match=f"edge at {address}") as failure:
            run_app(
                {
                    "edge.address": address,
                    "edge.timeout-s": 5.0,
                    "num-server-rounds": 50,
                    "round-retries": 1,
                    "train.examples-per-round": 400,
                }
            )
        failed_s = time.monotonic()
        killer.join(START_S)
    assert killed_s, "the edge was never busy"
    assert failed_s - killed_s[0] < NOTICE_S
    assert "\n" not in str(failure.value)
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert address in summary["reason"]
    assert f"collapipe run --resume {tmp_path / 'runs' / 'run'}" in summary["reason"]
    assert not (tmp_path / "runs" / "run" / "model").exists()
