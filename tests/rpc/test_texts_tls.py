"""Texts over mutual TLS: clients of the CA are served, others are not, and neither hangs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.tls_files import TlsFiles
from collapipe_flwr.rpc.authority import sign_all
from collapipe_flwr.rpc.texts import TextClient, TextServer, Wish


def echo(wish: Wish) -> Iterator[str]:
    yield from wish.text.split()


def test_only_who_the_ca_signed_gets_a_text(tmp_path: Path) -> None:
    ours = sign_all(tmp_path / "ours", {"cu": ["127.0.0.1"], "laptop": []})
    theirs = sign_all(tmp_path / "theirs", {"laptop": []})["laptop"]
    forged = TlsFiles(ca=ours["cu"].ca, certificate=theirs.certificate, key=theirs.key)
    with TextServer("127.0.0.1:0", echo, most=1, tls=ours["cu"]) as server:
        with TextClient(server.address, tls=ours["laptop"], deadline_s=20) as client:
            assert list(client.write(Wish(text="a b"))) == ["a", "b"]
        for files in (None, theirs, forged, TlsFiles(ca=ours["cu"].ca)):
            with (
                TextClient(server.address, tls=files, deadline_s=5) as client,
                pytest.raises(LinkError, match="text server at"),
            ):
                list(client.write(Wish(text="a")))
