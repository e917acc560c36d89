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
def test_a_run_on_daemons_is_planned_measured_and_completed(tmp_path: Path) -> None:
    members = sign_all(
        tmp_path / "certs", dict.fromkeys((*NAMES, "control-unit", "edge", "server"), ())
    )
    allow = ("--allow", "control-unit", "--allow", "pi-1", "--allow", "pi-2", "--allow", "server")
    daemons = [Daemon("device", "--name", n, *allow, tls=members[n]) for n in NAMES]
    with running(*daemons, Daemon("edge", *allow, tls=members["edge"])) as (*devices, edge):
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
