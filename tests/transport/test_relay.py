"""Devices that only dial out: their peers reach them where the control unit relays."""

from __future__ import annotations

import asyncio
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collapipe_flwr.config.cluster_file import ClusterConfig, parse_cluster
from collapipe_flwr.core.errors import LinkError, Unreachable
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.host.server import Listener
from collapipe_flwr.transport import relay
from collapipe_flwr.transport.certificates import sign_all
from collapipe_flwr.transport.client import HostClient
from collapipe_flwr.transport.diagnosis import diagnose
from collapipe_flwr.transport.dialing import Dialing
from collapipe_flwr.transport.relay import DialRelay, run_relay, run_until, splice
from tests.ports import free_port
from tests.threads import none_left

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_LOOK_S", 0.05)
    monkeypatch.setattr("collapipe_flwr.transport.dialing._FIRST_PAUSE_S", 0.05)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ClusterConfig:
    """Two devices that dial, and one that does not."""
    folder = tmp_path_factory.mktemp("cluster")
    devices = [{"name": name, "dials": True} for name in ("d0", "d1")]
    devices.append({"name": "d2", "address": "127.0.0.1:1"})
    values = {"id": "A", "relay": f"127.0.0.1:{free_port()}", "control-unit": {"name": "cu"}}
    found = parse_cluster({**values, "device": devices, "tls": {}}, folder)
    sign_all(folder / "certs", dict.fromkeys(found.names, ()))
    return found


def files(config: ClusterConfig, name: str) -> TlsFiles:
    found = config.tls_files(name)
    assert found is not None
    return found


def dialling(config: ClusterConfig, name: str, at: str, listens: str = "", **more) -> Dialing:
    tls = files(config, name)
    return Dialing(relay=at, unit="cu", tls=tls, listens=listens or "127.0.0.1:1", **more)


@contextmanager
def device(config: ClusterConfig, name: str, at: str) -> Iterator[queue.Queue[str]]:
    """A daemon that dials in; the queue gets its name each time that it was let in."""
    admitted = queue.Queue[str]()
    with (
        Listener("127.0.0.1:0", None, tls=files(config, name)) as listener,
        dialling(config, name, at, listener.address, on_admitted=lambda: admitted.put(name))(),
    ):
        assert admitted.get(timeout=WAIT_S) == name
        yield admitted


def client(config: ClusterConfig, name: str, at: str, as_: str = "cu") -> HostClient:
    tls = files(config, as_)
    return HostClient(at, what=name, tls=tls, certificate_name=name, deadline_s=WAIT_S)


def refusal(dialer: Dialing) -> str:
    with pytest.raises(LinkError) as refused:
        asyncio.run(dialer.serve_once())
    return str(refused.value)


def test_each_device_is_reached_by_its_name_at_one_address(config: ClusterConfig) -> None:
    with none_left(), DialRelay("127.0.0.1:0", lambda: [config]) as there, ExitStack() as stack:
        for name in ("d0", "d1"):
            stack.enter_context(device(config, name, there.address))
        for name in ("d0", "d1", "d0"):
            with client(config, name, there.address, as_="d2") as peer:
                peer.echo(bytes(3_000_000))
                assert peer.ask_status().unix_s > 0  # from who proved that name, end to end


def test_a_device_that_is_away_is_so_in_one_sentence_until_it_has_dialled_again(
    config: ClusterConfig,
) -> None:
    at = config.relay_address
    with DialRelay(at, lambda: [config]), client(config, "d0", at) as peer:
        with pytest.raises(Unreachable, match=r"d0 at .*: it has not dialled in to its control"):
            peer.ask_status()
        assert "has not dialled in" in diagnose(at, "d0", files(config, "cu"))
    with ExitStack() as stack:
        first = stack.enter_context(DialRelay(at, lambda: [config]))
        with device(config, "d0", at) as admitted:
            with client(config, "d0", at) as peer:
                peer.ask_status()
                first.__exit__()
                with pytest.raises(Unreachable):
                    peer.ask_status()
            with DialRelay(at, lambda: [config]):
                assert admitted.get(timeout=WAIT_S) == "d0"
                with client(config, "d0", at) as peer:
                    assert peer.ask_status().unix_s > 0


def test_a_stranger_hears_one_sentence_and_nobody_dials_in_as_another(
    tmp_path: Path, config: ClusterConfig
) -> None:
    sign_all(tmp_path / "certs", {"d0": (), "cu": ()})
    stranger = replace(config, folder=tmp_path)
    with DialRelay("127.0.0.1:0", lambda: [config]) as there:
        at = there.address
        assert "d2 is listed at 127.0.0.1:1, and does not dial" in refusal(
            dialling(config, "d2", at)
        )
        assert "server is no device here" in refusal(dialling(config, "server", at))
        assert "who answers is not cu of this cluster" in refusal(dialling(stranger, "d0", at))
        tls = replace(files(stranger, "d0"), ca=files(config, "d0").ca)
        assert "refuses the certificate of this device" in refusal(
            Dialing(relay=at, unit="cu", tls=tls, listens=at)
        )
        pinned = replace(config, devices=(replace(config.devices[0], fingerprint="0" * 64),))
        with DialRelay("127.0.0.1:0", lambda: [pinned]) as other:
            assert "not the certificate that it joined with" in refusal(
                dialling(config, "d0", other.address)
            )
    assert "nobody lets devices in there" in refusal(dialling(config, "d0", at))


@pytest.mark.parametrize(
    "begin",
    [b"", b"\x16", b"\x16\x03\x01\x40\x00" + bytes(20_000), b"take nothing\n", b"GET / HTTP/1.1\n"],
    ids=["nothing", "a byte", "no hello", "another token", "another protocol"],
)
def test_what_nobody_waits_for_is_hung_up_on(
    config: ClusterConfig, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_GREET_S", 0.2)
    with DialRelay("127.0.0.1:0", lambda: [config]) as there:
        host, _, port = there.address.rpartition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as peer:
            peer.sendall(begin)
            try:
                while peer.recv(1000):
                    pass
            except ConnectionResetError:
                pass
        with device(config, "d0", there.address):
            pass


def test_a_first_message_may_come_in_pieces(config: ClusterConfig) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    came, go = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(came, go, server_hostname="d0")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    hello = go.read()
    with DialRelay("127.0.0.1:0", lambda: [config]) as there, device(config, "d0", there.address):
        host, _, port = there.address.rpartition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for place in range(0, len(hello), 50):
                peer.sendall(hello[place : place + 50])
            while not tls.version():
                came.write(peer.recv(10_000))
                with suppress(ssl.SSLWantReadError):
                    tls.do_handshake()
            shown = ssl.DER_cert_to_PEM_cert(tls.getpeercert(True) or b"")
    certificate = files(config, "d0").certificate
    assert certificate is not None and shown.split() == certificate.read_text().split()


def test_a_device_that_is_removed_is_cut_off_with_its_peers(config: ClusterConfig) -> None:
    now = [config]
    with (
        DialRelay("127.0.0.1:0", lambda: now) as there,
        device(config, "d0", there.address),
        client(config, "d0", there.address) as peer,
    ):
        peer.ask_status()
        now[:] = [replace(config, devices=config.devices[1:])]
        until_s = time.monotonic() + WAIT_S
        with pytest.raises(Unreachable):
            while time.monotonic() < until_s:
                peer.ask_status()


def test_work_ends_although_it_was_told_so_while_a_connection_of_it_broke() -> None:
    over, went_on = threading.Event(), asyncio.Event()

    async def end_slowly(parent: asyncio.Task[None]) -> None:
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            over.set()
            while not parent.cancelling():
                await asyncio.sleep(0)

    async def work() -> None:
        parent = asyncio.current_task()
        assert parent is not None
        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(end_slowly(parent))
                await asyncio.sleep(0)
                raise ConnectionResetError
        went_on.set()
        await asyncio.sleep(WAIT_S)

    begun_s = time.monotonic()
    run_until(over, work)
    assert went_on.is_set() and time.monotonic() - begun_s < WAIT_S


def test_a_device_serves_no_more_peers_at_once_than_it_may(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "MOST_OF_A_DEVICE", 1)
    with DialRelay("127.0.0.1:0", lambda: [config]) as there, device(config, "d0", there.address):
        with client(config, "d0", there.address) as first:
            first.ask_status()
            with client(config, "d0", there.address, as_="d2") as second:
                with pytest.raises(Unreachable):
                    second.ask_status()
                first.ask_status()
        with client(config, "d0", there.address, as_="d2") as second:
            assert _answers(second)


def _answers(peer: HostClient) -> bool:
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        try:
            peer.ask_status()
        except Unreachable:  # the other's end is on its way
            continue
        return True
    return False


def test_who_sends_faster_than_the_other_end_reads_has_to_wait() -> None:
    async def law() -> None:
        loop = asyncio.get_running_loop()
        (one, here), (there, other) = socket.socketpair(), socket.socketpair()
        for end in (one, here, there, other):
            end.setblocking(False)
        between = asyncio.create_task(splice(here, there))
        sent = await _stuffed(one)
        assert sent < 4_000_000  # buffers of the system, and one of ours
        rest = asyncio.create_task(loop.sock_sendall(one, bytes([1]) * 3_000_000))
        got = bytearray()
        while len(got) < sent + 3_000_000:
            got += await loop.sock_recv(other, 2**20)
        await rest
        assert got.count(0) == sent and got.endswith(bytes([1]) * 3_000_000)
        one.shutdown(socket.SHUT_WR)
        assert await loop.sock_recv(other, 1) == b""
        await loop.sock_sendall(other, b"later")  # the other way is still open
        assert await loop.sock_recv(one, 10) == b"later"
        other.close()
        await between
        for end in (one, here, there):
            end.close()

    asyncio.run(law())


async def _stuffed(end: socket.socket) -> int:
    """How much it takes while nobody reads at the far end."""
    sent = turns = 0
    while turns < 20:  # in which the splice could pass something on
        try:
            sent += end.send(bytes(2**16))
            turns = 0
        except BlockingIOError:
            turns += 1
            await asyncio.sleep(0)
    return sent


def test_nobody_relays_where_no_device_dials(config: ClusterConfig) -> None:
    looked = threading.Event()
    none = replace(config, devices=config.devices[2:])
    now = [none]

    def clusters() -> list[ClusterConfig]:
        looked.set()
        return now

    at = config.relay_address
    with none_left(), run_relay(clusters):
        assert looked.wait(WAIT_S)
        with pytest.raises(LinkError, match="nobody lets devices in there"):
            asyncio.run(dialling(config, "d0", at).serve_once())
        now = [config]
        with device(config, "d0", at), client(config, "d0", at) as peer:
            assert _answers(peer)


def test_a_relay_whose_line_has_no_end_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dial(_: Dialing) -> tuple[asyncio.StreamReader, Any]:
        reader = asyncio.StreamReader(limit=64)
        reader.feed_data(b"x" * 200)
        return reader, SimpleNamespace(transport=SimpleNamespace(abort=lambda: None))

    monkeypatch.setattr(Dialing, "_dial", dial)
    dialing = Dialing(relay="127.0.0.1:1", unit="cu", tls=TlsFiles(), listens="127.0.0.1:2")
    with pytest.raises(LinkError, match="it does not answer"):
        asyncio.run(dialing.serve_once())
