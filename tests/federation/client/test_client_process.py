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

from collapipe_flwr.federation.client import client_process

SOCKET = "fork"
END_S = 60.0
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux alone")
NOWHERE = ("--runtime-api-address", "127.0.0.1:1", "--token", "x", "--insecure")
# What answers in place of Flower's program.
ECHO = """
import os, random, signal, sys, threading, time
import numpy
from collapipe_flwr.federation.client.client_process import _fork, _run

def stop(number, frame):
    signal.signal(number, signal.SIG_DFL)
    time.sleep(1.0)
    os.write(1, b"in good order\\n")  # the program may be in the midst of printing
    sys.exit(3)

def program():
    if sys.argv[1] == "stops":
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        while True:  # a signal that comes just before it waits does not end a wait
            threading.Event().wait(0.1)
    if sys.argv[1] == "waits":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may come ignored
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
    with client_process.offer_fast_program():
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
    with client_process.offer_fast_program():
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
    code = "import os, time\nfrom collapipe_flwr.federation.client import client_process\n"
    code += "with client_process.offer_fast_program():\n"
    code += " print(os.environ['PATH'].partition(os.pathsep)[0], flush=True)\n"
    command = [sys.executable, "-c", code + " time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        folder = Path(node.stdout.readline().strip())
        until((folder / SOCKET).exists, "nothing forks")
        server = serving(folder)
        node.kill()
    until(lambda: not folder.exists(), f"{folder} is left")
    until(lambda: not Path(f"/proc/{server}").exists(), "what forks is left")


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Path]:
    """A program whose forks are ECHO's; their folder goes when what forks ends."""
    folder = tmp_path / "forks"
    folder.mkdir()
    program = folder / "program"
    program.write_text(client_process.build_script(folder / SOCKET))
    program.chmod(0o700)
    command = [sys.executable, "-c", ECHO, str(folder / SOCKET)]
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        ready(program)
        yield program
    assert not folder.exists()


@LINUX
def test_flower_s_threads_can_end_a_fork_that_waits(echo: Path) -> None:
    done = subprocess.run(
        [str(echo), "waits"], capture_output=True, text=True, timeout=END_S, check=False
    )
    assert "KeyboardInterrupt" in done.stderr and done.returncode == 1


@LINUX
@pytest.mark.parametrize("everyone", [False, True])
def test_a_fork_ends_in_good_order_when_its_program_or_everyone_is_stopped(
    echo: Path, *, everyone: bool
) -> None:
    server = serving(echo.parent)
    with subprocess.Popen([str(echo), "stops"], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        (fork,) = children(server)
        for pid in (server, fork) if everyone else ():
            os.kill(pid, signal.SIGTERM)
        program.send_signal(signal.SIGTERM)
        assert program.stdout.read() == "in good order\n"
    assert Path(f"/proc/{server}").exists()  # it goes with its stdin


@LINUX
def test_a_program_without_stdin_ends(echo: Path) -> None:
    command = ["sh", "-c", f"exec 0<&-; exec {echo} 4"]
    done = subprocess.run(
        command, capture_output=True, timeout=END_S, check=False, env={"SAID": "so"}
    )
    assert done.returncode == 4


@LINUX
def test_where_what_forks_has_died_the_program_is_flower_s(offered: Path) -> None:
    ready(offered)
    os.kill(serving(offered.parent), signal.SIGKILL)
    done = subprocess.run([str(offered), "--help"], capture_output=True, text=True, check=True)
    assert "Run a Flower ClientApp" in done.stdout


@LINUX
def test_a_fork_has_the_program_s_place_and_chances_of_its_own(echo: Path, tmp_path: Path) -> None:
    chances = []
    for code in (0, 3):
        done = subprocess.run(
            [str(echo), str(code), "two words"],
            cwd=tmp_path,
            env={"SAID": "so"},
            input="all of it",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code
        assert done.stdout == f"{[str(code), 'two words']} {tmp_path} so all of it\n"
        chances += done.stderr.split()
    assert len(set(chances)) == 4


def test_a_path_that_no_script_can_name_leaves_flower_s_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/home/a user/python")
    path = os.environ["PATH"]
    with client_process.offer_fast_program():
        assert os.environ["PATH"] == path
