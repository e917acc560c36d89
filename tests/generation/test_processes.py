"""`collapipe generate` over real daemons with mutual TLS writes what the unsplit model writes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.config.cluster_file import read_cluster
from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.generation.text_generator import text_generator
from collapipe_flwr.generation.text_model import TextModel
from collapipe_flwr.transport.certificates import sign_all
from collapipe_flwr.transport.client import HostClient
from collapipe_flwr.transport.generation import GenerateRequest, TextClient
from tests.cluster.daemon_processes import ROOT, Daemon, first_line, running, tls_options
from tests.forked import start
from tests.generation.conftest import TEXTS
from tests.generation.test_text_generator import NEW, unsplit

DEVICES = ("d0", "d1", "d2")
MEMBERS = (*DEVICES, "edge", "control-unit", "laptop", "stranger")


@dataclass(frozen=True, kw_only=True)
class Shed:
    """Running daemons and the cluster file that names them."""

    file: Path
    devices: dict[str, Daemon]

    def sessions(self) -> int:
        """On all hosts that answer."""
        cluster, total = read_cluster(self.file), 0
        for member in (*cluster.devices, cluster.edge):
            if member.name in self.devices and self.devices[member.name].process.poll() is not None:
                continue
            tls = cluster.tls_files("control-unit")
            with HostClient(member.address, tls=tls, certificate_name=member.name) as client:
                total += client.ask_health().sessions
        return total


@pytest.fixture
def shed(tmp_path: Path) -> Iterator[Shed]:
    files = sign_all(tmp_path / "certs", dict.fromkeys(MEMBERS, ()))
    allow = ["--allow", "control-unit"]
    daemons = [
        Daemon("device", "--name", name, *allow, *_before(name), tls=files[name])
        for name in DEVICES
    ]
    edge = Daemon("edge", *allow, "--allow", DEVICES[-1], "--allow", "d1", tls=files["edge"])
    with running(*daemons, edge):
        tables = "".join(
            f'[[device]]\nname = "{name}"\naddress = "{daemon.address}"\n'
            for name, daemon in zip(DEVICES, daemons, strict=True)
        )
        file = tmp_path / "shed.toml"
        file.write_text(f'id = "shed"\n{tables}[edge]\naddress = "{edge.address}"\n[tls]\n')
        yield Shed(file=file, devices=dict(zip(DEVICES, daemons, strict=True)))


def _before(name: str) -> list[str]:
    """Who may pass activations to a device: those in front of it, one of which may be lost."""
    return [word for other in DEVICES[: DEVICES.index(name)] for word in ("--allow", other)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.long
def test_the_command_and_servers_over_daemons(
    shed: Shed, translator: Path, storyteller: Path, talker: Path
) -> None:
    """A translation by the command alone; stories by a server, for whom it allows; then chats."""
    words = ["--run", str(translator), "--cluster", str(shed.file), "--max-new-tokens", str(NEW)]
    words += [word for text in TEXTS[:2] for word in ("--text", text)]
    done = CliRunner().invoke(app, ["generate", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "".join(unsplit(translator, text) + "\n" for text in TEXTS[:2])
    assert shed.sessions() == 0
    _check_server(shed, storyteller)
    assert shed.sessions() == 0
    _check_chats(shed, talker)
    assert shed.sessions() == 0


@contextmanager
def _serving(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A command that serves until it is told to stop, and then ends well."""
    server = start("collapipe_flwr.cli", *words, env=ENVIRONMENT)
    try:
        yield server
        server.terminate()
        assert server.wait(120) == 0
    finally:
        server.kill()
        server.wait(60)
        assert server.stdout is not None
        server.stdout.close()


def _check_server(shed: Shed, run_dir: Path) -> None:
    certs = shed.file.parent / "certs"

    def member(name: str) -> TlsFiles:
        return TlsFiles(
            ca=certs / "ca.pem", certificate=certs / f"{name}.pem", key=certs / f"{name}.key"
        )

    words = ["--run", str(run_dir), "--cluster", str(shed.file), "--listen", "127.0.0.1:0"]
    words += ["--allow", "laptop", *tls_options(member("control-unit"))]
    with _serving("generate", *words) as server:
        address = first_line(server).rpartition(" ")[2]
        name = {"certificate_name": "control-unit"}
        with TextClient(address, tls=member("laptop"), **name) as client:
            pieces = list(client.write(GenerateRequest(text=TEXTS[0], max_new_tokens=NEW)))
            assert "".join(pieces) == unsplit(run_dir, TEXTS[0])
            assert len(pieces) > 1
        with (
            TextClient(address, tls=member("stranger"), **name) as client,
            pytest.raises(ConfigError, match="names stranger, which is no member here"),
        ):
            list(client.write(GenerateRequest(text=TEXTS[0])))


def _check_chats(shed: Shed, run_dir: Path) -> None:
    """A device is killed in the midst of an answer, which goes on without it."""
    pytest.importorskip("openai", reason="the openai client, of the extra test, is missing")
    from tests.generation import test_chat_server as chats

    words = [str(run_dir), "--cluster", str(shed.file), "--port", "0"]
    with _serving("serve", *words) as server:
        assert server.stdout is not None
        url = first_line(server).rpartition(" ")[2]
        token = server.stdout.readline().strip().removeprefix("token: ")
        with chats.client_of(url, token) as client:
            stream = client.chat.completions.create(
                model=run_dir.name,
                messages=chats.TALKS[0],
                max_tokens=60,
                temperature=0,
                stream=True,
            )
            text = next(stream).choices[0].delta.content
            shed.devices["d1"].process.kill()
            text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == chats.unsplit(run_dir, chats.TALKS[0], 60)[0]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["translator", "storyteller"])
def test_a_device_killed_in_the_middle_of_a_text(
    shed: Shed, which: str, request: pytest.FixtureRequest
) -> None:
    run_dir: Path = request.getfixturevalue(which)
    model = TextModel.load(run_dir)
    asked = GenerateRequest(text=TEXTS[0], max_new_tokens=NEW)
    with text_generator(model, read_cluster(shed.file), slots=2, deadline_s=30.0) as writer:
        text = writer.write(asked)
        pieces = [next(text)]
        shed.devices["d1"].process.kill()
        pieces += list(text)
        assert "".join(pieces) == unsplit(run_dir, TEXTS[0])
        assert "".join(writer.write(asked)) == unsplit(run_dir, TEXTS[0])
        if which == "storyteller":
            for name in ("d0", "d2"):
                shed.devices[name].process.kill()
            with pytest.raises(LinkError, match="no device of the cluster answers any more"):
                list(writer.write(asked))
    if which == "translator":
        assert shed.sessions() == 0
