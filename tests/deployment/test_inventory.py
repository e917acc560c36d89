"""Inventories: machines from tables, one sentence for what cannot be deployed."""

from __future__ import annotations

import base64
import tomllib
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.deployment.deploy import run_config
from collapipe_flwr.deployment.inventory import Inventory, read_inventory
from collapipe_flwr.deployment.roles import join_cluster, serve_roles

UNIT = '[control-unit]\nhost = "cu"\n'
DEVICE = '[[device]]\nname = "pi-1"\nhost = "10.0.0.11"\n'
TOP = 'cluster = "greenhouse"\nenvironment = "/opt/env"\n'


def inventory(folder: Path, text: str) -> Inventory:
    path = folder / "boards.toml"
    path.write_text(text)
    return read_inventory(path)


def test_tables_on_one_host_are_one_machine_and_what_a_table_says_counts_there(
    tmp_path: Path,
) -> None:
    found = inventory(
        tmp_path,
        f'{TOP}user = "pi"\n{UNIT}address = "10.0.0.10"\n[server]\nhost = "10.0.0.1"\nport = 2222\n'
        f'{DEVICE}user = "root"\n',
    )
    unit, server, device = found.machines
    assert [role.kind for role in unit.roles] == ["control-unit", "edge"]
    assert [role.name for role in unit.roles] == ["cu-greenhouse", "edge"]
    assert {role.address for role in unit.roles} == {"10.0.0.10"}
    assert (server.access.user, server.access.port) == ("pi", 2222)
    assert (device.access.user, device.access.port) == ("root", 0)
    assert unit.access.environment == "/opt/env" and unit.with_flower and not device.with_flower


def test_a_wheel_lies_beside_the_inventory(tmp_path: Path) -> None:
    (tmp_path / "a.whl").touch()
    found = inventory(tmp_path, f'cluster = "g"\nwheel = "a.whl"\n{UNIT}{DEVICE}')
    assert {machine.access.wheel for machine in found.machines} == {str(tmp_path / "a.whl")}


def test_the_wheel_of_a_table_counts_more_than_the_environment_of_all(tmp_path: Path) -> None:
    (tmp_path / "a.whl").touch()
    found = inventory(tmp_path, f'{TOP}{UNIT}{DEVICE}wheel = "a.whl"\n')
    unit, device = (machine.access for machine in found.machines)
    assert (unit.environment, unit.wheel) == ("/opt/env", "")
    assert (device.environment, device.wheel) == ("", str(tmp_path / "a.whl"))


def test_the_node_config_of_a_control_unit_reaches_its_supernode(tmp_path: Path) -> None:
    own = "data.train='/srv/own data.csv' compute='cuda:0' rate=0.5"
    found = inventory(tmp_path, f'{TOP}{UNIT}node-config = "{own}"\n{DEVICE}')
    steps = {step.name: step for step in serve_roles(found, found.machines[0])}
    action = steps["settings of collapipe-supernode"].action
    text = base64.b64decode(action.partition("<<'END'\n")[2].partition("END")[0]).decode()
    config = next(line for line in text.splitlines() if line.startswith("COLLAPIPE_NODE_CONFIG"))
    given = parse_config_args([config.partition("=")[2].strip('"')])
    assert given == {
        "partition-id": 0,
        "num-partitions": 1,
        "cluster": "/etc/collapipe/control-unit/greenhouse.toml",
        "data.train": "/srv/own data.csv",
        "compute": "cuda:0",
        "rate": 0.5,
    }


def test_a_device_that_dials_joins_so_and_is_not_looked_for_at_an_address(tmp_path: Path) -> None:
    found = inventory(tmp_path, f"{TOP}{UNIT}{DEVICE}dial = true\n")
    (device,) = (machine for machine in found.machines if machine.role("device"))
    (role,) = device.roles
    action = join_cluster(role, "TOKEN").action
    assert action.endswith("--name pi-1 --dial")
    steps = {step.name: step for step in serve_roles(found, device)}
    assert "/dev/tcp" not in steps["service collapipe-device"].action


SEVERAL = """environment = "/opt/env"
[server]
host = "10.0.0.1"
[[cluster]]
name = "greenhouse"
control-unit.host = "10.0.0.10"
[[cluster.device]]
name = "pi-1"
host = "10.0.0.11"
[[cluster]]
name = "workshop"
control-unit = { host = "10.0.0.20", address = "10.1.0.20" }
[[cluster.device]]
name = "pc-1"
host = "10.0.0.21"
"""


def test_several_clusters_have_one_edge_and_one_server_beside_their_own_machines(
    tmp_path: Path,
) -> None:
    found = inventory(tmp_path, SEVERAL)
    assert (found.clusters, found.name) == (("greenhouse", "workshop"), "greenhouse-workshop")
    roles = {m.host: [(r.name, r.cluster) for r in m.roles] for m in found.machines}
    assert roles == {
        "10.0.0.10": [("cu-greenhouse", "greenhouse"), ("edge", "greenhouse")],
        "10.0.0.1": [("server", "greenhouse")],
        "10.0.0.11": [("pi-1", "greenhouse")],
        "10.0.0.20": [("cu-workshop", "workshop")],
        "10.0.0.21": [("pc-1", "workshop")],
    }
    units = [role for _, role in found.control_units]
    assert [found.keeps_ca(role) for role in units] == [True, False]
    assert units[1].address == "10.1.0.20" and found.registrar.host == "10.0.0.10"


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (f'cluster = "a b"\n{UNIT}{DEVICE}', "cluster must be a name of letters"),
        (f"{TOP}{DEVICE}", "control-unit.host is missing"),
        (f"{TOP}{UNIT}", r"at least one \[\[device\]\]"),
        (f"{TOP}{UNIT}{DEVICE}colour = 1\n", r"device\[1\].colour is unknown"),
        (f"{TOP}{UNIT}{DEVICE}{DEVICE.replace('11', '12')}", "two members are called 'pi-1'"),
        (f"{TOP}{UNIT}{DEVICE}{DEVICE.replace('pi-1', 'pi-2')}", "two devices are on host"),
        (f"{TOP}{UNIT}[[device]]\nname = 'x'\n", r"device\[1\].host is missing"),
        (f"{TOP}{UNIT}[[device]]\nname = 'x'\nhost = 'a; reboot'\n", "must be a host name"),
        (f"{TOP}{UNIT}{DEVICE}options = '$(reboot)'\n", r"device\[1\].options must have no quotes"),
        (
            f"{TOP}{UNIT}node-config = 'partition-id=3'\n{DEVICE}",
            "without partition-id",
        ),
        (f"{TOP}{UNIT}node-config = 'a=$(b)'\n{DEVICE}", "control-unit.node-config must be pairs"),
        (f"{TOP}{UNIT}node-config = 'a=word'\n{DEVICE}", "control-unit.node-config must be pairs"),
        (f"{TOP}{UNIT}{DEVICE}node-config = 'a=1'\n", r"device\[1\].node-config belongs to contr"),
        (f"{TOP}{UNIT}[edge]\nnode-config = 'a=1'\n{DEVICE}", "edge.node-config belongs to contr"),
        (f"{TOP}{UNIT}dial = true\n{DEVICE}", "control-unit.dial: .* so only a device does"),
        (f"{TOP}{UNIT}{DEVICE}address = '10.0.0.9'\ndial = true\n", "so it has no address"),
        (f"{TOP}user = '-oProxyCommand=x'\n{UNIT}{DEVICE}", "user must be a word"),
        (f"{TOP}{UNIT}name = 'x'\n{DEVICE}", "control-unit.name cannot be chosen, only that of a"),
        (f"{TOP}{UNIT}[edge]\nname = 'x'\n{DEVICE}", "edge.name cannot be chosen"),
        (f"{TOP}usre = 'pi'\n{UNIT}{DEVICE}", "key usre is unknown; did you mean user"),
        *(
            (
                f"{TOP}{UNIT}{DEVICE}address = '10.0.0.11{more}'\n",
                r"device\[1\].address must be a host",
            )
            for more in (";reboot", "$(reboot)", "`reboot`", "|reboot", "&reboot", "\\\\")
        ),
        (f"{TOP}python = 'python3;reboot'\n{UNIT}{DEVICE}", "python must be a word"),
        (f"{TOP}user = 'x y'\n{UNIT}{DEVICE}", "user must be a word, got 'x y'"),
        (f'cluster = "g"\n{UNIT}{DEVICE}', "'cu' has neither a wheel nor an environment"),
        (f'cluster = "g"\nwheel = "no.whl"\n{UNIT}{DEVICE}', "wheel .*no.whl is not there"),
        (f'{TOP}ssh-config = "none"\n{UNIT}{DEVICE}', "ssh-config .*none is not there"),
        ("cluster", "is not TOML"),
        (f"{SEVERAL}{DEVICE}", "device belongs to a cluster here: write cluster.device"),
        (SEVERAL.replace("workshop", "Greenhouse"), "two clusters are called 'Greenhouse'"),
        (SEVERAL.replace("workshop", "a b"), r"cluster\[2\].cluster must be a name"),
        (SEVERAL.replace("pc-1", "PI-1"), "two members are called 'pi-1'"),
        (SEVERAL.replace("0.0.20", "0.0.10"), "two control units are on host '10.0.0.10'"),
        (SEVERAL.replace("control-unit =", "edge ="), r"key of cluster\[2\] edge is unknown"),
        (SEVERAL.replace('host = "10.0.0.21"', ""), r"cluster\[2\].device\[1\].host is missing"),
    ],
)
def test_what_cannot_be_deployed_is_refused_with_its_key(
    text: str, refusal: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=refusal) as told:
        inventory(tmp_path, text)
    assert str(tmp_path / "boards.toml") in str(told.value)


def test_deploying_again_keeps_what_the_user_added_to_the_run_config(tmp_path: Path) -> None:
    one = inventory(tmp_path, f"{TOP}{UNIT}{DEVICE}")
    first = run_config(one)
    assert tomllib.loads(first)["clusters"] == 1 and run_config(one, first) == first
    edited = first.replace("/var/lib/collapipe/runs", "/data") + "# ours\nseed = 7\n[data]\nx = 1\n"
    several = inventory(tmp_path, SEVERAL)
    found = run_config(several, edited.replace('world.channel = "static"\n', ""))
    assert "# ours" in found
    values = tomllib.loads(found)
    assert (values["clusters"], values["seed"], values["data"]) == (2, 7, {"x": 1})
    assert values["output-dir"] == "/data" and values["world"]["channel"] == "static"
    with pytest.raises(ConfigError, match=r"boards\.toml of .* write a key of a table in one line"):
        run_config(one, '[edge]\naddress = "elsewhere:1"\n')
