"""A real sshd on a machine of the testbed, and the keys and settings by which it is reached."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.testbed.machines import Machine
from tests.testbed.processes import Programs

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
KEPT = (
    *("PYTHONPATH", "FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK", "OMP_NUM_THREADS"),
    *("PIP_NO_DEPS", "PIP_NO_INDEX"),
)
_START_S = 30.0


def ssh_is_here() -> bool:
    """Whether this machine has OpenSSH's server and client."""
    return Path(SSHD).exists() and bool(shutil.which("ssh") and shutil.which("ssh-keygen"))


def new_key(path: Path) -> str:
    """Make a key; its public half."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, timeout=30)
    return path.with_suffix(".pub").read_text()


def start_sshd(
    machine: Machine, programs: Programs, folder: Path, user_key: str, env: Mapping[str, str]
) -> str:
    """It lets root in by ``user_key`` and has a host key of its own, whose public half returns.

    Sessions have the variables of ``env`` that programs need here, as of a system of their own.
    """
    host = folder / machine.name
    host.mkdir(parents=True)
    public = new_key(host / "key")
    (host / "authorized").write_text(user_key)
    variables = " ".join(f"{name}={env[name]}" for name in KEPT if name in env)
    lines = [
        f"HostKey {host / 'key'}",
        f"AuthorizedKeysFile {host / 'authorized'}",
        f"PidFile {host / 'pid'}",
        f"SetEnv {variables}",
        *("StrictModes no", "UsePAM no", "PasswordAuthentication no", "PermitRootLogin yes"),
    ]
    (host / "config").write_text("\n".join(lines) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)  # where it locks itself in
    command = machine.enter(f"exec {SSHD} -D -e -f {host / 'config'}")
    program = programs.start_here(f"sshd-{machine.name}", command, cwd=host)
    program.wait_for("Server listening", deadline_s=_START_S)
    return public
