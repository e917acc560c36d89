"""What --service gives systemd: the units that the documentation describes, with other paths."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.membership.systemd import (
    Manager,
    Service,
    check_manager,
    enable_lingering,
    install,
)
from tests.membership.clusters import new_registry, print_token

UNITS = ("device", "edge", "cluster")


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A manager that notes what it is told; the file with its notes."""
    programs, notes = tmp_path / "bin", tmp_path / "notes"
    programs.mkdir()
    for name in ("systemctl", "useradd", "chown", "loginctl"):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {notes}\ntest ! -e {tmp_path}/fails\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return notes


@pytest.mark.parametrize("manager", Manager)
def test_a_service_starts_now_and_with_the_machine(
    tmp_path: Path, systemctl: Path, manager: Manager
) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    service = Service(unit="device", folder=folder, name="pi-1", options=["--threads", "2"])
    path = install(service, manager, tmp_path / "units")
    said = [line for line in systemctl.read_text().splitlines() if line.startswith("systemctl")]
    who = "" if manager is Manager.system else "--user "
    assert said == [
        f"systemctl {who}daemon-reload",
        f"systemctl {who}enable collapipe-device",
        f"systemctl {who}restart collapipe-device",
    ]
    assert (f"chown -R collapipe: {folder}" in systemctl.read_text()) == (manager is Manager.system)
    expected = "COLLAPIPE_NAME=pi-1\nCOLLAPIPE_OPTIONS=--threads 2\n"
    assert (folder / "device.env").read_text() == expected
    assert f"EnvironmentFile={folder}/device.env" in path.read_text()
    assert ("User=collapipe" in path.read_text()) == (manager is Manager.system)
    (tmp_path / "fails").touch()
    with pytest.raises(RunError, match=r"`(systemctl|useradd) .*` failed: no word"):
        install(service, manager, tmp_path / "units")


def test_a_user_s_services_stay_where_the_system_allows_it(tmp_path: Path, systemctl: Path) -> None:
    assert enable_lingering() and systemctl.read_text() == "loginctl enable-linger\n"
    (tmp_path / "fails").touch()
    assert not enable_lingering()


def test_a_system_service_in_a_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "systemctl")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "executable", "/opt/collapipe/venv/bin/python")
    check_manager(Manager.system, Path("/etc/collapipe"))
    check_manager(Manager.user, Path("/home/pi/cluster"))
    with pytest.raises(ConfigError, match="and /home/pi/cluster is in one: use an environment in"):
        check_manager(Manager.system, Path("/home/pi/cluster"))
    monkeypatch.setattr(sys, "executable", "/root/venv/bin/python")
    with pytest.raises(ConfigError, match="and /root/venv/bin/python is in one"):
        check_manager(Manager.system, Path("/etc/collapipe"))


def test_the_user_of_services_may_use_accelerators_and_sensors(
    tmp_path: Path, systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pwd, "getpwnam", {}.__getitem__)
    monkeypatch.setattr(grp, "getgrall", lambda: [SimpleNamespace(gr_name="video")])
    install(Service(unit="device", folder=tmp_path, name="pi-1"), Manager.system, tmp_path / "u")
    assert "useradd --system --groups video collapipe" in systemctl.read_text().splitlines()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("manager", Manager)
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_understands_every_unit(tmp_path: Path, unit: str, manager: Manager) -> None:
    service = Service(unit=unit, folder=tmp_path, name="pi-1")
    path = tmp_path / f"{service.service}.service"
    text = service.text(manager).replace("User=collapipe", "User=root")
    path.write_text(text)
    for line in text.splitlines():
        if line.startswith("ExecStart="):
            program = Path(line.removeprefix("ExecStart=").split()[0])
            text = text.replace(str(program), "/bin/true")
    path.write_text(text)
    (tmp_path / f"{unit}.env").write_text(service.environment())
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if service.service in line]
    assert done.returncode == 0 and not said, done.stderr


def test_without_systemd_or_rights_the_way_out_is_named(
    tmp_path: Path, systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_manager(Manager.user, tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="--service system needs root: use sudo, or --service"):
        check_manager(Manager.system, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--service needs systemd"):
        check_manager(Manager.user, tmp_path)
    assert not systemctl.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_two_changes_at_once_leave_no_file_of_root_s() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "cu"
        Path(scratch).chmod(0o755)
        registry = new_registry(folder)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 12345, 12345)
        first, left = threading.Event(), threading.Event()
        users: list[int] = []

        def change() -> None:
            first.wait(60)
            with registry.lock():
                left.wait(60)
                users.append(os.geteuid())

        second = threading.Thread(target=change)
        second.start()
        with registry.lock():
            first.set()
        left.set()
        second.join(60)
        assert users == [12345] and os.geteuid() == 0


@pytest.mark.usefixtures("systemctl")
@pytest.mark.parametrize("name", ["my cluster", "100%", "it's"])
def test_a_path_that_a_unit_would_read_otherwise_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="choose a plain name"):
        check_manager(Manager.user, tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_root_changes_can_be_read_by_the_service_s_user() -> None:
    with tempfile.TemporaryDirectory() as scratch:  # tmp_path is below a folder of root's alone
        folder = Path(scratch) / "cu"
        Path(scratch).chmod(0o755)
        registry = new_registry(folder)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 12345, 12345)
        print_token(registry)
        assert os.geteuid() == 0
        assert {path.stat().st_uid for path in folder.rglob("*")} == {12345}
