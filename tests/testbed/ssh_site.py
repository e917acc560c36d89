"""Machines with nothing but a real sshd, and a laptop from which they are deployed."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.testbed.deployment import environment
from tests.testbed.machines import BIN, PROJECT, Machine, machines
from tests.testbed.namespaces import namespaces, namespaces_allowed
from tests.testbed.processes import Program, Programs, programs
from tests.testbed.rounds import planned
from tests.testbed.sshd import new_key, ssh_is_here, start_sshd

LAPTOP = "laptop"
ADDRESSES = {
    LAPTOP: "10.0.0.3",
    "cu": "10.0.0.10",
    "pi-1": "10.0.0.11",
    "pi-2": "10.0.0.12",
    "nano": "10.0.0.13",
}
DEPLOY_S = 900.0  # of a machine that does much else; deployments have deadlines of their own
WHEEL = "collapipe_flwr-0.1.0-py3-none-any.whl"
ENVIRONMENT = f'environment = "{BIN.parent}"\n'
BY_WHEEL = f'wheel = "{WHEEL}"\npython = "{Path(sys.executable).resolve()}"\n'
# No package index is near: what the wheel needs is found in the environment of the tests.
_OFFLINE = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
RUN = {
    "run-name": "run",
    "num-server-rounds": 1,
    "train.examples-per-round": 320,
    "data.train-examples": 600,
    "data.test-examples": 50,
    "scheduler.max-model-share": 0.5,  # two devices at least
}
needs_machines = pytest.mark.skipif(
    not (namespaces_allowed() and ssh_is_here()),
    reason="needs root, ip, tc and OpenSSH's server (apt-get install openssh-server)",
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """The machines; the laptop's home has the wheel, and what ssh needs to reach the others."""

    machines: dict[str, Machine]
    programs: Programs
    folder: Path

    def home(self, name: str) -> Path:
        """A file in the laptop's home."""
        return self.machines[LAPTOP].path(f"/root/{name}")

    def start(self, name: str, command: str) -> Program:
        """A command on a machine, begun in its home."""
        enter = self.machines[name].enter(command)
        return self.programs.start_here(command.split()[0], enter, cwd=self.folder)

    def run(self, name: str, command: str) -> tuple[int, str]:
        """Exit code and words of a command on a machine."""
        program = self.start(name, command)
        code = program.wait(deadline_s=DEPLOY_S)
        return code, " ".join(program.text().split())

    def pid(self, host: str, unit: str) -> str:
        """Of a service; empty where it never ran."""
        return self.machines[host].service(f"collapipe-{unit}", "pid")

    def assert_trained_on(self, *devices: str) -> None:
        """The one round of the run was that of these devices."""
        results = self.machines["cu"].path("/var/lib/collapipe/runs/run")
        assert json.loads((results / "summary.json").read_text())["status"] == "completed"
        (event,) = map(json.loads, (results / "events.jsonl").read_text().splitlines())
        assert planned(event) == set(devices)


@contextmanager
def ssh_site(
    folder: Path, *, strange: str = "", from_sources: Sequence[str] = ("cu",)
) -> Iterator[Site]:
    """All machines run; the host key of the one called ``strange`` is not the one that is known.

    Those that run ``from_sources`` have them before what is installed there.
    """
    env = environment(folder) | {"OMP_NUM_THREADS": "1", "HOME": "/root", "COLUMNS": "200"}
    del env["FLWR_HOME"]
    libraries = {**env, **_OFFLINE, "PYTHONPATH": sysconfig.get_path("purelib")}
    (folder / "machines").mkdir()
    with (
        namespaces(list(ADDRESSES), rate_bit_per_s=100_000_000, addresses=ADDRESSES) as network,
        machines(network, list(ADDRESSES), folder / "machines", env, bare=True) as found,
        programs(network, folder, env) as running,
    ):
        site = Site(machines=found, programs=running, folder=folder)
        home = site.home("")
        home.mkdir(parents=True, exist_ok=True)
        key, known = new_key(folder / "id"), ""
        for name in (n for n in ADDRESSES if n != LAPTOP):
            own = env if name in from_sources else libraries
            public = start_sshd(found[name], running, folder / "sshd", key, own)
            public = new_key(folder / "another") if name == strange else public
            known += f"{ADDRESSES[name]} {public}"
        (folder / "known_hosts").write_text(known if strange else "")
        (home / "ssh_config").write_text(
            f"User root\nIdentityFile {folder / 'id'}\nIdentitiesOnly yes\nLogLevel ERROR\n"
            f"UserKnownHostsFile {folder / 'known_hosts'}\nGlobalKnownHostsFile /dev/null\n"
        )
        write_wheel(home / WHEEL)
        yield site


def write_wheel(path: Path) -> None:
    """The package as `pip wheel` packs it, for which the build backend would be needed."""
    package = PROJECT / "collapipe_flwr"
    found = (file for file in package.rglob("*") if file.is_file() and file.suffix != ".pyc")
    files = {str(file.relative_to(PROJECT)): file.read_bytes() for file in sorted(found)}
    pack_wheel(path, files, "Name: collapipe-flwr\n", script="collapipe = collapipe_flwr.cli:main")


def pack_wheel(path: Path, files: dict[str, bytes], metadata: str, script: str = "") -> None:
    """A wheel of version 0.1.0 of these files, whose name is that of ``path``."""
    info = f"{path.name.partition('-')[0]}-0.1.0.dist-info"
    head = f"Metadata-Version: 2.1\nVersion: 0.1.0\n{metadata}"
    files = {**files, f"{info}/METADATA": head.encode()}
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{script}\n".encode()
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
