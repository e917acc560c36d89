"""`collapipe deploy` against real sshd: some machines fail, it is interrupted and repeated."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.testbed.processes import Program
from tests.testbed.ssh_site import (
    ADDRESSES,
    BY_WHEEL,
    DEPLOY_S,
    ENVIRONMENT,
    LAPTOP,
    Site,
    needs_machines,
    ssh_site,
)

AWAY, STRANGE = "10.0.0.99", "nano"
CA_KEY = "/etc/collapipe/control-unit/certs/ca.key"
SERVICES = (
    *(("cu", unit) for unit in ("cluster", "edge", "superlink", "control-unit", "supernode")),
    *((device, "device") for device in ("pi-1", "pi-2")),
)
AS_TRAINED = "setpriv --reuid collapipe --regid collapipe --init-groups"


def write_inventory(site: Site, *, with_bad: bool) -> None:
    """The control unit with its environment, one device with another wheel, one with the same."""
    tables = [("pi-1", ADDRESSES["pi-1"], BY_WHEEL), ("pi-2", ADDRESSES["pi-2"], ENVIRONMENT)]
    if with_bad:
        tables += [(STRANGE, ADDRESSES[STRANGE], ENVIRONMENT), ("away", AWAY, ENVIRONMENT)]
    devices = "".join(
        f'[[device]]\nname = "{name}"\nhost = "{host}"\n{more}' for name, host, more in tables
    )
    site.home("boards.toml").write_text(
        'cluster = "greenhouse"\nuser = "root"\nssh-config = "ssh_config"\n'
        f'[control-unit]\nhost = "{ADDRESSES["cu"]}"\n{ENVIRONMENT}{devices}'
    )


@needs_machines
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_machines_become_a_cluster_whatever_fails_on_the_way(tmp_path: Path) -> None:
    with ssh_site(tmp_path, strange=STRANGE) as site:
        write_inventory(site, with_bad=False)
        code, said = site.run(LAPTOP, "collapipe deploy boards.toml --dry-run")
        assert code == 0, said
        assert "pi-2: would service collapipe-device" in said
        assert not any(m.path("/opt/collapipe").exists() for m in site.machines.values())

        interrupted = site.start(LAPTOP, "exec collapipe deploy boards.toml")
        _wait_for(site.machines["pi-1"].path("/opt/collapipe/venv/bin/python"), interrupted)
        interrupted.send(signal.SIGKILL)
        interrupted.wait(deadline_s=10)
        assert not site.pid("pi-1", "device")

        write_inventory(site, with_bad=True)
        code, said = site.run(LAPTOP, "collapipe deploy boards.toml")
        assert code == 1, said
        host = ADDRESSES[STRANGE]
        assert f"{STRANGE}: ssh: another machine than before answers as {host}" in said
        assert f"ssh-keygen -R {host}" in said
        assert f"away: ssh: root@{AWAY} cannot be reached" in said
        assert "pi-1: did service collapipe-device" in said, said
        assert site.machines["cu"].path(CA_KEY).exists()
        may_read = site.machines["cu"].enter(f"{AS_TRAINED} test -r {CA_KEY}")
        assert subprocess.run(may_read, check=False).returncode == 1

        before = {where: site.pid(*where) for where in SERVICES}
        assert all(before.values()), before
        write_inventory(site, with_bad=False)
        code, said = site.run(LAPTOP, "collapipe deploy boards.toml")
        assert code == 0, said
        assert "nothing was changed" in said and "mend" not in said
        assert {where: site.pid(*where) for where in SERVICES} == before


def _wait_for(path: Path, program: Program) -> None:
    end_s = time.monotonic() + DEPLOY_S
    while not path.is_symlink():
        assert program.process.poll() is None, program.tail()
        assert time.monotonic() < end_s, f"{path} never came"
        time.sleep(0.01)
