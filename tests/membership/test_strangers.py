"""Whoever has no token writes nothing into logs and ends nothing: sentences or silence."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from collapipe_flwr.config.access_control import SERVICE_NAME
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.links import is_address
from collapipe_flwr.membership.admission import JoiningService
from collapipe_flwr.membership.discovery import _read_addresses
from collapipe_flwr.membership.figures import add_figures, read_figures
from collapipe_flwr.transport.joining import JOIN, JoinRequest, extract_request_key, make_request
from collapipe_flwr.transport.methods import decode_message, encode_message, make_name_options
from collapipe_flwr.transport.roster import Roster
from tests.membership.clusters import new_registry
from tests.thorough import examples

NAMES = [
    "",
    ".",
    "..",
    "a/b",
    "a\nb",
    "\x1b[31mred",
    "\0",
    "\u202egnp",
    "\ud800",
    "😀",
    "n" * 10**5,
]
NUMBERS = [-1.0, math.nan, math.inf, 1e300, 10**30, True, "1", None, []]
PIN = bytes(range(32))
ASKED = JoinRequest(
    secret="ab" * 16,
    name="pi-1",
    request_pem=make_request("pi-1", ec.generate_private_key(ec.SECP256R1())),
    unix_s=0.0,
    address="10.0.0.2:50071",
    speed_flop_per_s=1e9,
    overhead_s=1e-4,
    memory_bytes=2**30,
)
CHANGES = [
    *({"name": name} for name in NAMES),
    *({key: text} for key in ("address", "kind", "secret") for text in NAMES[4:9] + NAMES[10:]),
    *({key: x} for key in ("speed_flop_per_s", "overhead_s") for x in NUMBERS),
    *({"memory_bytes": x} for x in (-1, 2**60, 1.5, True)),
    *({"unix_s": x} for x in (math.nan, math.inf, 1e300, "now")),
    {"request_pem": "x" * 10_000},
    {"another": 1},
]


def changed(change: dict[str, object]) -> bytes:
    return json.dumps({**json.loads(encode_message(ASKED)), **change}).encode()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: ascii(change)[:40])
def test_a_request_that_cannot_be_is_refused_before_anything_is_looked_at(change) -> None:
    with pytest.raises(ProtocolError) as refused:
        decode_message(JoinRequest, changed(change))
    assert str(refused.value).isprintable() and len(str(refused.value)) < 400


def test_what_a_stranger_asks_writes_one_printable_line_into_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = new_registry(tmp_path / "cu")
    script = "\x1b]0;owned\x07\n2026-01-01 INFO pi-9 joined attic \u202e"
    calls = [changed({"name": script}), changed({"kind": script}), changed({script: 1}), b"\xff\n"]
    credentials = grpc.ssl_channel_credentials(registry.ca.read_bytes())
    with (
        JoiningService(registry, "127.0.0.1:0") as service,
        grpc.secure_channel(
            service.address, credentials, options=make_name_options(SERVICE_NAME)
        ) as channel,
        caplog.at_level(logging.DEBUG, "collapipe_flwr"),
    ):
        for data in calls:
            with pytest.raises(grpc.RpcError) as refusal:
                JOIN.bind(channel)(data, timeout=60)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refusal.value.details().isprintable()
    said = [r.getMessage() for r in caplog.records if r.name.startswith("collapipe_flwr")]
    assert len(said) == len(calls)
    assert all(line.isprintable() and "was refused" in line for line in said)


@examples(50, 200, derandomize=True)
@given(
    st.text(max_size=200)
    | st.binary(max_size=300).map(lambda data: data.decode("latin-1"))
    | st.tuples(st.integers(30, 300), st.sampled_from("AQ=/\n-")).map(
        lambda at: ASKED.request_pem[: at[0]] + at[1] + ASKED.request_pem[at[0] + 1 :]
    )
)
def test_a_signing_request_is_a_key_or_one_sentence(pem: str) -> None:
    try:
        assert isinstance(extract_request_key(pem), ec.EllipticCurvePublicKey)
    except ProtocolError as error:
        assert str(error).isprintable()


@settings(derandomize=True)
@given(
    st.dictionaries(st.just(b"pin") | st.binary(max_size=4), st.none() | st.binary(max_size=20))
    | st.just({b"pin": PIN.hex()[:16].encode()}),
    st.lists(st.sampled_from(["10.0.0.2", "fe80::1", "", "a b", "\0", "x" * 300]), max_size=3),
    st.none() | st.integers(-1, 70_000),
)
def test_an_announcement_leads_to_addresses_or_nowhere(properties, hosts, port) -> None:
    info = SimpleNamespace(properties=properties, port=port, parsed_addresses=lambda: hosts)
    assert all(is_address(place) for place in _read_addresses(info, PIN))
    assert _read_addresses(None, PIN) == []


@pytest.mark.parametrize(
    "figure",
    [
        {"speed_flop_per_s": math.nan},
        {"speed_flop_per_s": 0.0},
        {"overhead_s": math.inf},
        {"memory_bytes": -1},
        {"rate_bit_per_s": 1e300},
        {"name": "a\nb"},
        {"torch": "\x1b[2J"},
    ],
)
def test_figures_that_cannot_be_leave_those_that_are_known(tmp_path: Path, figure) -> None:
    config = new_registry(tmp_path / "cu").cluster()
    before = read_figures(config)
    members = [{"name": "pi-1", "address": "10.0.0.2:1", **figure}]
    told = json.dumps({"cluster_id": config.id, "members": members})
    with pytest.raises(ProtocolError, match="invalid figures"):
        add_figures(config, Roster(text="", signature="", figures=told))
    assert read_figures(config) == before
