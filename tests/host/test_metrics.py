"""What daemons tell a Prometheus server, and what they write to their logs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import LinkTraffic
from collapipe_flwr.core.measurements import StageMeasurement
from collapipe_flwr.host.metrics import (
    MOST_CLUSTERS,
    OTHERS,
    HostMetrics,
    MetricsServer,
    Tally,
    parse_address,
)
from collapipe_flwr.transport.client import HostClient
from tests.cluster.daemon_processes import ROOT, first_line
from tests.host.chain_to_edge import request, session_key
from tests.host.scraping import listening_ports, scrape

pytest.importorskip("prometheus_client")
REPORT = StageMeasurement(
    name="attic/pi-1",
    steps=3,
    micro_batches=12,
    forward_s=1.5,
    energy_j=4.0,
    sent_up=LinkTraffic(bytes=10),
    sent_down=LinkTraffic(bytes=5),
)


def test_counters_add_up_by_cluster_and_a_failed_stream_counts_as_one() -> None:
    tally = Tally()
    asked = request(name="attic/pi-1", server_round=7)
    tally.count(asked, REPORT)
    tally.count(asked, REPORT)
    tally.fail(asked)
    server = MetricsServer("0", HostMetrics("pi-1", lambda: None, tally))
    try:
        found = scrape(server.address)
    finally:
        server.close()
    assert found["collapipe_host_info", "pi-1"] == 1
    assert found["collapipe_host_steps_total", "attic"] == 6
    assert found["collapipe_host_seconds_total", "attic", "forward"] == 3.0
    assert found["collapipe_host_energy_joules_total", "attic"] == 8.0
    assert found["collapipe_host_sent_bytes_total", "attic"] == 30
    assert found["collapipe_host_streams_total", "attic"] == 3
    assert found["collapipe_host_stream_failures_total", "attic"] == 1
    assert found["collapipe_host_round", "attic"] == 7
    assert found["process_resident_memory_bytes",] > 0


def test_names_that_peers_make_up_do_not_grow_the_answer_without_bound() -> None:
    tally = Tally()
    for number in range(10 * MOST_CLUSTERS):
        tally.count(request(cluster_id=f"made-up-{number}" + "x" * 500), REPORT)
    found = tally.copy_counts()
    assert len(found) == MOST_CLUSTERS + 1
    assert found[OTHERS].counts["steps"] == 9 * MOST_CLUSTERS * REPORT.steps
    assert max(map(len, found)) <= 80


@pytest.mark.parametrize("name", ["\ud800", 'a"\n} 1', "\x1b[31m", "\u202e", "\0", "é 😀"])
def test_no_name_of_a_peer_ends_the_answers(name: str) -> None:
    tally = Tally()
    tally.count(request(cluster_id=name), REPORT)
    tally.count(request(cluster_id="attic"), REPORT)
    server = MetricsServer("0", HostMetrics("pi-1", lambda: None, tally))
    try:
        assert scrape(server.address)["collapipe_host_steps_total", "attic"] == 3
    finally:
        server.close()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_a_port_alone_is_on_loopback(text: str, place: tuple[str, int]) -> None:
    assert parse_address(text) == place


@pytest.mark.parametrize("text", ["", "here", "127.0.0.1:http", "127.0.0.1:65536"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must read like"):
        parse_address(text)


@contextmanager
def daemon(*arguments: str) -> Iterator[Any]:
    """A daemon; `address` is its own, `metrics` where it is scraped, `logs()` ends it."""
    command = [sys.executable, "-m", "collapipe_flwr.cli", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=env, **pipes)

    def logs() -> list[str]:
        process.send_signal(signal.SIGTERM)
        lines = process.communicate(timeout=120)[1].splitlines()
        assert process.returncode == 0
        return lines

    try:
        told = first_line(process)
        yield SimpleNamespace(address=told.rpartition(" ")[2], process=process, logs=logs)
    finally:
        process.kill()
        process.wait(60)
        for pipe in (process.stdout, process.stderr):
            pipe.close()


def test_a_device_tells_its_load_when_scraped_and_logs_what_it_does_as_json_lines() -> None:
    options = ("--name", "pi-1", "--metrics", "0", "--log-format", "json", "--grace-s", "0")
    with daemon("device", "--listen", "127.0.0.1:0", *options) as device:
        own = int(device.address.rpartition(":")[2])
        (port,) = listening_ports(device.process.pid) - {own}
        address = f"127.0.0.1:{port}"
        assert scrape(address)["collapipe_host_sessions",] == 0
        with HostClient(device.address, deadline_s=120) as client:
            placed = {"blocks": (0, 2), "run_id": "a-run", "server_round": 4}
            client.open_session(request(name="attic/pi-1", **placed))
            found = scrape(address)
            assert found["collapipe_host_sessions",] == 1
            assert found["collapipe_host_running",] == 0
            client.get_session(session_key()).close()
            assert scrape(address)["collapipe_host_sessions",] == 0
        lines = [json.loads(line) for line in device.logs()]
    assert lines[0]["level"] == "warning" and lines[0]["message"].startswith("plain text")
    opened, closed = (line for line in lines if "session" in line)
    assert opened["message"] == "session opened for blocks 0 to 1"
    assert closed["message"] == "session closed after 0 steps"
    for line in (opened, closed):
        about = {key: line[key] for key in ("level", "device", "run", "round", "cluster")}
        assert about == {
            "level": "info",
            "device": "pi-1",
            "run": "a-run",
            "round": 4,
            "cluster": "attic",
        }
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


def test_an_edge_without_metrics_listens_at_its_own_port_alone() -> None:
    with daemon("edge", "--listen", "127.0.0.1:0") as edge:
        assert listening_ports(edge.process.pid) <= {int(edge.address.rpartition(":")[2])}
        assert all(not line.startswith("{") for line in edge.logs())


def test_an_address_that_cannot_be_had_is_one_sentence() -> None:
    command = [sys.executable, "-m", "collapipe_flwr.cli", "device", "--listen", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, "--metrics", "192.0.2.1:9464"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert re.search(
        r"^Error: --metrics: nothing can listen at 192\.0\.2\.1:9464 ", done.stderr, re.M
    )
