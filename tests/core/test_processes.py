"""A program that is kept ends with whoever had it kept, and its children with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from collapipe_flwr.core import processes
from collapipe_flwr.core.processes import guard_command, open_lifeline
from tests.core.process_trees import ENDINGS, background, ended, python, told, watched

PROGRAM = """
import os, signal, subprocess, sys
child = [sys.executable, "-c", "import time; time.sleep(1000)"]
away = subprocess.Popen(child, start_new_session=True)
beside = subprocess.Popen(child)
print(os.getppid(), os.getpid(), away.pid, beside.pid, flush=True)
signal.pause()
"""
OWNER = """
import subprocess, sys
from collapipe_flwr.core.processes import guard_command
from collapipe_flwr.core.processes import exit_on_signals
command = guard_command([sys.executable, "-c", sys.argv[1]])
with exit_on_signals(), subprocess.Popen(command, stdin=subprocess.PIPE) as keeper:
    keeper.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="waits on pidfds")
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda sign: sign.name)
def test_a_program_and_its_children_end_with_their_owner(ending: signal.Signals) -> None:
    with background(python(OWNER, PROGRAM)) as owner, watched(told(owner)) as tree:
        owner.send_signal(ending)
        assert ended(tree)
        assert owner.wait(60) == (-ending if ending == signal.SIGKILL else 128 + ending)


@pytest.mark.skipif(sys.platform != "linux", reason="waits on pidfds")
def test_a_program_and_its_children_end_though_the_whole_group_of_its_owner_is_killed() -> None:
    alone = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "start_new_session": True}
    with (
        subprocess.Popen(python(OWNER, PROGRAM), text=True, **alone) as owner,
        watched(told(owner)) as tree,
    ):
        os.killpg(owner.pid, signal.SIGKILL)
        assert ended(tree)


@pytest.mark.skipif(sys.platform != "linux", reason="waits on pidfds")
def test_a_programs_children_end_where_there_is_no_ps() -> None:
    bare = f"import os\nos.environ['PATH'] = '/nowhere'\n{OWNER}"
    with background(python(bare, PROGRAM)) as owner, watched(told(owner)) as tree:
        owner.send_signal(signal.SIGTERM)
        assert ended(tree)


def test_a_system_that_lists_no_processes_leaves_the_programs_own_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert processes._find_groups_below(os.getpid()) == set()


@pytest.mark.parametrize(("code", "status"), [("exit 3", 3), ("kill -9 $$", 128 + 9)])
def test_a_program_that_ends_gives_its_status(code: str, status: int) -> None:
    with open_lifeline() as stdin:
        done = subprocess.run(
            guard_command(["sh", "-c", code]), stdin=stdin, timeout=60, check=False
        )
    assert done.returncode == status


def test_a_program_reads_nothing_of_its_keepers_stdin() -> None:
    with open_lifeline() as stdin:
        done = subprocess.run(
            guard_command(["cat"]), stdin=stdin, capture_output=True, timeout=60, check=True
        )
    assert done.stdout == b""


@pytest.mark.parametrize(
    "strike",
    [
        "with stop._cond: signal.raise_signal(signal.SIGTERM)",  # as within `wait`
        "threading.Timer(1, lambda: signal.pthread_kill(threading.get_ident(), 15)).start()",
    ],
    ids=["while it holds the event", "while another thread runs"],
)
def test_a_signal_ends_a_wait_whatever_the_main_thread_is_at(strike: str) -> None:
    script = (
        "import signal, threading\n"
        "from collapipe_flwr.core.processes import stop_on_signals\n"
        "with stop_on_signals() as stop:\n"
        f"    {strike}\n"
        "    assert stop.wait(60)\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=120, check=True)


def test_a_signal_before_it_can_be_heard_ends_the_process() -> None:
    """It is not lost: a program whose stdin ended at once would wait for ever."""
    script = (
        "import signal\n"
        "from collapipe_flwr.core.processes import stop_on_signals\n"
        "hear = signal.set_wakeup_fd\n"
        "def early(number):\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    return hear(number)\n"
        "signal.set_wakeup_fd = early\n"
        "with stop_on_signals() as stop:\n"
        "    stop.wait(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=50, check=False)
    assert ended.returncode == -15


def test_a_signal_that_another_thread_gets_ends_what_the_main_thread_waits_for() -> None:
    script = (
        "import signal, threading\n"
        "from collapipe_flwr.core.processes import exit_on_signals\n"
        "with exit_on_signals(lambda: 'stopping'):\n"
        "    threading.Timer(1, lambda: signal.pthread_kill(threading.get_ident(), 15)).start()\n"
        "    threading.Event().wait(60)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], timeout=120, check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (128 + 15, "stopping\n")
