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
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cpu_time import cpu_s, is_busy
from tests.integration.conftest import events_of
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
MOST_COMMANDS, MOST_S = 6, 180.0
COLLAPIPE = Path(sys.executable).parent / "collapipe"


class Machine:
    """A shell on a machine of its own, as far as a folder goes; notes what is typed."""

    typed: list[str] = []  # noqa: RUF012  (on all of them)

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.env |= {"COLLAPIPE_FOLDER": str(folder), "PYTHONUNBUFFERED": "1"}

    def type(self, *words: str) -> subprocess.Popen[str]:
        Machine.typed.append(" ".join(words))
        return subprocess.Popen(
            [str(COLLAPIPE), *words], cwd=ROOT, env=self.env, stdout=subprocess.PIPE, text=True
        )

    def run(self, *words: str) -> str:
        """Patiently: a machine may be busy."""
        with self.type(*words) as process:
            said, _ = process.communicate(timeout=3 * MOST_S)
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


@pytest.fixture
def unit(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "unit")


@pytest.fixture
def boards(tmp_path: Path) -> list[Machine]:
    return [Machine(tmp_path / f"board-{n}") for n in range(3)]


def init(unit: Machine, *more: str) -> str:
    """Make a cluster on free ports; what it prints, the token of boards first."""
    places = ["--address", f"127.0.0.1:{free_port()}"]
    places += ["--edge-address", f"127.0.0.1:{free_port()}"]
    return unit.run("cluster", "init", "shed", *places, *more)


def token_in(printed: str) -> str:
    found = re.search(r"collapipe join (\S+)", printed)
    assert found is not None, printed
    return found[1]


def joining(number: int, token: str) -> list[str]:
    where = f"127.0.0.1:{free_port()}"
    return ["join", token, "--name", f"board-{number}", "--address", where]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_boards_train_after_six_commands_and_three_minutes(
    tmp_path: Path, unit: Machine, boards: list[Machine]
) -> None:
    """Three minutes of a machine that does nothing else; on a busy one, of one core's time."""
    Machine.typed.clear()
    busy, ours = is_busy(), f"COLLAPIPE_FOLDER={tmp_path}"
    start_s, before_s = time.monotonic(), cpu_s(ours)
    token = token_in(init(unit))
    with unit.stays("cluster", "serve") as serving, ExitStack() as stack:
        said(serving, "are let in at")
        running = [
            stack.enter_context(board.stays(*joining(number, token)))
            for number, board in enumerate(boards)
        ]
        for number, process in enumerate(running):
            said(process, f"board-{number} on ")
        folder = train(unit, tmp_path / "unit" / "shed.toml", tmp_path / "runs")
        took_s, used_s = time.monotonic() - start_s, cpu_s(ours) - before_s
    print(f"{len(Machine.typed)} commands, {took_s:.0f} s, {used_s:.0f} s of a core")
    assert trained_on(folder) <= {f"shed/board-{n}" for n in range(3)}
    assert len(Machine.typed) <= MOST_COMMANDS and used_s <= MOST_S
    assert list(dict.fromkeys(map(verbs, Machine.typed))) == documented()
    assert busy or took_s <= MOST_S


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_that_runs_takes_up_one_board_and_lets_go_of_another(
    tmp_path: Path, unit: Machine, boards: list[Machine]
) -> None:
    """By one command on the board and one on the control unit; nothing is started again."""
    token = token_in(init(unit))
    with unit.stays("cluster", "serve") as serving:
        said(serving, "are let in at")
        killed = boards[0].type(*joining(0, token))
        key = tmp_path / "board-0" / "certs" / "board-0.key"
        while not key.exists():
            assert killed.poll() is None
            time.sleep(0.01)
        killed.kill()
        killed.communicate()
        with (
            boards[0].stays(*joining(0, token)) as first,
            boards[1].stays(*joining(1, token)) as second,
        ):
            said(first, "board-0 on ")
            said(second, "board-1 on ")
            again = token_in(unit.run("cluster", "token"))
            with boards[2].stays(*joining(2, again)) as third:
                said(third, "board-2 on ")
                unit.run("cluster", "remove", "board-0")
                assert first.wait(MOST_S) == 0
                assert states(unit) == dict.fromkeys(("board-1", "board-2", "edge"), "ready")
            refused = boards[0].type(*joining(0, token))
            said_last = refused.communicate(timeout=MOST_S)
            assert refused.returncode == 1, said_last
    status = unit.type("cluster", "status", "--json")
    assert '"away"' in status.communicate(timeout=MOST_S)[0] and status.returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_control_unit_elsewhere_joins_trains_hears_of_a_board_and_is_revoked(
    tmp_path: Path, unit: Machine, boards: list[Machine]
) -> None:
    """The CA's machine runs no part of a run but the edge; nothing is started again."""
    keeper = Machine(tmp_path / "keeper")
    printed = init(keeper, "--elsewhere", "control-unit")
    first, own = token_in(printed), token_in(printed.partition("control unit's")[2])
    file = tmp_path / "unit" / "shed.toml"
    with keeper.stays("cluster", "serve") as serving:
        said(serving, "are let in at")
        with (
            unit.stays("join", own, "--address", f"127.0.0.1:{free_port()}") as following,
            boards[0].stays(*joining(0, first)) as zero,
        ):
            said(following, "is kept up to date")
            said(zero, "board-0 on ")
            with boards[1].stays(*joining(1, first)) as one:
                said(one, "board-1 on ")
                everybody = ("board-0", "board-1", "edge", "cu-shed")
                assert states(keeper) == dict.fromkeys(everybody, "ready")
                assert '"board-1"' in file.read_text()
                folder = train(unit, file, tmp_path / "runs")
                assert trained_on(folder) <= {"shed/board-0", "shed/board-1"}
                keeper.run("cluster", "remove", "cu-shed")
                assert following.wait(MOST_S) == 0
                refused = unit.type("cluster", "check", str(file))
                words, _ = refused.communicate(timeout=MOST_S)
                assert refused.returncode == 1
                assert "that this member joined with" in " ".join(words.split()), words
    held = {path.name for path in (tmp_path / "keeper").rglob("*.key")}
    assert "cu-shed.key" not in held and "edge.key" in held


def verbs(command: str) -> str:
    """What a command does, without places and names."""
    found = re.match(r"cluster \w+|join|run \. --cluster", command)
    assert found is not None, command
    return found[0]


def documented() -> list[str]:
    """What the page on boards has one type."""
    page = (ROOT / "docs/tutorials/boards.md").read_text()
    page = page.partition("\n## Join by a token")[2].partition("\n## ")[0]
    return [verbs(line) for line in re.findall(r"^collapipe (.*)$", page, re.MULTILINE)]


def train(unit: Machine, file: Path, runs: Path) -> Path:
    """One round; the folder of its results."""
    run = ["run", ".", "--cluster", str(file), "--quiet", "--output-dir", str(runs)]
    run += ["-c", "num-server-rounds=1", "-c", "train.examples-per-round=96"]
    (folder,) = unit.run(*run).split()
    return Path(folder)


def states(unit: Machine) -> dict[str, str]:
    """Of all members, once they have the newest roster."""
    until_s = time.monotonic() + MOST_S
    while time.monotonic() < until_s:
        asked = unit.type("cluster", "status", "--json")
        found = json.loads(asked.communicate(timeout=MOST_S)[0])
        if all(member["roster"] == found["version"] for member in found["members"]):
            return {member["name"]: member["state"] for member in found["members"]}
    raise AssertionError(f"some are behind: {found}")


def trained_on(folder: Path) -> set[str]:
    """The devices of the last round."""
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    last = events_of(folder)[-1]
    assert not last["failures"]
    return {s["device_id"] for s in last["plan"]["clusters"][0]["segments"]}
