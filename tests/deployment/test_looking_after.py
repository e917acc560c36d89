"""Commands that the page on deployments prints find what a deployment keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.config.cluster_file import MemberConfig, Role
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.deployment import roles
from collapipe_flwr.membership import members, registry
from collapipe_flwr.membership.registry import Registry
from tests.docs import pages

PAGE = pages.ROOT / "docs" / "deploy.md"
ONE = {"greenhouse": ("pi-1", "pi-2", "nano")}  # as section 5 leaves it
BOTH = {"greenhouse": ("pi-1",), "workshop": ("nano",)}


@pytest.fixture
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a deployment keeps clusters, on a machine whose other folders have none."""
    monkeypatch.delenv("COLLAPIPE_FOLDER", raising=False)
    monkeypatch.setattr(registry, "_OF_THE_SYSTEM", tmp_path / "etc")
    monkeypatch.setattr(registry, "DEPLOYED", tmp_path / "etc" / "control-unit")
    monkeypatch.setattr(members, "send_rosters", lambda *_: {})  # nobody else is there
    return registry.DEPLOYED


def keep(folder: Path, clusters: Mapping[str, Sequence[str]]) -> Registry:
    """These clusters with their devices, as members that are away."""
    kept = Registry(folder)
    with kept.lock():
        for number, (name, devices) in enumerate(clusters.items()):
            unit = MemberConfig(name=f"cu-{name}", address=f"127.0.0.1:5{number}")
            config = kept.create(name, unit, "127.0.0.1:1")
            for port, device in enumerate(devices, 10 + 10 * number):
                member = MemberConfig(name=device, address=f"127.0.0.1:{port}")
                config = kept.admit(config, Role.DEVICE, member)
    return kept


def printed() -> list[list[str]]:
    """The commands of the page that look for a cluster by themselves."""
    inline = [said.text.split() for said in pages.inline() if said.page == PAGE]
    shown = [
        line.split() for b in pages.blocks("bash") if b.page == PAGE for line in b.text.splitlines()
    ]
    return [
        words[2:]
        for words in (*inline, *shown)
        if words[:3] == ["sudo", "collapipe", "cluster"] and words[-1] != "NAME"
    ]


def test_steps_of_a_deployment_keep_clusters_where_commands_look() -> None:
    assert roles.folder_of(roles.MachineRole(kind=roles.CONTROL_UNIT)) == str(registry.DEPLOYED)


@pytest.mark.parametrize("words", printed(), ids=" ".join)
def test_the_commands_of_the_page_find_the_cluster(deployed: Path, words: list[str]) -> None:
    kept = keep(deployed, BOTH if "workshop" in words else ONE)
    done = CliRunner().invoke(app, words)
    assert not isinstance(done.exception, ConfigError), done.exception
    verb, name, *_ = [*words[1:], ""]
    left = {device.name for config in kept.clusters().values() for device in config.devices}
    assert (name not in left) if verb == "remove" else ("cluster" in done.output)


def test_a_folder_of_one_s_own_comes_first(deployed: Path) -> None:
    keep(deployed, {"greenhouse": ()})
    keep(deployed.parent, {"workshop": ()})
    assert registry.open_registry(None).folder == deployed.parent
    assert registry.open_registry(None, "greenhouse").folder == deployed
    assert registry.open_registry(deployed).folder == deployed


def test_who_finds_nothing_hears_where_it_was_looked_for(deployed: Path) -> None:
    keep(deployed, {"greenhouse": ()})
    with pytest.raises(ConfigError, match=rf"'barn' is kept in .*{deployed} \(greenhouse\)"):
        registry.open_registry(None, "barn")


def test_who_may_not_look_hears_of_sudo(deployed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(deployed, {"greenhouse": ()})
    monkeypatch.setattr(registry.os, "access", lambda path, _: path != deployed)
    with pytest.raises(ConfigError, match=f"{deployed}.*sudo"):
        registry.open_registry(None)
