"""What `collapipe run` and `bench demo` start ends with them, also when they are killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE

import pytest

from collapipe_flwr.reporting.run_data import RunStory
from collapipe_flwr.reporting.run_directory import RunDirectory, read_summary
from tests.core.process_trees import DEADLINE_S, ENDINGS, ROOT, background, ended, watched
from tests.thorough import few

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


# A ServerApp that has done a round and goes on with the next.
TRAINING = """
import os, signal, sys, tomllib
from pathlib import Path
from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.run_data import RunStory
from collapipe_flwr.reporting.run_directory import RunDirectory
config = tomllib.loads(Path(sys.argv[sys.argv.index("--run-config") + 1]).read_text())
directory = RunDirectory(Path(config["output-dir"], config["run-name"]))
directory.write_config({})
(directory.checkpoint_path / "round-000001").mkdir(parents=True)
event = RoundEvent(round_index=1, metrics={}, wall_s=0.1)
story = RunStory(metric_name="loss", energy_budget_j={}, rounds_asked=12)
story.add(event)
directory.append_event(event.as_json())
directory.write_summary(story.summary(status="running", wall_s=1.0))
signal.pause()
"""
FINISHED = RunStory(metric_name="loss", energy_budget_j={}, rounds_asked=12)
# The process that checks data, model and plan, see test_preflight.py, loads all libraries.
UNCHECKED = """
import os, sys
if "check-config" in sys.orig_argv:
    os._exit(0)
"""


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """Where a Python has a Flower beside it that is busy; it writes its process ids into a pipe."""
    return _beside_flower(tmp_path, FLWR)


def _beside_flower(tmp_path: Path, flwr: str) -> Mapping[str, str]:
    (tmp_path / "sitecustomize.py").write_text(UNCHECKED)
    os.mkfifo(tmp_path / "pids")
    (tmp_path / "python").symlink_to(sys.executable)
    for name, code in {"flower-superlink": SUPERLINK, "flwr": flwr}.items():
        path = tmp_path / name
        path.write_text(f"#!{tmp_path}/python\n{code}")
        path.chmod(0o700)
    installed = os.pathsep.join(map(str, (tmp_path, ROOT, sysconfig.get_path("purelib"))))
    return {"PYTHONPATH": installed, "PIDS": str(tmp_path / "pids"), "TMPDIR": str(tmp_path)}


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        (("run",), signal.SIGKILL),
        *few((("run",), ending) for ending in ENDINGS if ending != signal.SIGKILL),
        *few((("bench", "demo"), ending) for ending in ENDINGS),
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


@pytest.mark.parametrize("sign", few([signal.SIGINT, signal.SIGTERM], 1), ids=lambda s: s.name)
def test_a_signal_is_answered_at_once_and_leaves_a_run_that_says_it_was_stopped(
    tmp_path: Path, sign: signal.Signals
) -> None:
    environment = _beside_flower(tmp_path, TRAINING)
    command = [f"{tmp_path}/python", "-m", "collapipe_flwr.cli", "run", str(ROOT)]
    command += ["--output-dir", str(tmp_path / "runs")]
    env = {**os.environ, **environment}
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=env) as run:
        assert run.stdout is not None and run.stderr is not None
        assert any(line.startswith("round   1/12") for line in run.stdout)
        sent_s = time.monotonic()
        run.send_signal(sign)
        (run_dir,) = (tmp_path / "runs").iterdir()
        told = run.stderr.readline()
        assert run.wait(DEADLINE_S) == 128 + sign
        ended_s = time.monotonic()
        assert "completed" not in run.stdout.read()
    assert told.startswith("stopping after round 1 of 12; resume with `collapipe run ")
    assert f"--resume {os.path.relpath(run_dir)}`" in told or f"--resume {run_dir}`" in told
    summary = read_summary(run_dir)
    assert summary is not None
    assert (summary["status"], summary["reason"]) == ("stopped", "stopped by a signal")
    assert "stopped: stopped by a signal" in (run_dir / "report.html").read_text()
    assert ended_s - sent_s < 10


def test_a_refused_resume_leaves_the_run_as_it_was_and_never_says_completed(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "runs" / "old"
    directory = RunDirectory(run_dir)
    directory.write_config({})
    directory.write_summary(FINISHED.summary(status="completed", wall_s=1.0))
    before = (run_dir / "summary.json").read_bytes()
    env = {**os.environ, **_beside_flower(tmp_path, REFUSING)}
    code = (
        "import sys; from collapipe_flwr.federation.run import running as r; "
        "r.Attempt.check = lambda self: None; "
        "from collapipe_flwr.cli import main; main()"
    )
    command = [f"{tmp_path}/python", "-c", code, "run", str(ROOT), "--resume", str(run_dir)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 1 and "completed" not in done.stdout + done.stderr
    assert "model.overrides: no setting d_modell" in done.stderr
    assert (run_dir / "summary.json").read_bytes() == before


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
