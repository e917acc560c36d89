"""docs/install.md: every board's command resolves for its processor and Python."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
BOARDS = [
    [cell.strip() for cell in line.strip("| ").split("|")]
    for line in PAGE.partition("## One command per board")[2].partition("\n### ")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| board")
]
# The index of torch's CPU builds is not asked, so here an old PC gets the registry's build.
SECTIONS = {
    "Raspberry Pi OS 12": "Raspberry Pi OS 12 and 13",
    "Raspberry Pi OS 13": "Raspberry Pi OS 12 and 13",
    "JetPack 7": "JetPack 7 (Orin, Thor)",
    "JetPack 6": "JetPack 6 (Orin)",
    "Debian 12": "Old PC",
}
LIBC = "manylinux_2_28"  # as the page asks for
HEAVY = {"flwr", "ray", "cvxpy", "datasets", "sacrebleu"}


def command(system: str) -> list[str]:
    """What follows `pip install` in the section of a board."""
    title = next(section for name, section in SECTIONS.items() if system.startswith(name))
    text = PAGE.partition(f"### {title}\n")[2].partition("\n### ")[0]
    (found,) = re.findall(r"^venv/bin/pip install (.*)$", text, re.M)
    words = [word.replace("src", ".", 1) for word in shlex.split(found)]
    if "--extra-index-url" in words:
        at = words.index("--extra-index-url")
        del words[at : at + 2]
    return words


def resolved(words: list[str], machine: str, python: str, folder: Path) -> dict[str, str]:
    """Versions by name of what would be installed; markers are those of the board."""
    uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    assert uv is not None, "uv comes with flwr"
    board = ["--python-platform", f"{machine}-{LIBC}", "--python-version", python]
    binary = ["--only-binary", ":all:", "--no-binary", "collapipe-flwr"]  # but the project itself
    rest = [*board, *binary, *words]
    done = subprocess.run(
        [uv, "pip", "install", "--dry-run", "--system-certs", "--target", str(folder), *rest],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^ \+ (\S+)==(\S+)$", done.stderr, re.M))


def online() -> bool:
    try:
        socket.create_connection(("pypi.org", 443), 10.0).close()
    except OSError:
        return False
    return True


def test_each_board_has_its_row_and_its_command() -> None:
    assert len(BOARDS) == len(SECTIONS) == 5
    for board, system, python, torch, _ in BOARDS:
        words = command(system)
        assert words[-1] == "./.", board
        constraints = (ROOT / words[words.index("-c") + 1]).read_text()
        pinned = re.findall(r"^torch==([\d.]+)", constraints, re.M)
        assert pinned == [torch.partition(",")[0]]
        assert python >= "3.11"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "deploy" / "constraints").glob("*.txt")), ids=lambda file: file.name
)
def test_constraints_of_boards_choose_torch_and_nothing_else(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert [line.partition("==")[0] for line in lines] == ["torch", "-c ../../constraints.txt"]
    assert (file.parent / "../../constraints.txt").resolve() == ROOT / "constraints.txt"


@pytest.mark.slow
@pytest.mark.parametrize("extras", ["", "[flower,data,metrics]"], ids=["device", "control-unit"])
@pytest.mark.parametrize("row", BOARDS, ids=lambda row: row[1])
def test_the_command_resolves_for_the_board(row: list[str], extras: str, tmp_path: Path) -> None:
    if not online():
        pytest.skip("the package registry cannot be reached")
    board, system, python, torch, _ = row
    *options, project = command(system)
    machine = "x86_64" if board == "old PC" else "aarch64"
    found = resolved([*options, project + extras], machine, python.partition(",")[0], tmp_path)
    assert found["torch"] == torch.partition(",")[0]
    assert HEAVY & found.keys() == (HEAVY - {"ray", "cvxpy"} if extras else set())
    with_cuda = any(name.startswith("nvidia-") for name in found)
    assert with_cuda == (machine == "x86_64" or not torch.endswith("CPU"))
    assert extras or with_cuda or len(found) < 40
