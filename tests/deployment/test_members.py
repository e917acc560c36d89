"""Members that are not in the inventory, and machines that are no members any more, are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from collapipe_flwr.cluster.profile import Measured, Measurements
from collapipe_flwr.core.json_codec import to_json
from collapipe_flwr.deployment.deploy import Deployment, show
from collapipe_flwr.deployment.inventory import read_inventory

TEXT = """environment = "/opt/venv"
[[cluster]]
name = "greenhouse"
control-unit.host = "10.0.0.10"
[[cluster.device]]
name = "pi-1"
host = "10.0.0.11"
[[cluster]]
name = "workshop"
control-unit.host = "10.0.0.12"
[[cluster.device]]
name = "nano"
host = "10.0.0.13"
"""


def test_a_board_that_left_the_inventory_is_named_with_the_command_that_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "both.toml"
    path.write_text(TEXT)
    found = {
        "greenhouse": ("cu-greenhouse", "pi-1", "pi-2", "edge"),
        "workshop": ("cu-workshop", "nano", "edge"),
    }
    deployed = Deployment(inventory=read_inventory(path))

    def answer(_: Deployment, __: object, script: str) -> str:
        cluster = next(name for name in found if f"/{name}.toml" in script)
        members = tuple(Measured(name=name) for name in found[cluster])
        return to_json(Measurements(cluster_id=cluster, members=members))

    monkeypatch.setattr(Deployment, "_run", answer)
    for machine, role in deployed.inventory.control_units:
        deployed._check_one(machine, role, keep=False)
    console = Console(record=True, width=200, quiet=False)
    show(deployed, console)
    said = console.export_text()
    assert "pi-2 is a member of greenhouse" in said
    assert "on 10.0.0.10: sudo collapipe cluster remove pi-2 --cluster greenhouse" in said
    assert not deployed.failures and said.count("is a member of") == 1
