"""Certificates: private keys stay private, nothing is overwritten unasked, new members can join."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.transport.certificates import Authority, list_names, sign_all
from collapipe_flwr.transport.tls import build_client_credentials, build_server_credentials


def test_keys_are_for_their_owner_only_and_certificates_name_member_and_host(tmp_path: Path):
    folder = tmp_path / "certs"
    files = sign_all(folder, {"pi-1": ["10.0.0.11", "pi-1.lan"]})["pi-1"]
    for key in (files.key, folder / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["pi-1", "pi-1.lan"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.11"]
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(files.ca.read_bytes()))


def test_nothing_is_replaced_unless_it_is_asked_for(tmp_path: Path):
    files = sign_all(tmp_path, {"pi-1": []})["pi-1"]
    pair = {path: path.read_bytes() for path in (files.key, files.certificate)}
    ca = files.ca.read_bytes()
    assert set(sign_all(tmp_path, {"pi-2": [], "pi-1": []})) == {"pi-2"}
    assert all(path.read_bytes() == data for path, data in pair.items())
    assert set(sign_all(tmp_path, {"pi-1": []}, renew=True)) == {"pi-1"}
    assert all(path.read_bytes() != data for path, data in pair.items())
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    assert files.ca.read_bytes() == ca
    sign_all(tmp_path, {"pi-1": []}, new_ca=True)
    assert files.ca.read_bytes() != ca


@pytest.mark.parametrize("lost", ["ca.key", "ca.pem"])
def test_half_a_ca_is_never_replaced_silently(tmp_path: Path, lost: str):
    sign_all(tmp_path, {"pi-1": []})
    (tmp_path / lost).unlink()
    left = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=f"{lost} is missing, .* --new-ca"):
        sign_all(tmp_path, {"pi-2": []})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize(
    "name", ["ca", "CA", "Ca", "", "../pi", "a/b", ".pi", "pi 1", "pï", "p" * 64]
)
def test_a_name_that_is_no_members_writes_nothing(tmp_path: Path, name: str):
    sign_all(tmp_path, {"pi-1": []})
    left = {path: path.read_bytes() for path in tmp_path.parent.rglob("*") if path.is_file()}
    for options in ({}, {"renew": True}, {"new_ca": True}):
        with pytest.raises(ConfigError, match="a member cannot be called"):
            sign_all(tmp_path, {"pi-2": [], name: []}, **options)
    assert left == {p: p.read_bytes() for p in tmp_path.parent.rglob("*") if p.is_file()}


@pytest.mark.parametrize("twin", ["PI-1", "pi-1."])
def test_names_that_clients_or_files_cannot_tell_apart_are_refused(tmp_path: Path, twin: str):
    with pytest.raises(ConfigError, match=r"the names .*'pi-1'.* cannot be told apart"):
        sign_all(tmp_path, {"pi-1": [], twin: []})
    sign_all(tmp_path, {"pi-1": []})
    with pytest.raises(ConfigError, match=r"the names .*'pi-1'.* cannot be told apart"):
        sign_all(tmp_path, {twin: []})
    sign_all(tmp_path, {twin: []}, new_ca=True)


@pytest.mark.parametrize("host", ["edge", "EDGE", "edge."])
def test_no_certificate_passes_as_another_member_by_its_host(tmp_path: Path, host: str):
    with pytest.raises(
        ConfigError, match=f"pi-1 is reached at '{host}', which is the name of another member"
    ):
        sign_all(tmp_path / "both", {"pi-1": [host], "edge": []})
    sign_all(tmp_path / "later", {"pi-1": [host]})
    with pytest.raises(ConfigError, match=rf"pi-1.pem, .* host '{host}': .* --new-ca"):
        sign_all(tmp_path / "later", {"edge": []})
    sign_all(tmp_path / "earlier", {"edge": ["10.0.0.2", "edge"]})
    with pytest.raises(ConfigError, match=r"pi-1 is reached at .*, which is the name of another"):
        sign_all(tmp_path / "earlier", {"pi-1": [host]})
    made = sign_all(tmp_path / "later", {"pi-1": ["10.0.0.11"], "edge": []}, renew=True)
    assert set(made) == {"pi-1", "edge"}


@pytest.mark.parametrize("host", ["*.lan", "pi 1", "hôte", "a,b"])
def test_a_host_is_an_address_or_a_host_name(tmp_path: Path, host: str):
    with pytest.raises(ConfigError, match=r"pi-1 is reached at .*: give an IP address or a host"):
        sign_all(tmp_path, {"pi-1": [host]})


class Cut(BaseException):
    """The power fails."""


class Power:
    """Fails before the system call of number ``lasts``; what was not yet synced is then empty."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lasts: int) -> None:
        self._left = lasts
        self._volatile: dict[int | str, str] = {}  # of an open file, and of a name
        for name in ("open", "fsync", "replace", "unlink"):
            monkeypatch.setattr(os, name, partial(self._call, name, getattr(os, name)))

    def _call(self, name: str, call, *arguments, **options):
        if self._left == 0:
            for path in set(self._volatile.values()):
                if Path(path).exists():
                    Path(path).write_bytes(b"")
            raise Cut
        self._left -= 1
        done = call(*arguments, **options)
        first = arguments[0]
        if name == "open" and arguments[1] & os.O_WRONLY:
            self._volatile[done] = str(first)
        if name == "fsync":
            self._volatile.pop(first, None)
        if name == "replace":
            moved = {fd: path for fd, path in self._volatile.items() if path == str(first)}
            self._volatile |= dict.fromkeys(moved, str(arguments[1]))
        return done


@pytest.mark.parametrize("option", ["first", "renew", "new_ca"])
def test_a_power_cut_leaves_no_pair_that_is_half_new_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
):
    members, options = {"pi-1": ["10.0.0.11"], "edge": []}, {option: True}
    cuts = 0
    while True:
        folder = tmp_path / str(cuts)
        if option == "first":
            options = {}
        else:
            sign_all(folder, members)
        try:
            with monkeypatch.context() as patched:
                Power(patched, cuts)
                sign_all(folder, members, **options)
            break
        except Cut:
            cuts += 1
        assert all(
            path.stat().st_size for kind in ("pem", "key") for path in folder.glob(f"*.{kind}")
        )
        try:
            sign_all(folder, members)
        except ConfigError as error:
            assert re.search("--renew|--new-ca", str(error))
            assert "--new-ca" in str(error) or not _all_stand(folder, members)
            sign_all(folder, members, renew=True, new_ca="--new-ca" in str(error))
        assert _all_stand(folder, members)
    assert cuts > 4 * len(members)


def _all_stand(folder: Path, members: Iterable[str]) -> bool:
    """Whether everybody can serve, and trusts everybody."""
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    authority = Authority(folder)
    try:
        for name in members:
            files = authority.locate_files(name)
            build_server_credentials(files)
            certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
            certificate.verify_directly_issued_by(ca)
    except (ConfigError, InvalidSignature, ValueError):
        return False
    return True


def test_a_key_of_another_certificate_is_named_at_the_start(tmp_path: Path):
    made = sign_all(tmp_path, {"pi-1": [], "pi-2": []})
    mixed = replace(made["pi-1"], key=made["pi-2"].key)
    for credentials in (build_server_credentials, build_client_credentials):
        with pytest.raises(
            ConfigError, match=r"pi-2.key is not the key of .*pi-1.pem .*collapipe certs --renew"
        ):
            credentials(mixed)
    made["pi-1"].key.write_bytes(b"")
    for credentials in (build_server_credentials, build_client_credentials):
        with pytest.raises(
            ConfigError, match=r"pi-1.key is not the key of .*pi-1.pem .*collapipe certs --renew"
        ):
            credentials(made["pi-1"])


def test_a_member_that_comes_later_is_signed_by_the_same_authority(tmp_path: Path):
    ca = sign_all(tmp_path, {"pi-1": []})["pi-1"].ca
    later = sign_all(tmp_path, {"pi-2": []})["pi-2"]
    assert later.ca.read_bytes() == ca.read_bytes()
    certificate = x509.load_pem_x509_certificate(later.certificate.read_bytes())
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca.read_bytes()))


def test_the_command_signs_for_every_member_of_its_cluster_files(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text('id = "g"\n[[device]]\nname = "pi-1"\naddress = "10.0.0.11:50071"\n')
    folder = tmp_path / "certs"
    command = ["certs", str(folder), "--cluster", str(file), "laptop=192.168.1.4"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    names = {"ca", "control-unit", "pi-1", "edge", "server", "laptop"}
    assert {path.stem for path in folder.glob("*.pem")} == names
    assert {path.stem for path in folder.glob("*.key")} == names
    before = (folder / "pi-1.pem").read_bytes()
    again = CliRunner().invoke(app, [*command, "pi-2=10.0.0.12"])
    assert again.exit_code == 0
    assert "pi-1: kept" in again.output and "pi-2.pem" in again.output
    assert (folder / "pi-1.pem").read_bytes() == before


def test_a_device_does_not_pass_as_the_edge_on_the_same_machine(tmp_path: Path):
    file, at = tmp_path / "c.toml", 'address = "127.0.0.1:'
    file.write_text(f'id = "g"\n[[device]]\nname = "pi-1"\n{at}1"\n[edge]\n{at}2"\n')
    done = CliRunner().invoke(app, ["certs", str(tmp_path / "certs"), "--cluster", str(file)])
    assert done.exit_code == 0, done.exception
    hosts = list_names(tmp_path / "certs")
    assert hosts["pi-1"] == ("pi-1",)
    assert hosts["edge"] == ("edge", "127.0.0.1")


def test_two_clusters_do_not_share_a_members_certificate(tmp_path: Path):
    for name in ("g", "w"):
        text = f'id = "{name}"\n[control-unit]\nname = "cu-{name}"\n'
        (tmp_path / f"{name}.toml").write_text(
            f'{text}[[device]]\nname = "pi-1"\naddress = "10.0.0.11:50071"\n'
        )
    files = [word for name in ("g", "w") for word in ("--cluster", str(tmp_path / f"{name}.toml"))]
    done = CliRunner().invoke(app, ["certs", str(tmp_path / "certs"), *files])
    assert isinstance(done.exception, ConfigError)
    assert "'pi-1' is a member of g and of w: names must differ" in str(done.exception)
    assert not (tmp_path / "certs").exists()
