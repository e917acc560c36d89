"""A run whose clusters are worked on by a resident control unit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from client_app.app import app as client_app
from collapipe_flwr.config.schema import parse
from collapipe_flwr.federation.local_grid import LocalGrid
from server_app.app import run
from tests.integration.conftest import TINY, RunApp

ROOT = Path(__file__).parents[2]
KEEPS = {"clusters": 1, "train.optimizer-state": "keep", "world.channel": "static"}


@pytest.mark.long
def test_a_resident_control_unit_gives_the_bits_of_a_process_per_message(
    tmp_path: Path, shared_run: RunApp
) -> None:
    path, state = tmp_path / "private" / "socket", tmp_path / "state"
    command = [sys.executable, "-m", "collapipe_flwr.cli", "control-unit"]
    command += ["--socket", str(path), "--state-dir", str(state)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        try:
            assert process.stdout is not None and path.name in process.stdout.readline()
            values = {**TINY, **KEEPS, "output-dir": str(tmp_path / "runs")}
            places = {1: {"partition-id": 0, "num-partitions": 1, "control-unit": str(path)}}
            apps = dict.fromkeys(places, client_app)
            run(LocalGrid(apps, node_configs=places, run_config=values), parse(values))
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    folders = shared_run(KEEPS), tmp_path / "runs" / "run"
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in folders]
    assert models[0] == models[1]
    assert json.loads((folders[1] / "summary.json").read_text())["status"] == "completed"
    assert len(list(state.glob("*/cluster-*/round-*.safetensors"))) >= 2, "kept in its folder"
