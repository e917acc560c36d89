"""Certificates: private keys stay private, nothing is overwritten unasked, new members can join."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.rpc.authority import sign_all


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
