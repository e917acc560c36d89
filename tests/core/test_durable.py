"""Files and folders are whole or absent, and a killed writer's rubbish does not stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from collapipe_flwr.core.durable import append_text, clean, draft, make_folder, publish, write_text
from tests.full_disk import full_disk
from tests.power_cuts import rebuilt, watched

LARGE = "x" * 100_000
WRITER = """
import sys
from pathlib import Path
from collapipe_flwr.core.durable import draft, publish
path = Path(sys.argv[1])
with draft(path) as written:
    written.write_text("from another process")
    print("ready", flush=True)
    sys.stdin.readline()
    publish(written, path)
"""


def test_after_every_cut_a_file_holds_what_it_did_before_or_after(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with watched(root) as disk:
        for number in (1, 2, 3):
            make_folder(root / "a" / "b")
            write_text(root / "a" / "b" / "file", f"{number}" * 100)
            disk.done = number
    for number, (done, tree) in enumerate(disk.found):
        file = rebuilt(tree, tmp_path / str(number)) / "a" / "b" / "file"
        found = int(file.read_text()[:1]) if file.exists() else 0
        assert found in (done, done + 1)
        assert not found or file.read_text() == f"{found}" * 100


def test_after_every_cut_only_the_end_of_what_was_appended_last_lacks(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with watched(root) as disk:
        for number in (1, 2, 3):
            append_text(root / "lines", f"line {number}\n")
            disk.done = number
    for number, (done, tree) in enumerate(disk.found):
        file = rebuilt(tree, tmp_path / str(number)) / "lines"
        text = file.read_text() if file.exists() else ""
        assert text.startswith("".join(f"line {n}\n" for n in range(1, done + 1)))


def test_a_full_disk_is_an_os_error_whoever_writes_and_leaves_all_as_it_was(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "before")
    with full_disk():
        with pytest.raises(OSError, match="File too large"):
            write_text(tmp_path / "file", LARGE)
        with pytest.raises(OSError, match="File too large"), draft(tmp_path / "file") as written:
            save_file({"a": torch.zeros(10_000)}, written)
    assert (tmp_path / "file").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_writer_left_goes_with_the_next_write_of_that_file(tmp_path: Path) -> None:
    writer, path = _writer(tmp_path), tmp_path / "file"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    (left,) = tmp_path.iterdir()
    other = left.with_name(left.name.replace("file.", "other."))
    other.mkdir()
    write_text(path, "new")
    assert {found.name for found in tmp_path.iterdir()} == {"file", other.name}
    clean(tmp_path)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_nobody_elses_file_or_folder_is_deleted_whatever_it_is_called(tmp_path: Path) -> None:
    files = {"film.mp4.partial", "file.partial", "file.abcdefgh.collapipe.partial"}
    folders = {"backup.partial", "file.abcdefgh.partial", "file.x.collapipe.partial", ".partial"}
    for name in files:
        (tmp_path / name).write_text("a user's")
    for name in folders:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("a user's")
    (tmp_path / "file.linked00.collapipe.partial").symlink_to(tmp_path / "backup.partial")
    before = {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}
    write_text(tmp_path / "file", "new")
    clean(tmp_path)
    (tmp_path / "file").unlink()
    assert {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")} == before


def test_a_writer_that_lives_is_left_alone_by_others(tmp_path: Path) -> None:
    writer, path = _writer(tmp_path), tmp_path / "file"
    clean(tmp_path)
    write_text(path, "from here")
    assert path.read_text() == "from here"
    writer.communicate("go on\n")
    assert writer.returncode == 0
    assert path.read_text() == "from another process"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_two_drafts_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with draft(path) as first, draft(path) as second:
        first.write_text("first")
        second.write_text("second")
        publish(second, path)
        publish(first, path)
    assert path.read_text() == "first"


def _writer(folder: Path) -> subprocess.Popen[str]:
    """A process in the middle of writing."""
    command = [sys.executable, "-c", WRITER, str(folder / "file")]
    pipe = subprocess.PIPE
    writer = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


@pytest.mark.parametrize("torn", ["", '{"a": 1', "x" * 200_000, "\0" * 70_000])
@pytest.mark.parametrize("before", ["", "one\n", "one\n" + "y" * 100_000 + "\n"])
def test_nothing_is_glued_to_a_torn_line(tmp_path: Path, before: str, torn: str) -> None:
    path = tmp_path / "lines"
    path.write_text(before + torn)
    append_text(path, "two\n")
    assert path.read_text() == before + "two\n"
