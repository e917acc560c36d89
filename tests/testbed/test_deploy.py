"""`collapipe deploy` against real sshd: some machines fail, it is interrupted and repeated."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
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
    "strange": "10.0.0.13",
}
AWAY = "10.0.0.99"
DEPLOY_S = 400.0
RUN = {
    "run-name": "run",
    "num-server-rounds": 1,
    "train.examples-per-round": 320,
    "data.train-examples": 600,
    "data.test-examples": 50,
    "scheduler.max-model-share": 0.5,  # both devices
}
needs_machines = pytest.mark.skipif(
    not (namespaces_allowed() and ssh_is_here()),
    reason="needs root, ip, tc and OpenSSH's server (apt-get install openssh-server)",
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Machines with sshd, and one from which they are deployed."""

    machines: dict[str, Machine]
    programs: Programs
    folder: Path

    def inventory(self, **devices: str) -> Path:
        """Of the control unit and devices by name and host."""
        tables = "".join(
            f'[[device]]\nname = "{name}"\nhost = "{host}"\n' for name, host in devices.items()
        )
        path = self.folder / "boards.toml"
        path.write_text(
            f'cluster = "greenhouse"\nuser = "root"\nssh-config = "ssh_config"\n'
            f'environment = "{BIN.parent}"\n[control-unit]\nhost = "{ADDRESSES["cu"]}"\n{tables}'
        )
        return path

    def deploy(self, inventory: Path, *options: str) -> Program:
        """Begun."""
        command = f"collapipe deploy {inventory} {' '.join(options)}"
        enter = self.machines[LAPTOP].enter(command)
        return self.programs.start_here("deploy", enter, cwd=self.folder)

    def deployed(self, inventory: Path, *options: str) -> tuple[int, str]:
        """Exit code and words of a deployment that has ended."""
        program = self.deploy(inventory, *options)
        code = program.wait(deadline_s=DEPLOY_S)
        return code, " ".join(program.text().split())

    def train(self) -> None:
        """A run as the deployment's last words say, from where it was deployed."""
        folder, home = self.folder / "greenhouse-run", self.machines[LAPTOP].path("/root/.flwr")
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink.greenhouse]\naddress = "{ADDRESSES["cu"]}:8000"\n'
            f'root-certificates = "{folder / "ca.pem"}"\n'
        )
        with (folder / "boards.toml").open("a") as config:
            config.writelines(f"{name} = {json.dumps(value)}\n" for name, value in RUN.items())
        words = f"flwr run {PROJECT} greenhouse --stream --run-config {folder / 'boards.toml'}"
        run = self.programs.start_here("run", self.machines[LAPTOP].enter(words), cwd=self.folder)
        assert run.wait(deadline_s=DEPLOY_S) == 0, run.tail(60)
        results = self.machines["cu"].path("/var/lib/collapipe/runs/run")
        assert json.loads((results / "summary.json").read_text())["status"] == "completed"
        (event,) = map(json.loads, (results / "events.jsonl").read_text().splitlines())
        assert planned(event) == {"greenhouse/pi-1", "greenhouse/pi-2"}

    def pids(self) -> dict[str, str]:
        """Of all services."""
        names = (("cu", "cluster"), ("cu", "edge"), ("cu", "superlink"), ("cu", "supernode"))
        names += (("cu", "control-unit"), ("pi-1", "device"), ("pi-2", "device"))
        return {
            f"{host}/{unit}": self.machines[host].service(f"collapipe-{unit}", "pid")
            for host, unit in names
        }


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    env = environment(folder) | {"OMP_NUM_THREADS": "1", "HOME": "/root", "COLUMNS": "200"}
    del env["FLWR_HOME"]
    (folder / "machines").mkdir()
    with (
        namespaces(list(ADDRESSES), rate_bit_per_s=100_000_000, addresses=ADDRESSES) as network,
        machines(network, list(ADDRESSES), folder / "machines", env, bare=True) as found,
        programs(network, folder, env) as running,
    ):
        key = new_key(folder / "id")
        known = ""
        for name in (n for n in ADDRESSES if n != LAPTOP):
            _, public = start_sshd(found[name], running, folder / "sshd", key, env)
            public = new_key(folder / "another") if name == "strange" else public
            known += f"{ADDRESSES[name]} {public}"
        (folder / "known_hosts").write_text(known)
        (folder / "ssh_config").write_text(
            f"IdentityFile {folder / 'id'}\nIdentitiesOnly yes\nLogLevel ERROR\n"
            f"UserKnownHostsFile {folder / 'known_hosts'}\nGlobalKnownHostsFile /dev/null\n"
        )
        yield Site(machines=found, programs=running, folder=folder)


@needs_machines
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_machines_become_a_cluster_whatever_fails_on_the_way(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        good = {"pi-1": ADDRESSES["pi-1"], "pi-2": ADDRESSES["pi-2"]}
        bad = {"strange": ADDRESSES["strange"], "away": AWAY}

        code, said = here.deployed(here.inventory(**good), "--dry-run")
        assert code == 0, said
        assert "pi-2: would service collapipe-device" in said
        assert not any(m.path("/opt/collapipe").exists() for m in here.machines.values())

        unit = here.machines["pi-1"].path("/etc/systemd/system/collapipe-device.service")
        interrupted = here.deploy(here.inventory(**good))
        _wait_for(unit, interrupted)
        interrupted.send(signal.SIGKILL)
        interrupted.wait(deadline_s=10)

        code, said = here.deployed(here.inventory(**good, **bad))
        assert code == 1, said
        assert f"strange: ssh: another machine than before answers as {bad['strange']}" in said
        assert f"ssh-keygen -R {bad['strange']}" in said
        assert f"away: ssh: root@{AWAY} cannot be reached" in said
        assert "pi-1: did service collapipe-device" in said, said

        key = "/etc/collapipe/control-unit/certs/ca.key"
        unit_user = f"setpriv --reuid collapipe --regid collapipe --init-groups test -r {key}"
        assert here.machines["cu"].path(key).exists()
        assert subprocess.run(here.machines["cu"].enter(unit_user), check=False).returncode == 1

        before = here.pids()
        assert all(before.values()), before
        code, said = here.deployed(here.inventory(**good))
        assert code == 0, said
        assert "nothing was changed" in said and "mend" not in said
        assert here.pids() == before
        here.train()


def _wait_for(path: Path, program: Program) -> None:
    end_s = time.monotonic() + DEPLOY_S
    while not path.exists():
        assert program.process.poll() is None, program.tail()
        assert time.monotonic() < end_s, f"{path} never came"
        time.sleep(0.01)
