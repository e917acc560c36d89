"""`collapipe deploy` against real sshd: some machines fail, it is interrupted and repeated."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.testbed.machines import PROJECT
from tests.testbed.processes import Program
from tests.testbed.ssh_site import (
    ADDRESSES,
    BY_WHEEL,
    DEPLOY_S,
    ENVIRONMENT,
    LAPTOP,
    RUN,
    Site,
    needs_machines,
    ssh_site,
)

PAGE = PROJECT / "docs/deploy.md"
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
        assert "nothing to do: everything" in said and "mend" not in said
        assert {where: site.pid(*where) for where in SERVICES} == before


def inventory_of_the_page() -> str:
    """That of several clusters in docs/deploy.md, with programs that are there."""
    found = re.search(r"```toml\n# both.toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    text, wheels = re.subn('wheel = ".*"\n', f'ssh-config = "ssh_config"\n{ENVIRONMENT}', found[1])
    assert wheels == 1
    return text.replace('"pi"', '"root"')


@needs_machines
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_several_clusters_of_one_inventory_share_an_edge_and_train(tmp_path: Path) -> None:
    """The second one's control unit joins by a token; its key never leaves it."""
    with ssh_site(tmp_path, from_sources=tuple(ADDRESSES)) as site:
        site.home("boards.toml").write_text(inventory_of_the_page())
        code, said = site.run(LAPTOP, "collapipe deploy boards.toml --dry-run --accept-new")
        assert code == 0, said
        assert "cu-workshop: would member cu-workshop" in said
        assert not any(m.path("/opt/collapipe").exists() for m in site.machines.values())
        code, said = site.run(LAPTOP, "collapipe deploy boards.toml")
        assert code == 0, said
        own = "etc/collapipe/control-unit/certs/cu-workshop.key"
        assert [n for n, m in site.machines.items() if m.path(f"/{own}").exists()] == ["pi-2"]
        services = [("cu", "edge"), ("pi-2", "cluster"), ("pi-2", "supernode"), ("nano", "device")]
        before = {where: site.pid(*where) for where in services}
        assert all(before.values()), before
        code, said = site.run(LAPTOP, "collapipe deploy boards.toml")
        assert code == 0 and "nothing to do: everything" in said, said
        assert {where: site.pid(*where) for where in services} == before
        run = {key: value for key, value in RUN.items() if "share" not in key}
        with site.home("greenhouse-workshop-run/boards.toml").open("a") as config:
            config.writelines(f"{key} = {json.dumps(value)}\n" for key, value in run.items())
        site.home(".flwr").mkdir()
        site.home(".flwr/config.toml").write_text(
            f'[superlink.both]\naddress = "{ADDRESSES["cu"]}:8000"\n'
            'root-certificates = "/root/greenhouse-workshop-run/ca.pem"\n'
        )
        config = "/root/greenhouse-workshop-run/boards.toml"
        command = f"flwr run {PROJECT} both --stream --run-config {config}"
        code, said = site.run(LAPTOP, command)
        assert code == 0, said
        site.assert_trained_on("greenhouse/pi-1", "workshop/nano")


def _wait_for(path: Path, program: Program) -> None:
    end_s = time.monotonic() + DEPLOY_S
    while not path.is_symlink():
        assert program.process.poll() is None, program.tail()
        assert time.monotonic() < end_s, f"{path} never came"
        time.sleep(0.01)
