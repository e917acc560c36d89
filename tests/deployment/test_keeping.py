"""What the page says of backups, new names and a SuperLink's certificate, carried out."""

from __future__ import annotations

import re
import ssl
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.config.cluster_file import Role
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.membership.admission import JoiningService
from collapipe_flwr.membership.registry import Registry
from collapipe_flwr.transport.roster import check_roster
from tests.docs import pages
from tests.membership.clusters import (
    ID,
    board,
    joined,
    names,
    new_registry,
    print_token,
)

DEPLOY, BOARDS = (pages.ROOT / "docs" / name for name in ("deploy.md", "tutorials/boards.md"))
KEPT = Path("etc/collapipe/control-unit")


def line(page: Path, words: str) -> str:
    """The only line of the page's commands that has these words."""
    shown = "".join(block.text for block in pages.blocks("bash") if block.page == page)
    (found,) = (each for each in shown.replace("\\\n", "").splitlines() if words in each)
    return found


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    folder = tmp_path / "old" / KEPT
    folder.parent.mkdir(parents=True)
    return new_registry(folder, elsewhere=frozenset({Role.EDGE}))


def test_a_copy_that_was_restored_is_the_registrar_that_members_know(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    member = joined(joining, print_token(registry), board(tmp_path, "pi-1"))
    old, new, copy = tmp_path / "old", tmp_path / "new", tmp_path / "collapipe.tar.gz"
    (old / "var/lib/collapipe/huggingface").mkdir(parents=True)
    (old / "var/lib/collapipe/huggingface/large").touch()
    new.mkdir()
    for words in ("tar -czpf", "tar -xzpf"):
        text = line(DEPLOY, words).replace("sudo ", "").replace("/root/collapipe.tar.gz", str(copy))
        text = text.replace("cd /", f"cd {old}").replace("-C /", f"-C {new}")
        subprocess.run(["bash", "-ec", text], check=True, timeout=60)
    assert copy.stat().st_mode & 0o077 == 0  # it has the key of the CA
    assert not list(new.rglob("large"))
    again = Registry(new / KEPT)
    assert names(again.cluster()) == {"pi-1"}
    folder = member.cluster.folder
    check_roster(again.roster(again.cluster()), folder / "certs" / "ca.pem")
    with JoiningService(again, "127.0.0.1:0") as listening:
        joined(listening, print_token(again), board(tmp_path, "pi-2", 1001))
    assert names(again.cluster()) == {"pi-1", "pi-2"}


def test_a_copy_that_is_older_than_the_members_catches_up_by_its_version(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    path = registry.cluster().path
    assert path is not None
    member = joined(joining, print_token(registry), board(tmp_path, "pi-1"))
    older = path.read_text()
    joined(joining, print_token(registry), board(tmp_path, "pi-2", 1001))
    files = member.cluster.tls_files("pi-1")
    assert files is not None and files.ca is not None
    rosters = Rosters("pi-1", [member.cluster], files.ca)
    newest = rosters.accept(registry.roster(registry.cluster()))
    path.write_text(older)
    assert rosters.accept(registry.roster(registry.cluster())) == newest  # what it has stays
    path.write_text(re.sub(r"(?m)^version = .*", f"version = {newest + 1}", older))
    assert rosters.accept(registry.roster(registry.cluster())) == newest + 1


def test_a_board_gets_another_name_in_its_folder_by_another_token(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    folder = tmp_path / "here"
    joined(joining, print_token(registry), board(folder.parent, "here"))
    with registry.lock():
        registry.remove(registry.cluster(ID), "here")
    newcomer = board(folder.parent, "here")
    with pytest.raises(LinkError, match="was removed"):
        joined(joining, print_token(registry), newcomer)
    renamed = type(newcomer)(folder=folder, name="shelf", address=newcomer.address)
    found = joined(joining, print_token(registry), renamed)
    assert found.name == "shelf" and names(registry.cluster()) == {"shelf"}


def test_the_clusters_ca_signs_for_a_superlink_at_its_addresses(registry: Registry) -> None:
    words = line(BOARDS, "superlink=127.0.0.1").split()[1:]
    certs = registry.certs
    done = CliRunner().invoke(app, [words[0], str(certs), *words[2:]], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certs / "superlink.pem", certs / "superlink.key")
    client = ssl.create_default_context(cafile=str(certs / "ca.pem"))
    for host in (word.partition("=")[2] for word in words[2:]):
        shake(server, client, host)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(server, client, "10.0.0.99")
    assert names(registry.cluster()) == set()  # and it is a member of none


def shake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """A handshake in memory, by which the client verifies the server at this host."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(back, there, server_hostname=host)
    theirs = server.wrap_bio(there, back, server_side=True)
    for end in (ours, theirs, ours, theirs):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert ours.getpeercert()
