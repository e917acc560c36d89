"""ClientApps are forks of a process that has imported what they need, or start by themselves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from collapipe_flwr.federation import client_process
from collapipe_flwr.federation.client_program import SOCKET

END_S = 60.0
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux alone")
NOWHERE = ("--runtime-api-address", "127.0.0.1:1", "--token", "x", "--insecure")
# What answers in place of Flower's program.
ECHO = """
import os, random, signal, sys, threading
import numpy
from collapipe_flwr.federation.client_process import _fork, _run

def program():
    if sys.argv[1] == "waits":
        threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
        threading.Event().wait()
    print(sys.argv[1:], os.getcwd(), os.environ["SAID"], sys.stdin.read(), flush=True)
    print(random.random(), numpy.random.random(), file=sys.stderr, flush=True)
    sys.exit(int(sys.argv[1]))

numpy.random.seed(1), random.seed(1)
peer = _fork(sys.argv[1])
if peer is not None:
    _run(program, peer)
"""


def until(true: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + END_S
    while not true():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


def serving(folder: Path) -> int:
    """The process that forks at the socket in ``folder``."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if command.read_bytes().endswith(os.fsencode(folder / SOCKET) + b"\0"):
                return int(command.parent.name)
    raise AssertionError(f"nothing forks at {folder}")


def children(pid: int) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(stat[1]) == pid and stat[0] != "Z":
            found.add(int(folder.name))
    return found


@pytest.fixture
def offered() -> Iterator[Path]:
    with client_process.offered():
        program = shutil.which("flwr-clientapp")
        assert program is not None and program.startswith(tempfile.gettempdir())
        yield Path(program)


def ready(program: Path) -> None:
    until((program.parent / SOCKET).exists, "nothing forks")


def test_the_program_is_flower_s_with_and_without_what_forks_it(offered: Path) -> None:
    command = [str(offered), "--help"]
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    if sys.platform == "linux":
        ready(offered)
    forked = subprocess.run(command, capture_output=True, text=True, check=True)
    for done in (alone, forked):
        assert "Run a Flower ClientApp" in done.stdout and "--runtime-api-address" in done.stdout
    wrong = subprocess.run([str(offered)], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "--token" in wrong.stderr


def test_the_environment_is_left_as_it_was() -> None:
    path = os.environ["PATH"]
    with client_process.offered():
        folder = Path(os.environ["PATH"].partition(os.pathsep)[0])
        assert (folder / "flwr-clientapp").exists()
    assert os.environ["PATH"] == path and not folder.exists()


def test_it_imports_neither_other_programs_nor_a_package_that_an_app_brings() -> None:
    code = "import runpy, sys\nsys.argv = ['flwr-clientapp', '--help']\ntry:\n runpy.run_path("
    code += f"{client_process.__file__!r}, run_name='__main__')\nexcept SystemExit:\n pass\n"
    code += "unused = {'uvicorn', 'sqlalchemy', 'alembic', 'torch', 'collapipe_flwr'}\n"
    code += "print(sorted(unused & set(sys.modules)))"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


@LINUX
def test_a_fork_ends_with_its_program(offered: Path) -> None:
    ready(offered)
    server = serving(offered.parent)
    program = subprocess.Popen([str(offered), *NOWHERE], stderr=subprocess.PIPE)
    until(lambda: children(server), "no fork")
    assert program.stderr is not None
    until(lambda: b"Connection attempt failed" in program.stderr.readline(), "it does not work")
    program.send_signal(signal.SIGKILL)
    program.communicate()
    until(lambda: not children(server), "the fork goes on")


@LINUX
def test_nothing_is_left_of_a_supernode_that_was_killed() -> None:
    code = "import os, time\nfrom collapipe_flwr.federation.client_process import offered\n"
    code += "with offered():\n print(os.environ['PATH'].partition(os.pathsep)[0], flush=True)\n"
    command = [sys.executable, "-c", code + " time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        folder = Path(node.stdout.readline().strip())
        until((folder / SOCKET).exists, "nothing forks")
        server = serving(folder)
        node.kill()
    until(lambda: not folder.exists(), f"{folder} is left")
    until(lambda: not Path(f"/proc/{server}").exists(), "what forks is left")


@LINUX
def test_flower_s_threads_can_end_a_fork_that_waits(tmp_path: Path) -> None:
    program = shutil.copy(Path(client_process.__file__).with_name("client_program.py"), tmp_path)
    command = [sys.executable, "-c", ECHO, str(tmp_path / SOCKET)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        until((tmp_path / SOCKET).exists, "nothing forks")
        waits = [sys.executable, "-IS", str(program), "waits"]
        done = subprocess.run(waits, capture_output=True, text=True, timeout=END_S, check=False)
        assert "KeyboardInterrupt" in done.stderr and done.returncode == 1
        assert server.stdin is not None
        server.stdin.close()


@LINUX
def test_a_fork_has_the_program_s_place_and_chances_of_its_own(tmp_path: Path) -> None:
    program = shutil.copy(Path(client_process.__file__).with_name("client_program.py"), tmp_path)
    place = tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-c", ECHO, str(tmp_path / SOCKET)]
    chances = []
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        until((tmp_path / SOCKET).exists, "nothing forks")
        for code in (0, 3):
            done = subprocess.run(
                [sys.executable, "-IS", str(program), str(code), "two words"],
                cwd=place,
                env={"SAID": "so"},
                input="all of it",
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == code
            assert done.stdout == f"{[str(code), 'two words']} {place} so all of it\n"
            chances += done.stderr.split()
        assert server.stdin is not None
        server.stdin.close()
    assert len(set(chances)) == 4
    assert not tmp_path.exists()  # it takes its folder along


def test_a_path_that_no_script_can_name_leaves_flower_s_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/home/a user/python")
    path = os.environ["PATH"]
    with client_process.offered():
        assert os.environ["PATH"] == path
