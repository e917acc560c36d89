"""Slips of somebody in a hurry end in one sentence that names them, and change nothing."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.core.errors import CollaPipeError

SECRET = base64.urlsafe_b64encode(bytes(48)).decode()
TOKEN = f"g@127.0.0.1:1/{SECRET}"
CLUSTER = 'id = "g"\n[[device]]\nname = "pi-1"\naddress = "127.0.0.1:1"\n'
INVENTORY = (
    'cluster = "g"\nenvironment = "/opt/v"\ncontrol-unit.hosts = "a"\n'
    '[[device]]\nname = "pi-1"\nhost = "10.0.0.11"\n'
)
FILES = {"c.toml": CLUSTER, "i.toml": INVENTORY, "broken.toml": 'id = "a\n', "file": "hello"}
INIT = ("cluster", "init", "shed", "--no-measure", "--folder", "new")
HERE = ("--address", "127.0.0.1")
PLAIN = ("--listen", "127.0.0.1:0")
SLIPS = [
    (("deploy", "nowhere.toml"), "nowhere.toml cannot be read"),
    (("deploy", "."), "is a directory"),
    (("deploy", "broken.toml"), "is not TOML"),
    (("deploy", "c.toml"), "is a cluster file"),
    (("deploy", "i.toml"), "did you mean control-unit.host"),
    (("deploy", "i.toml", "--deadline-s", "0"), "--deadline-s"),
    (("cluster", "check", "i.toml"), "is an inventory"),
    (("cluster", "check", "c.toml", "--width", "33"), "width must be a multiple"),
    (("cluster", "check", "c.toml", "--json", "file/f.json"), "--json"),
    (("cluster", "check", "nowhere.toml"), "nowhere.toml cannot be read"),
    (("cluster", "status", "--folder", "file"), "no cluster is kept in file"),
    (("cluster", "token", "--role", "devices"), "devices"),
    (("cluster", "token", "--minutes", "1e300"), "--minutes"),
    (("cluster", "remove"), "MEMBER"),
    (("cluster", "serve", "--folder", "new"), "no cluster is kept"),
    (("cluster", "init", "my cluster", *HERE), "NAME must be a name"),
    (("cluster", "init", "a/b", *HERE), "NAME must be a name"),
    ((*INIT, "--address", "10.0.0.1:99999"), "--address"),
    ((*INIT, "--address", "10.0.0.1 "), "--address"),
    ((*INIT, "--address", "10.0.0.256"), "--address"),
    ((*INIT, "--address", "http://10.0.0.1"), "--address"),
    ((*INIT, *HERE, "--edge-address", "10.0.0.2"), "--edge-address"),
    (("join", ""), "not a join token"),
    (("join", "abc"), "not a join token"),
    (("join", f"g@127.0.0.1:99999/{SECRET}"), "not a join token"),
    (("join", TOKEN, "--name", "my pi", "--folder", "new"), "--name"),
    (("join", TOKEN, "--address", "a:b", "--folder", "new"), "--address"),
    (("join", TOKEN, "--kind", "toaster", "--folder", "new"), "--kind"),
    (("join", TOKEN, "--folder", "file"), "--folder"),
    (("device", "--listen", "here"), "--listen"),
    (("device", "--listen", "127.0.0.1:99999"), "--listen"),
    (("device", "--listen", "10.0.0.1:50071"), "--insecure"),
    (("device", "--cluster", "nowhere.toml"), "nowhere.toml cannot be read"),
    (("device", "--cluster", "c.toml", "--name", "pi-2"), "pi-1"),
    (("device", "--cluster", "new", "--name", "pi-2"), "new"),
    (("device", "--cluster", ".", "--name", "pi-2"), "broken.toml is not TOML"),
    (("device", "--tls-ca", "file"), "--tls-cert is missing"),
    (("device", *PLAIN, "--compute", "gpu"), "--compute"),
    (("device", *PLAIN, "--import", "no_such_module"), "--import no_such_module"),
    (("device", *PLAIN, "--energy-sensor", "toaster"), "--energy-sensor"),
    (("edge", *PLAIN, "--state-dir", "file"), "--state-dir"),
    (("certs", "new"), "no members to sign for"),
    (("certs", "new", "a b"), "'a b'"),
    (("certs", "new", "superlink="), "no host"),
    (("certs", "new", "superlink=10.0.0.256"), "10.0.0.256"),
    (("certs", "new", "superlink=http://10.0.0.1"), "http://10.0.0.1"),
    (("certs", "new", "superlink:10.0.0.1"), "superlink:10.0.0.1"),
    (("certs", "new", "ca"), "'ca'"),
    (("certs", "new", "pi-1", "--days", "99999999"), "--days"),
    (("certs", "file", "pi-1"), "file"),
]


@pytest.mark.parametrize(
    ("words", "named"),
    SLIPS,
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)
def test_a_slip_is_named_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], named: str
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLLAPIPE_FOLDER", "default")
    done = CliRunner().invoke(app, list(words))
    if isinstance(done.exception, SystemExit):  # typer's own sentence
        assert done.exit_code == 2
        said = done.stderr
    else:
        assert isinstance(done.exception, CollaPipeError), done.exception
        said = str(done.exception)
        assert "\n" not in said and len(said) < 400
    assert named.casefold() in said.casefold() and SECRET not in said
    assert not list(tmp_path.rglob("*.key")) and not list(tmp_path.rglob("*.pem"))
