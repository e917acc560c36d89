"""Texts over mutual TLS: clients of the CA are served, others are not, and neither hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from collapipe_flwr.config.access_control import access_control
from collapipe_flwr.config.cluster_file import read_cluster
from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.transport import generation
from collapipe_flwr.transport import server as servers
from collapipe_flwr.transport.certificates import Authority, sign_all
from collapipe_flwr.transport.generation import GenerateRequest, TextClient, TextServer
from collapipe_flwr.transport.methods import make_channel_options


def echo(request: GenerateRequest) -> Iterator[str]:
    yield from request.text.split()


def test_only_who_the_ca_signed_gets_a_text(tmp_path: Path) -> None:
    ours = sign_all(tmp_path / "ours", {"cu": ["127.0.0.1"], "laptop": []})
    theirs = sign_all(tmp_path / "theirs", {"laptop": []})["laptop"]
    forged = TlsFiles(ca=ours["cu"].ca, certificate=theirs.certificate, key=theirs.key)
    with TextServer("127.0.0.1:0", echo, most=1, tls=ours["cu"]) as server:
        with TextClient(server.address, tls=ours["laptop"], deadline_s=20) as client:
            assert list(client.write(GenerateRequest(text="a b"))) == ["a", "b"]
        for files in (None, theirs, forged, TlsFiles(ca=ours["cu"].ca)):
            with (
                TextClient(server.address, tls=files, deadline_s=5) as client,
                pytest.raises(LinkError, match="text server at"),
            ):
                list(client.write(GenerateRequest(text="a")))


def test_members_ask_in_their_roles_and_guests_by_name(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('id = "g"\n[[device]]\nname = "pi-1"\naddress = "127.0.0.1:1"\n')
    names = ("control-unit", "pi-1", "edge", "server", "guest", "stranger")
    files = sign_all(tmp_path / "certs", {name: ["127.0.0.1"] for name in names})
    access = access_control([read_cluster(file)], ["guest"])
    with TextServer("127.0.0.1:0", echo, most=1, tls=files["edge"], access=access) as server:
        for name in names:
            with TextClient(server.address, tls=files[name], deadline_s=20) as client:
                if name in ("control-unit", "guest"):
                    assert list(client.write(GenerateRequest(text="a b"))) == ["a", "b"]
                    continue
                why = "is no member here" if name == "stranger" else f"{name} is a .*: it may not"
                with pytest.raises(ConfigError, match=why):
                    list(client.write(GenerateRequest(text="a")))


def test_a_host_called_like_the_control_unit_may_not_ask(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ours = authority.issue("control-unit", ["127.0.0.1"])
    file = tmp_path / "c.toml"
    file.write_text('id = "g"\n[[device]]\nname = "pi-1"\naddress = "127.0.0.1:1"\n')
    access = access_control([read_cluster(file)], ["guest"])
    with TextServer("127.0.0.1:0", echo, most=1, tls=ours, access=access) as server:
        for claimed in ("control-unit", "guest"):
            removed = authority.issue("removed", [claimed])
            with (
                TextClient(server.address, tls=removed, deadline_s=20) as client,
                pytest.raises(ConfigError, match="names removed, which is no member here"),
            ):
                list(client.write(GenerateRequest(text="a")))


def test_a_client_is_as_patient_as_a_server() -> None:
    with TextClient("127.0.0.1:1") as client:
        assert client.deadline_s == generation._LONGEST_S


def test_a_caller_that_never_says_what_it_wants_frees_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "_MESSAGE_S", 0.5)
    silence = threading.Event()

    def nothing() -> Iterator[bytes]:
        silence.wait(20)
        yield from ()

    with (
        TextServer("127.0.0.1:0", echo, most=1) as server,
        grpc.insecure_channel(server.address, make_channel_options()) as channel,
    ):
        call = channel.stream_stream("/collapipe.Texts/Write", None, None)(nothing())
        with TextClient(server.address, deadline_s=15) as client:
            assert list(client.write(GenerateRequest(text="a b"))) == ["a", "b"]
        with pytest.raises(grpc.RpcError):
            next(call)
        silence.set()


def test_whatever_is_sent_is_refused_and_the_next_text_written() -> None:
    wish = '{"text": "a", "%s": %s}'
    odd = [
        *(b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"text": 5}', b"[" * 10**5, b"9" * 10**5),
        *((wish % each).encode() for each in (("top_p", "NaN"), ("temperature", "Infinity"))),
        *((wish % each).encode() for each in (("num_beams", 10**9), ("seed", 2**63))),
        *((wish % each).encode() for each in (("stop", '["\\ud800"]'), ("../../x", 1))),
        b'{"text": "\\ud800"}',
    ]
    with (
        TextServer("127.0.0.1:0", echo, most=1) as server,
        grpc.insecure_channel(server.address, make_channel_options()) as channel,
    ):
        for message in odd:
            call = channel.stream_stream("/collapipe.Texts/Write", None, None)(iter([message]))
            with pytest.raises(grpc.RpcError) as refusal:
                list(call)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT, message[:80]
        with TextClient(server.address, deadline_s=15) as client:
            assert list(client.write(GenerateRequest(text="a b"))) == ["a", "b"]
