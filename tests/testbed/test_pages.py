"""The pages on boards and deployments: their commands, as they stand."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest

from collapipe_flwr.deployment.inventory import read_inventory
from tests.cpu_time import cpu_s, is_busy
from tests.testbed.deployment import environment
from tests.testbed.document import Block, blocks_of
from tests.testbed.machines import PROJECT, machines
from tests.testbed.namespaces import namespaces, namespaces_allowed
from tests.testbed.processes import programs
from tests.testbed.rounds import ROUND_S
from tests.testbed.ssh_site import (
    BY_WHEEL,
    ENVIRONMENT,
    LAPTOP,
    RUN,
    Site,
    needs_machines,
    ssh_site,
)

DOCS = PROJECT / "docs"
FIVE_MINUTES_S = 300.0
DEPLOY, INSTALL, TWO_BOARDS = (
    DOCS / name for name in ("deploy.md", "install.md", "tutorials/boards.md")
)
WHEEL_LINE = 'wheel = "collapipe_flwr-0.1.0-py3-none-any.whl"\n'
PLACES = {
    "your computer": LAPTOP,
    "your computer, again": LAPTOP,
    "the control unit": "cu",
}
NOT_RUN = (
    "venv/bin/pip wheel",
)  # needs the build backend from a package index; the test packs the wheel
# What a board says, of programs that only a board has:
PLAYED = {
    "sudo": 'exec "$@"',
    "timedatectl": "echo NTPSynchronized=yes",
    "vcgencmd": "[ $1 = get_throttled ] && echo throttled=0x0 || "
    "printf 'VDD_CORE_A current(7)=0.8A\\nVDD_CORE_V volt(15)=0.7V\\n'",
    "nvpmodel": "echo NV Power Mode: MAXN",
    "jetson_clocks": "[ $1 = --show ] && echo SOC family",
}


def shown(page: Path, title: str, language: str) -> list[str]:
    """The blocks of one section."""
    section = page.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found
    return found


CHECKS = shown(INSTALL, "Prepare a board", "bash")


@pytest.mark.parametrize("text", CHECKS, ids=lambda text: text.partition("\n")[0])
def test_the_commands_for_boards_run(text: str, tmp_path: Path) -> None:
    for name, program in PLAYED.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o755)
    script = f"set -euo pipefail\nPATH={tmp_path}:$PATH\n{text}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{text}\n{done.stderr}"


def test_the_tables_for_boards_belong_into_an_inventory(tmp_path: Path) -> None:
    (tmp_path / "src").symlink_to(PROJECT)
    (tmp_path / "a.whl").touch()
    (tables,) = shown(DEPLOY, "Keys of the inventory", "toml")
    path = tmp_path / "inventory.toml"
    path.write_text(f'cluster = "g"\nwheel = "a.whl"\n{tables}')
    assert all(machine.access.constraints for machine in read_inventory(path).machines)


def carry_out(site: Site, block: Block) -> None:
    """One block of docs/deploy.md."""
    if block.language == "toml":
        _write(site, block)
    elif not block.text.startswith(NOT_RUN):
        code, said = site.run(PLACES[block.place], block.text)
        assert code == 0, f"{block.text}\n{said}"


def _write(site: Site, block: Block) -> None:
    path = site.home(block.place.removeprefix("~/").removeprefix("add to "))
    path.parent.mkdir(parents=True, exist_ok=True)
    text = block.text.replace('"pi"', '"root"').replace('"jetson"', '"root"')
    text = text.replace("/opt/collapipe/greenhouse-run", "/root/greenhouse-run").replace(
        WHEEL_LINE, f'ssh-config = "ssh_config"\n{BY_WHEEL}'
    )
    text = text.replace("[control-unit]", f"[control-unit]\n{ENVIRONMENT}#")
    with path.open("a") as file:
        file.write(text)


@needs_machines
@pytest.mark.cluster
@pytest.mark.timeout(1500)
def test_the_deployment_page_makes_a_cluster_that_trains_grows_and_shrinks(tmp_path: Path) -> None:
    blocks = blocks_of(DEPLOY)
    assert WHEEL_LINE in "".join(block.text for block in blocks)
    with ssh_site(tmp_path) as site:
        code, said = site.run(LAPTOP, f"mkdir /opt/collapipe; ln -s {PROJECT} /opt/collapipe/src")
        assert code == 0, said
        for block in blocks:
            if "flwr run" in block.text:
                with site.home("greenhouse-run/boards.toml").open("a") as config:
                    config.writelines(f"{k} = {json.dumps(v)}\n" for k, v in RUN.items())
            carry_out(site, block)
            if "flwr run" in block.text:
                site.assert_trained_on("greenhouse/pi-1", "greenhouse/pi-2")
        config = site.machines["cu"].path("/etc/collapipe/control-unit/greenhouse.toml").read_text()
        assert '"nano"' in config and '"pi-2"' not in config
        ended = site.machines["pi-2"].service("collapipe-device", "rc")
        assert ended, "a device that was removed goes on"


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_two_boards_and_a_computer_train_by_their_page_within_five_minutes(tmp_path: Path) -> None:
    """Five minutes of a machine that does nothing else; on a busy one, of one core's time."""
    if not namespaces_allowed():
        pytest.skip("network namespaces need root, ip and tc")
    addresses = {LAPTOP: "10.0.0.3", "pi-1": "10.0.0.11", "pi-2": "10.0.0.12"}
    env = environment(tmp_path) | {"OMP_NUM_THREADS": "1", "HOME": "/root"}
    (tmp_path / "machines").mkdir()
    device, file, check, train = blocks_of(TWO_BOARDS)
    busy, ours = is_busy(), f"FLWR_HOME={tmp_path}"
    with (
        namespaces(list(addresses), rate_bit_per_s=100_000_000, addresses=addresses) as network,
        machines(network, list(addresses), tmp_path / "machines", env) as found,
        programs(network, tmp_path, env) as running,
    ):
        start_s, before_s = time.monotonic(), cpu_s(ours)
        for name in ("pi-1", "pi-2"):
            text = device.text.replace("pi-1", name).replace("10.0.0.11", addresses[name])
            started = running.start_here(name, found[name].enter(f"{text} wait"), cwd=tmp_path)
            started.wait_for(f"{name} on {addresses[name]}:50071", deadline_s=90)
        home = found[LAPTOP].path("/root")
        home.mkdir(parents=True, exist_ok=True)
        (home / file.place).write_text(file.text)
        checked = running.start_here("check", found[LAPTOP].enter(check.text), cwd=tmp_path)
        assert checked.wait(deadline_s=200) == 0, checked.tail()
        words = f"cd {PROJECT}; {train.text.strip()} --output-dir {tmp_path}/runs"
        run = running.start_here("run", found[LAPTOP].enter(words), cwd=tmp_path)
        assert run.wait(deadline_s=ROUND_S) == 0, run.tail(60)
        took_s, used_s = time.monotonic() - start_s, cpu_s(ours) - before_s
        print(f"two boards trained after {took_s:.0f} s, {used_s:.0f} s of a core (busy: {busy})")
        (events,) = (tmp_path / "runs").glob("*/events.jsonl")
        rounds = [json.loads(line) for line in events.read_text().splitlines()]
        assert len(rounds) == 2 and all(r["plan"]["clusters"] for r in rounds)
    assert used_s <= FIVE_MINUTES_S and (busy or took_s <= FIVE_MINUTES_S)
