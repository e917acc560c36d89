"""What a wheel needs comes from the index, or the page of wheels, that the inventory names."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from collapipe_flwr.deployment import roles
from collapipe_flwr.deployment.inventory import Access, Machine, MachineRole, read_inventory
from collapipe_flwr.deployment.ssh import Outcome, Result, read_results, write_script
from tests.testbed.ssh_site import pack_wheel

NEEDED, OURS = "shed_tools-0.1.0-py3-none-any.whl", "collapipe_flwr-0.1.0-py3-none-any.whl"


class Quiet(SimpleHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012

    def log_message(self, *_: object) -> None:
        self.asked.append(self.path)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A package index, which is nothing but a folder, on loopback; where it is."""
    folder = tmp_path / "index" / "simple" / "shed-tools"
    folder.mkdir(parents=True)
    pack_wheel(folder / NEEDED, {"shed_tools.py": b"SAID = 'shed 7'\n"}, "Name: shed-tools\n")
    handler = partial(Quiet, directory=str(tmp_path / "index"))
    Quiet.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


@pytest.fixture
def wheel(tmp_path: Path) -> str:
    """As small as can be, but for a command, and something that it needs."""
    code = b"import shed_tools\n\n\ndef main():\n    print(shed_tools.SAID)\n"
    metadata = "Name: collapipe-flwr\nRequires-Dist: shed-tools\n"
    script = "collapipe = collapipe_flwr:main"
    pack_wheel(tmp_path / OURS, {"collapipe_flwr.py": code}, metadata, script)
    return str(tmp_path / OURS)


def installed(access: Access) -> list[Result]:
    """The steps that install programs, carried out on this machine."""
    role = MachineRole(kind="device", name="pi-1", address="10.0.0.11", cluster="g")
    machine = Machine(host="10.0.0.11", access=access, roles=(role,))
    steps = list(roles._install_programs(machine))
    (Path(roles.OPT)).mkdir(exist_ok=True)
    script = write_script(steps, dry=False).replace("/opt\n", f"{roles.OPT}\n", 1)
    done = subprocess.run(
        ["bash", "-s"],
        input=f"main() {{\n{script}\n}}\nmain\n",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return read_results(done.stdout, "pi-1", steps)


def environment() -> dict[str, str]:
    """Of a machine that has nothing of ours."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHONPATH"))}
    return kept | {"PIP_NO_CACHE_DIR": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "0"}


def said(opt: Path) -> str:
    command = [str(opt / "venv/bin/collapipe")]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize("kind", ["index", "find-links"])
def test_what_is_needed_comes_from_the_place_of_the_inventory_and_once(
    tmp_path: Path, index: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "OPT", str(tmp_path / "opt"))
    places = {"index": f"{index}/simple", "find-links": f"{index}/simple/shed-tools/"}
    inventory = tmp_path / "boards.toml"
    inventory.write_text(
        f'cluster = "g"\nwheel = "{OURS}"\n{kind} = "{places[kind]}"\n'
        '[control-unit]\nhost = "10.0.0.10"\n[[device]]\nname = "pi-1"\nhost = "10.0.0.11"\n'
    )
    access = read_inventory(inventory).machines[1].access
    pip = tmp_path / "own" / "bin" / "pip"  # of an environment that was named before
    pip.parent.mkdir(parents=True)
    pip.write_text(f"#!/bin/sh\ntouch {tmp_path}/changed\n")
    pip.chmod(0o755)
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "venv").symlink_to(tmp_path / "own")
    found = installed(access)
    assert not (tmp_path / "changed").exists() and pip.exists()
    assert found[-1].outcome is Outcome.DID, found
    assert said(tmp_path / "opt") == "shed 7"
    assert any(path.endswith(NEEDED) for path in Quiet.asked)
    asked = len(Quiet.asked)
    assert {result.outcome for result in installed(access)} == {Outcome.KEPT}
    assert len(Quiet.asked) == asked


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_index_that_does_not_answer_is_told(
    tmp_path: Path, wheel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "OPT", str(tmp_path / "opt"))
    found = installed(Access(wheel=wheel, find_links="http://127.0.0.1:9/"))
    assert found[-1].outcome is Outcome.FAILED and "shed-tools" in found[-1].why
