"""Machines on one machine: a network namespace each, and files of its own laid over ours.

What a machine writes below /etc, /opt, /var, /usr/local/bin and its home stays in a folder of
the test. `sudo`, `ssh`, `systemctl` and `journalctl` are played by short scripts; services run as
their user. On bare machines nothing is installed, and `ssh` is the real one.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.network import Network

PROJECT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STATE = "/var/lib/testbed"  # pids, exit codes and logs of services
_OWN = ("/etc", "/opt", "/var/lib", "/var/cache", "/usr/local/bin", "/root")
_PROGRAMS = ("collapipe", "flwr", "flower-superlink", "flower-supernode", "flower-superexec")
_MORE_PROGRAMS = ("flwr-serverapp", "flwr-clientapp", "python")
_START_S = 30.0

_SUDO = """#!/bin/bash
if [ "$1" = -u ]; then
  exec setpriv --reuid "$2" --regid "$(id -g "$2")" --init-groups -- "${@:3}"
fi
exec "$@"
"""
_SSH = """#!/bin/bash
exec nsenter -t "$(cat {pids}/$1)" -m -n -- bash -c "cd; ${{*:2}}"
"""
_SYSTEMCTL = """#!/bin/bash
exec {python} {script} "$@"
"""
_JOURNALCTL = """#!/bin/bash
tail -n 5 {state}/"$2".log
"""
_SETUP = """
set -e
for own in {own}; do
  mkdir -p {disk}/upper$own {disk}/work$own
  mount -t overlay overlay -o lowerdir=$own,upperdir={disk}/upper$own,workdir={disk}/work$own $own
done
chmod 711 /root
mkdir -p {state}
cp {disk}/shims/* /usr/local/bin/
{install}
echo ready
exec sleep infinity
"""
_INSTALL = """
mkdir -p /opt/collapipe/venv/bin
ln -s {project} /opt/collapipe/src
for program in {programs}; do ln -s {bin}/$program /opt/collapipe/venv/bin/; done
ln -sf /opt/collapipe/venv/bin/collapipe /opt/collapipe/venv/bin/flwr /usr/local/bin/
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A host of the network with a disk of its own."""

    name: str
    pid: int  # of the process that keeps its namespaces
    disk: Path

    def enter(self, script: str) -> list[str]:
        """The command that runs a bash script there, in its home."""
        shell = ["bash", "-euo", "pipefail", "-c", f"cd; {script}"]
        return ["nsenter", "-t", str(self.pid), "-m", "-n", "--", *shell]

    def path(self, path: str) -> Path:
        """Where a file that was written there lies."""
        return self.disk / "upper" / path.lstrip("/")

    def service(self, unit: str, what: str) -> str:
        """Its `pid`, `rc` (exit code) or `log`; empty where there is none yet."""
        path = self.path(f"{STATE}/{unit}.{what}")
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, unit: str) -> None:
        """SIGKILL to a service, as a machine that loses its power."""
        os.kill(int(self.service(unit, "pid")), signal.SIGKILL)

    def kill_all(self) -> None:
        """Whatever runs there, but for the holder of its namespaces."""
        here = _net_of(self.pid)
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            if pid != self.pid and _net_of(pid) == here:
                _kill(pid)


@contextmanager
def machines(
    network: Network,
    names: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    *,
    bare: bool = False,
) -> Iterator[dict[str, Machine]]:
    """Every machine with its disk in ``folder``; services have ended when the body has."""
    pids = folder / "pids"
    pids.mkdir()
    with ExitStack() as stack:
        found = {}
        for name in names:
            machine = _machine(network, name, folder / name, pids, env, stack, bare)
            (pids / name).write_text(str(machine.pid))
            stack.callback(machine.kill_all)
            found[name] = machine
        yield found


def _machine(
    network: Network,
    name: str,
    disk: Path,
    pids: Path,
    env: Mapping[str, str],
    stack: ExitStack,
    bare: bool,
) -> Machine:
    shims = disk / "shims"
    shims.mkdir(parents=True)
    script = Path(__file__).parent / "systemctl.py"
    texts = {
        "sudo": _SUDO,
        "systemctl": _SYSTEMCTL.format(python=sys.executable, script=script),
        "journalctl": _JOURNALCTL.format(state=STATE),
        **({} if bare else {"ssh": _SSH.format(pids=pids)}),
    }
    for shim, text in texts.items():
        (shims / shim).write_text(text)
        (shims / shim).chmod(0o755)
    programs = " ".join((*_PROGRAMS, *_MORE_PROGRAMS))
    install = _INSTALL.format(project=PROJECT, programs=programs, bin=BIN)
    setup = _SETUP.format(
        own=" ".join(_OWN),
        disk=shlex.quote(str(disk)),
        state=STATE,
        install="" if bare else install,
    )
    command = network.command(name, ["unshare", "-m", "bash", "-c", setup])
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(env))
    stack.callback(_end, holder)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n", f"machine {name} did not start"
    return Machine(name=name, pid=holder.pid, disk=disk)


def _end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait(_START_S)
    assert holder.stdout is not None
    holder.stdout.close()


def _net_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
