"""Law: a run that is killed at any step of any write leaves whole records, and resumes to its end.

The process kills itself as `kill -9` does, before a flush, a rename, a new folder or a deletion.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from collapipe_flwr.core.keys import Value
from collapipe_flwr.federation.checkpoint import Checkpoints
from collapipe_flwr.reporting.run_directory import newest_checkpoint, read_events, read_summary
from tests.forked import start
from tests.integration.conftest import TINY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a warm process")
VALUES: Mapping[str, Value] = {
    **TINY,
    "num-server-rounds": 2,
    "strategy": "fedadam",
    "train.examples-per-round": 20,
}
LIMIT_S = 250.0


def _run(folder: Path, moment: str, kill_after_s: float | None = None, **more: Value) -> int:
    """The small run as a process, killed after so many seconds; its exit code."""
    values = json.dumps({**VALUES, "output-dir": str(folder / "runs"), **more})
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1"}
    process = start("tests.integration.run_process", values, moment, env=env)
    assert process.stdout is not None
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        with suppress(ProcessLookupError):  # it has come to its end
            os.kill(process.pid, signal.SIGKILL)
    with process.stdout as stdout:
        stdout.read()  # to its end
    return process.wait(LIMIT_S)


def _assert_whole(run_dir: Path) -> None:
    """Every file that has its name can be read."""
    for path in run_dir.rglob("*.json"):
        if ".partial" not in str(path):
            json.loads(path.read_bytes())
    rounds = [event["round_index"] for event in read_events(run_dir)]
    assert rounds == list(range(1, len(rounds) + 1))
    checkpoint = Checkpoints(folder=run_dir / "checkpoints").read_newest()
    newest = 0 if checkpoint is None else checkpoint.server_round
    assert newest == newest_checkpoint(run_dir) >= len(rounds)
    summary = read_summary(run_dir)
    assert summary is None or summary["status"] in ("interrupted", "completed")
    for path in run_dir.rglob("*"):
        partial = ".partial" in str(path)
        assert partial or path.is_dir() or path.stat().st_size, f"{path} is empty"


def _assert_resumes(folder: Path, whole: Path) -> None:
    """What is left goes on to the bits of a run that nothing disturbed."""
    run_dir = folder / "runs" / "run"
    summary = read_summary(run_dir) if run_dir.exists() else None
    if summary is None or not (run_dir / "run-config.json").exists():
        shutil.rmtree(folder / "runs", ignore_errors=True)  # it was no run yet
        assert _run(folder, "") == 0
    elif summary["status"] != "completed":
        assert _run(folder, "", resume=str(run_dir)) == 0
    first, second = (d / "model" / "model.safetensors" for d in (whole, run_dir))
    assert first.read_bytes() == second.read_bytes()
    done = read_summary(run_dir)
    assert done is not None and done["status"] == "completed"
    assert done["rounds"] == done["rounds_asked"] == len(read_events(run_dir)) == 2


def _killed_at(folder: Path, step: int, whole: Path) -> None:
    folder.mkdir()
    if _run(folder, f"write={step}") != -signal.SIGKILL:
        # Progress is written by time, so that a quicker run ends before that many steps.
        assert int((folder / "runs" / "writes").read_text()) < step
    if (folder / "runs" / "run").exists():
        _assert_whole(folder / "runs" / "run")
    _assert_resumes(folder, whole)


def _undisturbed(folder: Path) -> tuple[Path, int]:
    """A run that comes to its end, and how many steps its writes have."""
    assert _run(folder, "write=0") == 0
    return folder / "runs" / "run", int((folder / "runs" / "writes").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_killed_at_a_random_step_of_a_write_resumes_to_its_end(
    seed: int, tmp_path: Path
) -> None:
    whole, steps = _undisturbed(tmp_path / "count")
    _killed_at(tmp_path / "killed", random.Random(seed).randint(1, steps), whole)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_run_killed_at_every_step_of_its_writes_resumes_to_its_end(tmp_path: Path) -> None:
    whole, steps = _undisturbed(tmp_path / "count")
    assert steps > 50
    for step in range(1, steps + 1):
        _killed_at(tmp_path / str(step), step, whole)
        shutil.rmtree(tmp_path / str(step))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_killed_at_random_moments_leaves_whole_files_and_resumes(tmp_path: Path) -> None:
    whole, _ = _undisturbed(tmp_path / "count")
    assert _run(tmp_path / "first", "") == 0  # and warms the process that others are forked from
    start_s = time.monotonic()
    assert _run(tmp_path / "second", "") == 0
    lasts_s, rng, killed = time.monotonic() - start_s, random.Random(19), 0
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        killed += _run(folder, "", kill_after_s=rng.uniform(0.0, lasts_s)) == -signal.SIGKILL
        if (folder / "runs" / "run").exists():
            _assert_whole(folder / "runs" / "run")
        _assert_resumes(folder, whole)
        shutil.rmtree(folder)
    assert killed > 10
