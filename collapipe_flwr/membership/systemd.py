"""Services of systemd for members: the units in `systemd/`, with the paths of this machine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from collapipe_flwr.core.durable import make_folder, write_text
from collapipe_flwr.core.errors import ConfigError, RunError

_UNITS = Path(__file__).parents[1] / "systemd"
_BIN, _FOLDER, _USER = "/opt/collapipe/venv/bin", "/etc/collapipe", "collapipe"
_GROUPS = {"video", "render"}
_SYSTEM_UNITS = Path("/etc/systemd/system")
# Settings that the manager of a user supports; the service's files are its user's own anyway.
_OF_A_USER = (
    "Type",
    "EnvironmentFile",
    "ExecStart",
    "KillSignal",
    "TimeoutStopSec",
    "Restart",
    "RestartSec",
    "NoNewPrivileges",
    "Nice",
    "UMask",
)
_HIDDEN = tuple(map(Path, ("/home", "/root", "/run/user")))  # by ProtectHome
_PLAIN = re.compile(r"[\w/.,:=@+~-]+")  # what a unit reads as it is written
_COMMAND_S = 90.0


class Manager(StrEnum):
    """The systemd that starts a service."""

    system = "system"
    user = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """``unit`` is device, edge or cluster; ``folder`` has the member's files."""

    unit: str
    folder: Path
    name: str = ""
    options: Sequence[str] = ()

    @property
    def service(self) -> str:
        """Its name in systemd."""
        return f"collapipe-{self.unit}"

    def environment(self) -> str:
        """Write the content of UNIT.env."""
        options = list(self.options)
        if self.unit == "edge" and self.name:
            options = ["--name", self.name, *options]
        values = {"COLLAPIPE_NAME": self.name, "COLLAPIPE_OPTIONS": shlex.join(options)}
        return "".join(f"{key}={value}\n" for key, value in values.items() if value)

    def text(self, manager: Manager) -> str:
        """Write the content of the unit."""
        template = (_UNITS / f"{self.service}.service").read_text()
        text = template.replace(_BIN, str(Path(sys.executable).parent))
        text = text.replace(_FOLDER, str(self.folder.resolve()))
        return text if manager is Manager.system else "".join(_adapt_to_user(text))


def _adapt_to_user(text: str) -> Iterator[str]:
    section = ""
    for line in text.splitlines(keepends=True):
        key = line.partition("=")[0]
        section = line.strip() if line.startswith("[") else section
        if line.startswith("WantedBy="):
            yield "WantedBy=default.target\n"
        elif line.startswith("ExecStart="):
            yield line.replace("${STATE_DIRECTORY}", "%S/collapipe")
        elif (
            section != "[Service]"
            or line.startswith(("[", "Environment=COLLAPIPE_"))
            or key in _OF_A_USER
        ):
            yield line


def check_manager(manager: Manager, folder: Path) -> None:
    """Raise ConfigError where a service could not be installed, before anything else is done.

    ``folder`` is to have the member's files.
    """
    if shutil.which("systemctl") is None:
        raise ConfigError("--service needs systemd, and there is no systemctl: leave it out")
    if manager is Manager.system and os.geteuid() != 0:
        raise ConfigError("--service system needs root: use sudo, or --service user")
    for path in (Path(sys.executable), folder.resolve()):
        if not _PLAIN.fullmatch(str(path)):
            raise ConfigError(
                f"--service cannot use {path}, whose name has blanks, % or quotes, which units of "
                "systemd read otherwise: choose a plain name"
            )
    for path in (Path(sys.executable), folder.resolve()) if manager is Manager.system else ():
        if any(path.is_relative_to(home) for home in _HIDDEN):
            raise ConfigError(
                f"--service system sees no home folders, and {path} is in one: use an environment "
                "in /opt/collapipe and a --folder in /etc, or --service user"
            )


def install(service: Service, manager: Manager, units: Path | None = None) -> Path:
    """Write the unit, and have systemd start it now and later; return its path.

    A user's service starts with the machine after `enable_lingering`. A system service runs as the
    user ``collapipe``, which is created and gets the folder. Raises RunError where systemd refuses.
    """
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    folder = units or (_SYSTEM_UNITS if manager is Manager.system else home / "systemd" / "user")
    make_folder(folder)
    path = folder / f"{service.service}.service"
    write_text(service.folder / f"{service.unit}.env", service.environment())
    write_text(path, service.text(manager))
    if manager is Manager.system:
        _give_to_user(service.folder)
    control = ["systemctl"] if manager is Manager.system else ["systemctl", "--user"]
    _run([*control, "daemon-reload"])
    _run([*control, "enable", service.service])
    _run([*control, "restart", service.service])
    return path


def enable_lingering() -> bool:
    """Ask that this user's services start with the machine and go on after the last logout."""
    try:
        _run(["loginctl", "enable-linger"])
    except RunError:
        return False
    return True


def _give_to_user(folder: Path) -> None:
    """Create the user, in the groups for accelerators and power sensors; chown the folder."""
    import grp
    import pwd

    try:
        pwd.getpwnam(_USER)
    except KeyError:
        there = {group.gr_name for group in grp.getgrall()}
        groups = ",".join(sorted(_GROUPS & there))
        _run(["useradd", "--system", *(["--groups", groups] if groups else []), _USER])
    _run(["chown", "-R", f"{_USER}:", str(folder)])


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"`{shlex.join(command)}` cannot be run: {error}") from error
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise RunError(f"`{shlex.join(command)}` failed: {why}")
