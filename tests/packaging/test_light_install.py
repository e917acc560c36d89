"""Boards install torch, transformers, grpcio and little else; their commands need no more."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.daemon_processes import Daemon, running

ROOT = Path(__file__).parents[2]
HEAVY = ("flwr", "ray", "cvxpy", "datasets")
PURPOSES = {"torch", "transformers", "numpy", "grpcio", "cryptography", "safetensors"}
# Every process writes at its end which of them it has imported; without `installed` there are none.
WATCH = """
import atexit, os, sys
heavy = {heavy!r}
if not {installed!r}:
    sys.modules.update(dict.fromkeys(heavy))
def tell():
    found = [name for name in heavy if sys.modules.get(name)]
    with open({folder!r} + f"/{{os.getpid()}}.loaded", "w") as file:
        file.write(" ".join(found))
atexit.register(tell)
"""
CLUSTER = """
id = "shed"
[[device]]
name = "pi"
address = "{device}"
[edge]
address = "{edge}"
"""


@contextmanager
def watched(folder: Path, installed: bool) -> Iterator[dict[str, str]]:
    """The environment of processes that tell what they import; after the body, none was heavy."""
    text = WATCH.format(heavy=HEAVY, installed=installed, folder=str(folder))
    (folder / "sitecustomize.py").write_text(text)
    yield {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    told = [file.read_text() for file in folder.glob("*.loaded")]
    assert told and not any(told)


def collapipe(*words: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "collapipe_flwr.cli", *words],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
# What is never imported where it is installed need not be there.
@pytest.mark.parametrize("installed", [False, True], ids=["absent", "installed"])
def test_device_edge_and_check_import_no_flower_nor_data_nor_solver(
    tmp_path: Path, installed: bool
) -> None:
    file = tmp_path / "shed.toml"
    with watched(tmp_path, installed) as env:
        assert "cluster" in collapipe("--help", env=env)
        daemons = [Daemon(kind, first=tmp_path) for kind in ("device", "edge")]
        with running(*daemons) as (device, edge):
            file.write_text(CLUSTER.format(device=device.address, edge=edge.address))
            quick = ("--seconds", "0.2", "--width", "64", "--deadline-s", "60")
            shown = collapipe("cluster", "check", str(file), *quick, env=env)
            for daemon in daemons:
                daemon.process.send_signal(signal.SIGTERM)
                assert daemon.process.wait(60) == 0
        assert "pi" in shown and "mend" not in shown
        assert len(list(tmp_path.glob("*.loaded"))) == 4


def test_flower_is_asked_for_by_the_extra_that_brings_it(tmp_path: Path) -> None:
    with watched(tmp_path, False) as env:
        command = [sys.executable, "-m", "collapipe_flwr.cli", "control-unit"]
        done = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
        )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "Error: the package flwr is not installed: run `pip install 'collapipe-flwr[flower]'`"
    )


def test_the_base_is_what_computes_what_links_and_a_command_line() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = [text for text in table["dependencies"] if "extra ==" not in text]
    assert {re.split("[<>=]", text, maxsplit=1)[0] for text in base} == PURPOSES | {"rich", "typer"}
