"""`collapipe supernode` is Flower's SuperNode with shorter waits, as long as Flower has them."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.client import client_process, supernode
from collapipe_flwr.federation.client.supernode import Waits, shorten_waits
from collapipe_flwr.transport.certificates import Authority

LOOP = "flwr.supernode.start_client_internal"


class Clock:
    """Time passes in sleep alone."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def waits(clock: Clock) -> Waits:
    return Waits(lambda: clock.now_s, clock.sleep)


def test_a_reply_is_looked_for_soon() -> None:
    clock = Clock()
    waits(clock).sleep(0.5)
    assert clock.slept_s == [0.1]


def test_waits_for_a_message_grow_to_flower_s_in_a_minute() -> None:
    clock = Clock()
    loop = waits(clock)
    while clock.now_s < 90.0:
        loop.sleep(3.0)
    assert clock.slept_s == sorted(clock.slept_s)
    assert clock.slept_s[:15] == pytest.approx([0.25] * 15)
    assert clock.slept_s[-1] == 3.0
    assert len(clock.slept_s) < 100
    before_s = clock.now_s
    loop.sleep(0.5)  # a message has come, its reply is waited for
    loop.sleep(3.0)
    assert clock.now_s - before_s == pytest.approx(0.1 + 0.25)


def test_a_shorter_wait_than_ours_stays() -> None:
    clock = Clock()
    waits(clock).sleep(0.01)
    assert clock.slept_s == [0.01]


def test_flower_s_loop_still_waits_as_we_think(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = importlib.import_module(LOOP)
    waited = re.findall(r"\btime\.sleep\(([\d.]+)\)", inspect.getsource(loop))
    assert sorted(map(float, waited)) == [0.5, 0.5, 3.0]
    monkeypatch.setattr(loop, "time", time)  # and back again
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.7")  # what the user set stays
    shorten_waits()
    assert isinstance(loop.time, Waits)
    assert loop.time.time() == pytest.approx(time.time(), abs=60.0)
    assert supernode.os.environ["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] == "0.7"


def test_a_loop_that_is_written_another_way_keeps_its_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)  # Flower ends it there
    loop = importlib.import_module(LOOP)
    monkeypatch.delattr(loop, "time")
    shorten_waits()
    assert not hasattr(loop, "time")
    assert "keeps its own waits" in caplog.text


def test_arguments_are_flower_s() -> None:
    command = [sys.executable, "-m", "collapipe_flwr.cli", "supernode", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "usage: collapipe supernode" in done.stdout
    assert "--superlink" in done.stdout and "--node-config" in done.stdout


def test_a_taken_port_is_one_sentence_without_a_traceback() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = ["--superlink", "127.0.0.1:1", "--port", str(taken.getsockname()[1])]
        command = [sys.executable, "-m", "collapipe_flwr.cli", "supernode", "--insecure", *place]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert said.startswith("Error: the SuperNode cannot listen") and "choose another port" in said


@pytest.mark.parametrize(("code", "told"), [(1, True), (0, False), (2, False)])
def test_a_supernode_that_fails_names_the_clock(
    code: int, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise SystemExit(code)

    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", fails)
    monkeypatch.setattr(supernode, "shorten_waits", lambda: None)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(client_process, "offer_fast_program", nullcontext)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with pytest.raises(SystemExit), caplog.at_level(logging.ERROR):
        supernode.run(["--insecure"])
    assert ("this machine's clock says" in caplog.text) == told


@pytest.mark.parametrize("days", [-5000, 5000])
def test_a_ca_that_is_out_of_date_is_refused_before_flower_is_asked(
    days: int, tmp_path: Path
) -> None:
    Authority(tmp_path, days=10)
    words, now = ["--root-certificates", str(tmp_path / "ca.pem")], datetime.now(UTC)
    supernode.check_root(words, now)
    supernode.check_root(["--insecure"], now)
    with pytest.raises(ConfigError, match=r"ca\.pem .* this machine's clock says"):
        supernode.check_root(words, now + timedelta(days=days))
