"""What `collapipe run` and `bench demo` start ends with them, also when they are killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.core.process_trees import DEADLINE_S, ENDINGS, ROOT, background, ended, watched

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="waits on pidfds")
# In the midst of a run: a child in a session of its own, as the simulation is.
SUPERLINK = """
import http.server, os, subprocess, sys
child = [sys.executable, "-c", "import time; time.sleep(1000)"]
away = subprocess.Popen(child, start_new_session=True)
with open(os.environ["FLWR_HOME"] + "/pids", "w") as file:
    print(os.getpid(), away.pid, file=file)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""
FLWR = """
import os, signal
with open(os.environ["FLWR_HOME"] + "/pids") as file, open(os.environ["PIDS"], "w") as pipe:
    print(os.getpid(), file.read(), file=pipe)
signal.pause()
"""


# As Flower logs a ServerApp that raised; with --stream it ends in good order all the same.
REFUSING = r"""
print("\x1b[92mINFO \x1b[0m:      Starting run")
print("\x1b[91mERROR \x1b[0m:     model.overrides: no setting d_modell")
print("\x1b[91mERROR \x1b[0m:     ServerApp raised an exception")
"""


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """Where a Python has a Flower beside it that is busy; it writes its process ids into a pipe."""
    return _beside_flower(tmp_path, FLWR)


def _beside_flower(tmp_path: Path, flwr: str) -> Mapping[str, str]:
    os.mkfifo(tmp_path / "pids")
    (tmp_path / "python").symlink_to(sys.executable)
    for name, code in {"flower-superlink": SUPERLINK, "flwr": flwr}.items():
        path = tmp_path / name
        path.write_text(f"#!{tmp_path}/python\n{code}")
        path.chmod(0o700)
    installed = f"{ROOT}{os.pathsep}{sysconfig.get_path('purelib')}"
    return {"PYTHONPATH": installed, "PIDS": str(tmp_path / "pids"), "TMPDIR": str(tmp_path)}


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        *((("run",), ending) for ending in ENDINGS),
        (("bench", "demo"), signal.SIGKILL),
        pytest.param(("bench", "demo"), signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(("bench", "demo"), signal.SIGINT, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value[-1],
)
def test_a_run_ends_with_its_command(
    tmp_path: Path, environment: Mapping[str, str], words: tuple[str, ...], ending: signal.Signals
) -> None:
    command = [f"{tmp_path}/python", "-m", "collapipe_flwr.cli", *words, str(ROOT)]
    more = ["--output-dir", str(tmp_path / "runs")] if words == ("run",) else []
    pipe = os.open(tmp_path / "pids", os.O_RDONLY | os.O_NONBLOCK)
    with background([*command, *more], environment) as run:
        assert select.select([pipe], [], [], DEADLINE_S)[0]
        with open(pipe, encoding="ascii") as file:
            pids = [int(word) for word in file.read().split()]
        with watched(pids) as processes:
            run.send_signal(ending)
            assert ended(processes)
            assert run.wait(60) == (-ending if ending == signal.SIGKILL else 128 + ending)
    if ending != signal.SIGKILL:
        assert not list(tmp_path.glob("collapipe-*"))  # its temporary folders


def test_a_run_that_flower_ends_in_good_order_without_a_result_exits_with_1_and_its_first_error(
    tmp_path: Path,
) -> None:
    env = {**os.environ, **_beside_flower(tmp_path, REFUSING)}
    command = [f"{tmp_path}/python", "-m", "collapipe_flwr.cli", "run", str(ROOT)]
    command += ["--output-dir", str(tmp_path / "runs")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    log = run_dir / "run.log"
    assert done.stderr == (
        "Error: the run failed: model.overrides: no setting d_modell (no round has a checkpoint "
        f"yet, so start it again; the whole log is {log})\n"
    )
    assert "Starting run" in log.read_text() and "Starting run" not in done.stdout
