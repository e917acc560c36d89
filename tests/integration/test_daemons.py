"""Rounds of the two apps on daemons: a cluster file in the node-config, TLS on every link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client_app.app import app as client_app
from collapipe_flwr.config.schema import parse
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.transport.certificates import sign_all
from server_app.app import run
from tests.cluster.daemon_processes import Daemon, running
from tests.host.scraping import listening_ports, scrape
from tests.integration.conftest import TINY

NAMES = ("pi-1", "pi-2")
CLUSTER = """
id = "greenhouse"
[control-unit]
kind = "raspberry-pi-5"
[[device]]
name = "pi-1"
address = "{pi-1}"
memory-mb = 0.3
[[device]]
name = "pi-2"
address = "{pi-2}"
memory-mb = 0.3
[edge]
address = "{edge}"
[tls]
"""


@pytest.mark.timeout(300)
def test_a_run_on_daemons_is_planned_measured_and_completed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    members = sign_all(
        tmp_path / "certs", dict.fromkeys((*NAMES, "control-unit", "edge", "server"), ())
    )
    allow = ("--allow", "control-unit", "--allow", "pi-1", "--allow", "pi-2", "--allow", "server")
    told = ("--metrics", "0", "--log-format", "json")
    daemons = [Daemon("device", "--name", n, *allow, *told, tls=members[n]) for n in NAMES]
    with running(*daemons, Daemon("edge", *allow, *told, tls=members["edge"])) as (*devices, edge):
        text = CLUSTER
        for name, daemon in zip((*NAMES, "edge"), (*devices, edge), strict=True):
            text = text.replace(f"{{{name}}}", daemon.address)
        path = tmp_path / "greenhouse.toml"
        path.write_text(text)
        server = members["server"]
        values = {
            **TINY,
            "clusters": 1,
            "world.channel": "static",
            "scheduler.policy": "static",  # what is measured changes no segment
            "output-dir": str(tmp_path / "runs"),
            "edge.address": edge.address,
            "edge.certificate-name": "edge",
            "edge.tls-ca": str(server.ca),
            "edge.tls-cert": str(server.certificate),
            "edge.tls-key": str(server.key),
        }
        place = {"partition-id": 0, "num-partitions": 1, "cluster": str(path)}
        grid = LocalGrid({1: client_app}, node_configs={1: place}, run_config=values)
        run(grid, parse(values))
        for daemon in (*devices, edge):
            assert_counted(daemon)
    run_id = (tmp_path / "runs" / "run" / "run-id").read_text()
    assert_logged(capfd.readouterr().err, run_id)
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"
    events = (tmp_path / "runs" / "run" / "events.jsonl").read_text().splitlines()
    last = json.loads(events[-1])
    devices_used = {s["device_id"] for s in last["plan"]["clusters"][0]["segments"]}
    assert devices_used == {"greenhouse/pi-1", "greenhouse/pi-2"}
    assert last["bytes"]["d2d"] > 0 and last["bytes"]["d2e"] > 0
    assert not last["failures"]
    first = json.loads(events[0])["bytes"]
    assert first["weights"] > 0
    # One cluster: what comes back from the average is what the devices have already.
    assert last["bytes"]["spared"] > 0 and last["bytes"]["weights"] < first["weights"]


def assert_counted(daemon: Daemon) -> None:
    """A Prometheus server sees two rounds of the cluster, and no session that is left."""
    own = int(daemon.address.rpartition(":")[2])
    (port,) = listening_ports(daemon.process.pid) - {own}
    found = scrape(f"127.0.0.1:{port}")
    assert found["collapipe_host_round", "greenhouse"] == 2
    assert found["collapipe_host_steps_total", "greenhouse"] > 0
    assert found["collapipe_host_sent_bytes_total", "greenhouse"] > 0
    assert found["collapipe_host_seconds_total", "greenhouse", "forward"] > 0
    assert found["collapipe_host_stream_failures_total", "greenhouse"] == 0
    assert found["collapipe_host_sessions",] == 0


def assert_logged(text: str, run_id: str) -> None:
    """Every daemon says of every round what it did, and for whom."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    ended = [line for line in lines if line["message"].startswith("a stream of ")]
    about = {(line["device"], line["run"], line["round"], line["cluster"]) for line in ended}
    names = (*NAMES, "edge")
    assert about == {(name, run_id, number, "greenhouse") for name in names for number in (1, 2)}
