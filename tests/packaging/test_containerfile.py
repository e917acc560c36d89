"""The Containerfile: what it copies and calls is there; it installs what docs/install.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer.main

from collapipe_flwr.cli import app

ROOT = Path(__file__).parents[2]
TEXT = re.sub(r"\\\n", " ", (ROOT / "Containerfile").read_text(encoding="utf-8"))
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", TEXT, re.M | re.S))
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def test_there_is_a_stage_for_each_role_and_the_page_builds_it() -> None:
    roles = {"device", "edge", "control-unit"}
    assert roles == STAGES.keys() - {"python", "board"}
    assert all(f"podman build --target {role} " in PAGE for role in roles)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = {
        line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.M) for name in line.split()]
    assert copied and set(copied) == kept
    assert all((ROOT / name).exists() for name in copied)


def test_pip_is_told_what_the_page_tells_it() -> None:
    for constraints in re.findall(r"-c src/(\S+)", TEXT):
        assert (ROOT / constraints).exists()
        assert f"-c src/{constraints}" in PAGE
    index = re.findall(r"--extra-index-url \S+", TEXT)
    assert len(index) == 1 and index[0] in PAGE
    installed = [re.findall(r'"\$@" (\S+)', STAGES[stage]) for stage in ("board", "control-unit")]
    assert installed == [["./src"], ["'./src[flower,data,metrics]'"]]
    assert all(words[0] in PAGE for words in installed)


@pytest.mark.parametrize("stage", ["device", "edge"])
def test_the_entry_point_is_a_command_of_ours(stage: str) -> None:
    (found,) = re.findall(r"^ENTRYPOINT (.*)$", STAGES[stage], re.M)
    program, command, *options = json.loads(found)
    assert (program, command) == ("collapipe", stage)
    commands = typer.main.get_command(app)
    commands.commands[command].make_context(command, options)  # type: ignore[attr-defined]


def test_the_control_unit_runs_beside_flower_s_supernode() -> None:
    (found,) = re.findall(r"^ENTRYPOINT (.*)$", STAGES["control-unit"], re.M)
    shell, option, script, name = json.loads(found)
    assert (shell, option, name) == ("sh", "-c", "sh")
    assert script.startswith("collapipe control-unit & exec collapipe supernode ")
    assert script.endswith('"$@"')
