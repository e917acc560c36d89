"""A clock that starts in 1970 is named in one sentence everywhere, and only has to be set."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from collapipe_flwr.config.cluster_file import Role, read_cluster
from collapipe_flwr.membership.admission import JoiningService
from collapipe_flwr.membership.registry import Registry
from tests.membership.clusters import ID, board, joined, names, print_token
from tests.ports import free_port

SAID = "clock says 1970-01-01"


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself, as its user types it."""
    command = [sys.executable, "-m", program, *words]
    env = {**os.environ, "COLUMNS": "400"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=250, env=env, check=False
    )


def in_1970(*words: str) -> None:
    """It ends with one sentence that names the clock and the way out."""
    done = run("tests.membership.at_1970", *words)
    assert done.returncode in (1, 2), done
    told = [line for line in (done.stdout + done.stderr).splitlines() if SAID in line]
    assert told and all("timedatectl" in sentence for sentence in told), done
    assert "Traceback" not in done.stderr


def test_a_board_joins_once_its_clock_is_set(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    """By the same token: nothing of it was used up, and nothing half of it stayed."""
    token = replace(print_token(registry), address=joining.address)
    words = ["join", str(token), "--folder", str(tmp_path / "pi"), "--name", "pi-1", "--no-start"]
    words += ["--address", f"127.0.0.1:{free_port()}"]
    in_1970(*words)
    assert not registry.cluster().devices
    done = run("collapipe_flwr", *words)
    assert done.returncode == 0, done.stderr
    assert names(registry.cluster()) == {"pi-1"}
    assert names(read_cluster(tmp_path / "pi" / f"{ID}.toml")) == {"pi-1"}


@pytest.mark.parametrize("role", [Role.DEVICE, Role.EDGE])
def test_a_daemon_does_not_start(
    tmp_path: Path, registry: Registry, joining: JoiningService, role: Role
) -> None:
    newcomer = board(tmp_path, role.word, free_port())
    if role is Role.DEVICE:
        joined(joining, print_token(registry), newcomer)
        folder, name = newcomer.folder, newcomer.name
    else:
        folder, name = registry.edge_folder, "edge"
    in_1970(role.word, "--cluster", str(folder), "--name", name)


def test_a_control_unit_neither_serves_nor_asks(registry: Registry) -> None:
    for command in ("serve", "status"):
        in_1970("cluster", command, "--folder", str(registry.folder))
    file = registry.folder / f"{ID}.toml"
    in_1970("cluster", "check", str(file))


def test_nothing_is_signed_that_the_right_clock_would_refuse(tmp_path: Path) -> None:
    in_1970("cluster", "init", ID, "--address", "127.0.0.1", "--folder", str(tmp_path / "cu"))
    in_1970("certs", str(tmp_path / "certs"), "pi-1=10.0.0.11")
    assert not list(tmp_path.rglob("*.pem")) and not list(tmp_path.rglob("*.toml"))
