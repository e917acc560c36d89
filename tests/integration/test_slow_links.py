"""A link that is slower than its cluster file lets planners think, with real daemons behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from client_app.app import app as client_app
from collapipe_flwr.config.schema import parse
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.scheduler.link_estimates import make_link_key
from server_app.app import run
from tests.cluster.daemon_processes import Daemon, running
from tests.integration.conftest import TINY, TINY_MODEL, events_of
from tests.testbed.proxies import proxies

SLOW_BIT_PER_S = 1_000_000
ROUNDS = 5
# A step takes this machine milliseconds, a near device of these figures 0.3 s and the slow link
# seconds: however busy the machine is, nothing but the link speaks against the far device.
CLUSTER = """
id = "greenhouse"
[control-unit]
kind = "raspberry-pi-5"
[[device]]
name = "near"
address = "{near}"
kind = "raspberry-pi-4"
speed-gflop-per-s = 0.05
[[device]]
name = "far"
address = "{far}"
kind = "jetson-orin-nano"
[edge]
address = "{edge}"
"""


def _run(path: Path, text: str, edge: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Events of a run over the daemons in a cluster file, and the scheduler's last state."""
    file = path / "greenhouse.toml"
    file.write_text(text)
    values = {
        **TINY,
        "clusters": 1,
        "num-server-rounds": ROUNDS,
        "world.channel": "static",
        "world.energy-share": 1000.0,  # time alone decides
        "scheduler.max-model-share": 1.0,
        "scheduler.policy": "dssda",
        "output-dir": str(path / "runs"),
        "edge.address": edge,
        "evaluation.every": ROUNDS,
        "model.overrides": TINY_MODEL.replace("d_model=16", "d_model=64"),
    }
    place = {"partition-id": 0, "num-partitions": 1, "cluster": str(file)}
    run(
        LocalGrid({1: client_app}, node_configs={1: place}, run_config=values),
        parse(values),
    )
    folder = path / "runs" / "run"
    events = events_of(folder)
    newest = max(folder.glob("**/state.json"), key=lambda found: found.parent.name)
    kept = json.loads(json.loads(newest.read_text())["memories"]["planner"])
    return events, kept["state"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slow_link_is_found_out_and_planned_around(tmp_path: Path) -> None:
    daemons = [Daemon("device", "--name", name) for name in ("near", "far")]
    with (
        running(*daemons, Daemon("edge")) as (near, far, edge),
        proxies(["far"], rate_bit_per_s=SLOW_BIT_PER_S) as network,
    ):
        places = {"near": near.address, "far": network.before(far.address), "edge": edge.address}
        events, state = _run(tmp_path, CLUSTER.format(**places), edge.address)
    used = [[s["device_id"] for s in event["plan"]["clusters"][0]["segments"]] for event in events]
    assert used[0] == ["greenhouse/far"] and used[-1] == ["greenhouse/near"]
    link = events[0]["links"][0]["forward"]
    assert 0.5 * SLOW_BIT_PER_S < link["bit_per_s"] < 1.3 * SLOW_BIT_PER_S
    belief = state["links"]["greenhouse"][
        make_link_key("greenhouse/control-unit", "greenhouse/far")
    ]
    assert belief["believed"] < -1.0
    slow_s = [
        event["wall_s"]
        for event, names in zip(events, used, strict=True)
        if "greenhouse/far" in names
    ]
    before_s, after_s = slow_s[-1], events[-1]["wall_s"]  # the first round has more to start
    print(f"a round took {before_s:.2f} s, and {after_s:.2f} s once the link was known")
    assert after_s < 0.7 * before_s
