"""What `systemctl` does on a machine of the testbed: a unit's program, as its user, with its files.

Read from the unit: User, EnvironmentFile, Environment, StateDirectory, CacheDirectory, ExecStart,
TimeoutStopSec. What else it says (hardening, restarts) is systemd's business and not played.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

UNITS, STATE = Path("/etc/systemd/system"), Path("/var/lib/testbed")
KEPT = ("PYTHONPATH", "FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK", "OMP_NUM_THREADS")


def read(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (UNITS / f"{name}.service").read_text().splitlines():
        key, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def script(unit: dict[str, list[str]]) -> str:
    """The unit's command in bash: `${X}` is one word there, `$X` several."""
    lines = [f"export {shlex.quote(setting)}" for setting in unit.get("Environment", ())]
    for file in unit.get("EnvironmentFile", ()):
        path = file.removeprefix("-")
        lines += [
            "set -a",
            f"[ ! -e {path} ] || . {path}" if path != file else f". {path}",
            "set +a",
        ]
    (command,) = unit["ExecStart"]
    lines.append("exec " + re.sub(r"(\$\{\w+\})", r'"\1"', command))
    return "\n".join(lines)


def start(name: str) -> None:
    unit = read(name)
    (user,) = unit["User"]
    env = {k: os.environ[k] for k in KEPT if k in os.environ}
    env |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": f"/home/{user}", "USER": user}
    for kind, place in (("State", "/var/lib"), ("Cache", "/var/cache")):
        for folder in unit.get(f"{kind}Directory", ()):
            path = Path(place, folder)
            path.mkdir(mode=int(unit.get(f"{kind}DirectoryMode", ["755"])[0], 8), exist_ok=True)
            subprocess.run(["chown", f"{user}:", str(path)], check=True)
            env[f"{kind.upper()}_DIRECTORY"] = str(path)
    for what in ("pid", "rc"):
        (STATE / f"{name}.{what}").unlink(missing_ok=True)
    (group,) = unit.get("Group", [user])
    as_user = ["setpriv", "--reuid", user, "--regid", group, "--init-groups", "--no-new-privs"]
    if os.fork() == 0:
        supervise(name, [*as_user, "bash", "-c", script(unit)], env)
    wait_for(STATE / f"{name}.pid", 10.0)


def supervise(name: str, command: list[str], env: dict[str, str]) -> NoReturn:
    """Start the program and wait beside it, as systemd does."""
    log = os.open(STATE / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDONLY) if stream == 0 else log, stream)
    os.setsid()
    process = subprocess.Popen(command, env=env, cwd="/", start_new_session=True)
    (STATE / f"{name}.pid").write_text(str(process.pid))
    (STATE / f"{name}.rc").write_text(str(process.wait()))
    os._exit(0)


def running(name: str) -> bool:
    """Whether its program was started and has not ended."""
    pid, code = STATE / f"{name}.pid", STATE / f"{name}.rc"
    return pid.exists() and not code.exists()


def restart(name: str) -> None:
    if running(name):
        stop(name)
    start(name)


def enable(name: str) -> None:
    (STATE / f"{name}.enabled").touch()


def tell(good: bool) -> NoReturn:
    sys.exit(0 if good else 3)


def stop(name: str) -> None:
    (limit_s,) = read(name)["TimeoutStopSec"]
    os.kill(int((STATE / f"{name}.pid").read_text()), signal.SIGTERM)
    wait_for(STATE / f"{name}.rc", float(limit_s))


def wait_for(path: Path, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not path.exists() or not path.read_text():
        if time.monotonic() > end_s:
            sys.exit(f"{path.name} was not there within {limit_s} s")
        time.sleep(0.05)


if __name__ == "__main__":
    *verbs, wanted = sys.argv[1:]
    match verbs:
        case ["enable", "--now"]:
            enable(wanted)
            start(wanted)
        case ["is-active", "--quiet"]:
            tell(running(wanted))
        case ["is-enabled", "--quiet"]:
            tell((STATE / f"{wanted}.enabled").exists())
        case []:
            assert wanted == "daemon-reload"
        case [verb]:
            {"enable": enable, "restart": restart, "start": start, "stop": stop}[verb](wanted)
