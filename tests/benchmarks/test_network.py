"""Shaped links are as slow as asked, made by root or by a user of a kernel that allows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.data_plane.network import NetworkError, user_rights
from tests.core.process_trees import background, children_of, ended, python, watched

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SIZE, RATE_BYTES_PER_S = 400_000, 1e6
RECEIVE = """
import socket, sys, time
with socket.create_server(("", 4000)) as server:
    print("up", flush=True)
    with server.accept()[0] as peer:
        start_s, size = time.monotonic(), 0
        while data := peer.recv(65536):
            size += len(data)
    print(size, time.monotonic() - start_s, flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 4000), timeout=60) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
"""
MEASURE = f"""
import json, re, subprocess, sys
from benchmarks.data_plane.network import shaped
RECEIVE, SEND, SIZE = {RECEIVE!r}, {SEND!r}, {SIZE}
with shaped([{RATE_BYTES_PER_S}] * 2, float(sys.argv[1])) as network:
    command = (*network.command(1), sys.executable, "-c", RECEIVE)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        receiver.stdout.readline()
        send = (*network.command(0), sys.executable, "-c", SEND, network.host(1), str(SIZE))
        subprocess.run(send, check=True, timeout=60)
        size, seconds = receiver.stdout.readline().split()
    count = (*network.command(0), "tc", "-s", "qdisc", "show", "dev", "eth0")
    told = subprocess.run(count, check=True, capture_output=True, text=True).stdout
    holes = re.findall(r"blackhole.*?dropped (\\d+)", told, re.DOTALL)
    print(json.dumps([network.rights.kind, int(size), float(seconds), sum(map(int, holes))]))
"""

HOLD = f"""
import signal
from benchmarks.data_plane.network import shaped
with shaped([{RATE_BYTES_PER_S}] * 2) as network:
    print(network.rights.kind, flush=True)
    signal.pause()
"""


def _as_user(*command: str) -> subprocess.CompletedProcess[str]:
    """Run as somebody without rights, whoever runs the tests."""
    if os.geteuid() == 0:
        user = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
        command = (*user, *command)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, cwd="/", check=False
    )


def _interpreter() -> str | None:
    """A Python that somebody without rights may run, and that finds this checkout."""
    asks = ("sh", "-c", '"$0" -c "import benchmarks.data_plane.network"')
    found = (sys.executable, "/usr/bin/python3")
    return next((each for each in found if not _as_user(*asks, each).returncode), None)


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_a_user_without_rights_gets_links_as_bad_as_asked(loss: float) -> None:
    if not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter", "setpriv"))):
        pytest.skip("iproute2 or util-linux is missing")
    if _as_user("unshare", "--user", "--map-root-user", "--net", "true").returncode:
        pytest.skip("this kernel lets no user make namespaces")
    if (interpreter := _interpreter()) is None:
        pytest.skip("somebody without rights cannot read this checkout")
    result = _as_user(interpreter, "-c", MEASURE, str(loss))
    assert result.returncode == 0, result.stderr
    kind, size, seconds, lost = json.loads(result.stdout)
    assert kind == "network namespaces in a user namespace" and size == SIZE
    assert SIZE / seconds < 1.3 * RATE_BYTES_PER_S
    assert (lost > 0) == (loss > 0) and lost < 0.2 * SIZE / 1000  # of packets of 1.5 kB at most


def test_nothing_is_left_of_shaped_links_when_the_bench_is_killed() -> None:
    with background(python(HOLD)) as bench:
        assert bench.stdout is not None
        if not bench.stdout.readline():
            pytest.skip("this kernel lets nobody here make namespaces")
        with watched(children_of(bench)) as holders:
            bench.kill()
            assert ended(holders)
    named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert f"cpbench{bench.pid}" not in named.stdout


def test_a_kernel_that_forbids_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "unshare"
    fake.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(NetworkError, match="not permitted"), user_rights():
        pass
