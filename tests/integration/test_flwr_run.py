"""The command that users type: `flwr run` on a SuperLink of its own, and an honest exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.config.parsing import write_overrides
from collapipe_flwr.core.errors import ConfigError
from tests.core.process_trees import ended, watched
from tests.integration.conftest import TINY

PROJECT = Path(__file__).parents[2]
LIMIT_S = 240.0


# Both clusters share an actor, which loads the libraries once.
ONE_ACTOR = "num-supernodes = 2\nclient-resources-num-cpus = 2\ninit-args-num-cpus = 2\n"


def _command(folder: Path, *more: str) -> list[str]:
    config, federation = folder / "tiny.toml", folder / "sim.toml"
    federation.write_text(ONE_ACTOR)
    write_overrides({key: value for key, value in TINY.items() if key != "run-name"}, config)
    command = [sys.executable, "-m", "collapipe_flwr.cli", "run", str(PROJECT)]
    command += ["--federation-config", str(federation)]
    return [*command, "--output-dir", str(folder / "runs"), "-c", str(config), *more]


def _collapipe_run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = _command(folder, *more)
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_completed_run_exits_with_0_and_prints_its_directory_last(tmp_path: Path) -> None:
    done = _collapipe_run(tmp_path)
    if "Ray" in done.stderr or "RayBackend" in done.stdout:  # its start fails now and then
        done = _collapipe_run(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run_dir = Path(done.stdout.strip().splitlines()[-1])
    assert run_dir.parent == tmp_path / "runs"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert (run_dir / "model" / "model.safetensors").exists()
    assert "round   2/2" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL], ids=lambda sign: sign.name)
def test_an_end_in_the_midst_of_a_run_leaves_no_process(
    tmp_path: Path, ending: signal.Signals
) -> None:
    mark = f"MARK={tmp_path}"
    env = {**os.environ, "MARK": str(tmp_path)}
    command = _command(tmp_path, "-c", "num-server-rounds=500")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert any(line.startswith("round   2/500") for line in process.stdout)
        running = _bearing(mark)
        assert len(running) > 4  # SuperLink, simulation, Ray and its workers
        with watched(running) as processes:
            process.send_signal(ending)
            assert process.wait(60) != 0
            assert ended(processes)
    assert _bearing(mark) == []


def _bearing(mark: str) -> list[int]:
    """Processes with the entry in their environment; one that has ended has none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += (
                [int(path.parent.name)] if mark.encode() in path.read_bytes().split(b"\0") else []
            )
        except OSError:
            continue  # it has ended, or belongs to somebody else
    return found


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("nonsense", "neither KEY=VALUE nor a .toml file"),
        ("train.learning-rat=0.1", "train.learning-rat is unknown; did you mean"),
        ("output-dir=elsewhere", "output-dir cannot be set here: use --output-dir"),
        ("missing.toml", "--run-config missing.toml cannot be read"),
    ],
)
def test_a_wrong_override_is_refused_before_anything_starts(
    tmp_path: Path, override: str, sentence: str
) -> None:
    command = ["run", str(PROJECT), "--output-dir", str(tmp_path / "runs"), "-c", override]
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert not list(tmp_path.iterdir())
