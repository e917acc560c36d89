"""What tests start as forks behaves as a process of its own, and ends with who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.core.process_trees import background, ended, python, told, watched
from tests.forked import Forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets and pidfds")
OWNER = """
import os, signal
from tests.forked import Forked
fork = Forked("tests.host.edge_process", env=os.environ)  # which ends when this goes
print(fork.pid, flush=True)
signal.pause()
"""


def test_a_fork_has_its_own_words_streams_and_exit_code() -> None:
    fork = Forked("json.tool", "--indent", "1", env=os.environ, talks=True)
    assert fork.stdin is not None
    fork.stdin.write(b"[7]")
    fork.stdin.close()
    with fork.stdout as told_back:
        assert told_back.read() == b"[\n 7\n]\n"
    assert fork.wait(60) == 0 == fork.poll()


def test_a_fork_is_running_until_it_is_killed() -> None:
    fork = Forked("tests.host.edge_process", env=os.environ)
    with fork.stdout as said:
        assert said.readline().startswith("127.0.0.1:")
        assert fork.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            fork.wait(0.01)
        fork.kill()
        assert fork.wait(60) == -signal.SIGKILL
        fork.kill()  # of what has ended is nothing


def test_a_fork_ends_with_who_started_it() -> None:
    with background(python(OWNER)) as owner, watched(told(owner)) as forks:
        owner.kill()
        assert ended(forks)
