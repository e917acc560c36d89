"""A peer that means harm: everything it can think of against one host, some times over.

    python -m tests.laws.hostile_peer ADDRESS TIMES GUEST_FOLDER OUTSIDE_FOLDER

``GUEST_FOLDER`` has the certificate of a control unit (`cu-w`) and of a device (`w1`) of another
cluster under the same CA, ``OUTSIDE_FOLDER`` a `cu` that another CA signed. Prints how often each
attack was made, which of them the host let through, and how many sessions it was given.
"""

from __future__ import annotations

import itertools
import json
import secrets
import socket
import ssl
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import torch

from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.core.version import read_own_version
from collapipe_flwr.pipeline.config import SessionKey, SessionRequest
from collapipe_flwr.pipeline.link import HIDDEN, Frame, FrameKind
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.codec import encode_frame
from collapipe_flwr.transport.methods import encode_message
from collapipe_flwr.transport.tls import open_channel
from collapipe_flwr.transport.weights import cut_weights

TOKEN = "a token that was guessed"
SILENT = 200  # connections that never say a word
CALL_S = 5.0
_NUMBERS = itertools.count()
_OPENED: Counter[str] = Counter()


def main(address: str, times: int, guest: Path, outside: Path) -> None:
    made: Counter[str] = Counter()
    let_through: Counter[str] = Counter()
    with ExitStack() as stack:
        attacks = attackers(address, guest, outside, stack)
        for _ in range(times):
            for name, attack in attacks.items():
                made[name] += 1
                let_through[name] += attack()
    print(json.dumps({"made": made, "let_through": +let_through, "sessions": _OPENED}))


def attackers(
    address: str, guest: Path, outside: Path, stack: ExitStack
) -> dict[str, Callable[[], bool]]:
    """All attacks by name; each says whether the host let it through."""

    def channel(folder: Path, name: str) -> grpc.Channel:
        files = TlsFiles(
            ca=guest / "ca.pem", certificate=folder / f"{name}.pem", key=folder / f"{name}.key"
        )
        expected = "d0" if address.endswith("#d0") else "edge"
        options = [*methods.make_channel_options(), *methods.make_name_options(expected)]
        return stack.enter_context(open_channel(target, files, options))

    target = address.partition("#")[0]
    unit, device, other = channel(guest, "cu-w"), channel(guest, "w1"), channel(outside, "cu")
    silent: list[socket.socket] = []
    stack.callback(lambda: [peer.close() for peer in silent])
    return {
        "silent connections": lambda: _silent(target, silent),
        "garbage instead of TLS": lambda: _garbage(target),
        "TLS without a certificate": lambda: _no_certificate(target),
        "a certificate of another CA": lambda: _answers(other, "Health", [b""]),
        "another cluster's session": lambda: _answers(unit, "Stream", [b""], "A"),
        "a stranger's orders": lambda: _answers(device, "OpenSession", [b"{}"]),
        "a message without end": lambda: _half_open(unit, "Health"),
        "weights without end": lambda: _half_open(unit, "PushWeights", _opened(unit)),
        "many sessions": lambda: not all(_opened(unit) for _ in range(20)) and False,
        "frames": lambda: sum(_pushed(unit, frames) for frames in bad_frames()) > 0,
        "a model without end": lambda: _pushed(unit, list(_good()), endless=True),
        "a benchmark without end": lambda: _answers(unit, "Benchmark", [HUGE_BENCHMARK]),
        "methods that are not": lambda: _answers(unit, "Shutdown", [b""]),
    }


HUGE_BENCHMARK = b'{"width":4096,"tokens":2048,"examples":128,"seconds":30.0}'


def _good() -> Iterator[bytes]:
    return (encode_frame(frame) for frame in cut_weights({"w": torch.zeros(4)}))


def bad_frames() -> list[list[bytes]]:
    """Garbage, truncated, oversized, replayed, out of order, and shapes that ask for terabytes."""
    first, end = _good()

    def piece(shape: str, offset: float = 0.0) -> bytes:
        frame = Frame(
            kind=FrameKind.WEIGHTS,
            tensors={"w": torch.zeros(4)},
            scalars={"offset": offset},
            text=shape,
        )
        return encode_frame(frame)

    return [
        [b"\xff" * 200],
        [first[:-7]],
        [first, first, end],
        [end, first],
        [piece("[4]", 8.0), end],
        [piece("[1099511627775, 1099511627775]"), end],
        [piece("[274877906944]"), end],
        [struct.pack("<4sIIIqq", b"CPF2", 8, 2**31, 0, 0, 0) + b"[" * 4000],
        [struct.pack("<4sIIIqq", b"CPF2", 8, 4064, 0, 0, 0) + b"[" * 4064],
        [encode_frame(Frame(kind=FrameKind.ACTIVATION, tensors={HIDDEN: torch.zeros(4)}))],
    ]


def _opened(channel: grpc.Channel, *, endless: bool = False) -> str:
    """A session of its own, if the host gives it one."""
    session_id = f"w-{next(_NUMBERS)}-{secrets.token_hex(4)}"
    config = {"model_type": "bert", "num_hidden_layers": 10**9 if endless else 2}
    spec = {"task": "masked-lm", "config_json": json.dumps(config)}
    key = SessionKey(session_id=session_id, token=TOKEN)
    request = SessionRequest(key=key, spec_json=json.dumps(spec))
    if not _answers(channel, "OpenSession", [encode_message(request)]):
        return ""
    _OPENED["given"] += 1
    return session_id


def _pushed(channel: grpc.Channel, frames: list[bytes], *, endless: bool = False) -> bool:
    return _answers(channel, "PushWeights", frames, _opened(channel, endless=endless))


def _answers(channel: grpc.Channel, name: str, messages: list[bytes], session_id: str = "") -> bool:
    """Whether the host does what it is asked."""
    session = ((methods.SESSION_KEY, session_id), (methods.TOKEN_KEY, TOKEN))
    metadata = (*session, (methods.VERSION_KEY, read_own_version()))
    call = channel.stream_stream(f"/{methods.SERVICE}/{name}", None, None)
    try:
        list(call(iter(messages), timeout=CALL_S, metadata=metadata))
    except grpc.RpcError:
        return False
    return True


def _half_open(channel: grpc.Channel, name: str, session_id: str = "") -> bool:
    """Calls that say nothing, more than the host lets one peer have."""
    metadata = ((methods.SESSION_KEY, session_id), (methods.TOKEN_KEY, TOKEN))
    call = channel.stream_stream(f"/{methods.SERVICE}/{name}", None, None)
    calls = [call(_silence(), timeout=1.0, metadata=metadata) for _ in range(20)]
    refused = sum(_refused(each) for each in calls)
    return refused == 0


def _silence() -> Iterator[bytes]:
    time.sleep(1.5)
    yield from ()


def _refused(call: grpc.Call) -> bool:
    return call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


def _silent(target: str, silent: list[socket.socket]) -> bool:
    host, _, port = target.rpartition(":")
    if len(silent) < SILENT:
        silent += [socket.create_connection((host, int(port)), CALL_S) for _ in range(SILENT)]
    return False


def _garbage(target: str) -> bool:
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port)), CALL_S) as peer:
        try:
            peer.sendall(secrets.token_bytes(4096))
            return b"collapipe" in peer.recv(4096)
        except OSError:
            return False


def _no_certificate(target: str) -> bool:
    host, _, port = target.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), CALL_S) as peer,
            context.wrap_socket(peer) as shaken,
        ):
            shaken.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            return len(shaken.recv(64)) > 0  # a host that goes on sends its settings
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
