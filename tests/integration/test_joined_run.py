"""From an installed package to the first trained round of three boards, as a user types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
MOST_COMMANDS, MOST_S = 6, 180.0
COLLAPIPE = Path(sys.executable).parent / "collapipe"


class Machine:
    """A shell on a machine of its own, as far as a folder goes; counts what is typed."""

    typed = 0

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.env |= {"COLLAPIPE_FOLDER": str(folder), "PYTHONUNBUFFERED": "1"}

    def type(self, *words: str) -> subprocess.Popen[str]:
        Machine.typed += 1
        return subprocess.Popen(
            [str(COLLAPIPE), *words], cwd=ROOT, env=self.env, stdout=subprocess.PIPE, text=True
        )

    def run(self, *words: str) -> str:
        with self.type(*words) as process:
            said, _ = process.communicate(timeout=MOST_S)
        assert process.returncode == 0, said
        return said

    @contextmanager
    def stays(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        process = self.type(*words)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)
            process.stdout.close()


def said(process: subprocess.Popen[str], words: str) -> None:
    """Wait for a line with these words; a daemon that hangs is ended, and so is the wait."""
    with ended_after(process, MOST_S):
        assert any(words in line for line in process.stdout), f"it never said {words!r}"


@contextmanager
def ended_after(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_three_boards_train_after_six_commands_and_three_minutes(tmp_path: Path) -> None:
    """And a fourth one joins the cluster that runs by two, and another is removed by one."""
    Machine.typed = 0
    start_s = time.monotonic()
    unit = Machine(tmp_path / "unit")
    boards = [Machine(tmp_path / f"board-{n}") for n in range(4)]
    port, edge = free_port(), free_port()
    places = ["--address", f"127.0.0.1:{port}", "--edge-address", f"127.0.0.1:{edge}"]
    token = re.search(r"collapipe join (\S+)", unit.run("cluster", "init", "shed", *places))[1]

    def joins(number: int, by: str):
        where = f"127.0.0.1:{free_port()}"
        return boards[number].stays("join", by, "--name", f"board-{number}", "--address", where)

    with unit.stays("cluster", "serve") as serving:
        said(serving, "are let in at")
        with joins(0, token) as a, joins(1, token) as b, joins(2, token) as c:
            for number, process in enumerate((a, b, c)):
                said(process, f"board-{number} on ")
            run = ["run", ".", "--cluster", str(tmp_path / "unit" / "shed.toml"), "--quiet"]
            run += ["-c", "num-server-rounds=1", "--output-dir"]
            (folder,) = unit.run(*run, str(tmp_path / "runs")).split()
            took_s = time.monotonic() - start_s
            print(f"{Machine.typed} commands, {took_s:.0f} s")
            assert trained_on(Path(folder)) <= {f"shed/board-{n}" for n in range(3)}
            assert Machine.typed <= MOST_COMMANDS and took_s <= MOST_S

            again = re.search(r"collapipe join (\S+)", unit.run("cluster", "token"))[1]
            with joins(3, again) as d:
                said(d, "board-3 on ")
                unit.run("cluster", "remove", "board-0")
                assert a.wait(60) == 0
                status = unit.type("cluster", "status", "--json")
                found = json.loads(status.communicate(timeout=60)[0])
                states = {m["name"]: m["state"] for m in found["members"]}
                assert states == dict.fromkeys(("board-1", "board-2", "board-3", "edge"), "ready")
                (folder,) = unit.run(*run, str(tmp_path / "more")).split()
                assert trained_on(Path(folder)) <= {f"shed/board-{n}" for n in (1, 2, 3)}


def trained_on(folder: Path) -> set[str]:
    """The devices of the last round."""
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert not last["failures"]
    return {s["device_id"] for s in last["plan"]["clusters"][0]["segments"]}
