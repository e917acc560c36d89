"""Who calls is what the common name of its certificate says, and nothing else in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import grpc
import pytest

from collapipe_flwr.config.access_control import AccessControl, Caller
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.authorizer import MOST_AT_ONCE, Authorizer


class Aborted(Exception):
    """The status of a call that was ended."""


class Context:
    """What gRPC says of a peer over mutual TLS, or on plain text without a name."""

    def __init__(self, name: str | None = None, hosts: Iterable[str] = ()) -> None:
        self._found = {"transport_security_type": [b"ssl"]}
        if name is not None:
            self._found["x509_common_name"] = [name.encode()]
            self._found["x509_subject_alternative_name"] = [host.encode() for host in hosts]

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(f"{code.name}: {details}")

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return self._found


def test_a_member_is_known_by_its_common_name_only() -> None:
    access = AccessControl({"pi-1": Caller(name="pi-1")})
    gate = Authorizer(access, on_edge=False)
    with gate.admit(Context("pi-1", ["10.0.0.1", "pi-2"]), methods.ECHO) as caller:
        assert caller == Caller(name="pi-1")
    for name in ("pi-2", "PI-1", "pi-1.", "pi-1\0", "", None):
        with (
            pytest.raises(
                Aborted, match=r"UNAUTHENTICATED: .*(is no member here|has no common name)"
            ),
            gate.admit(Context(name, ["pi-1"]), methods.ECHO),
        ):
            pass


def test_without_a_roster_a_nameless_certificate_is_refused_and_plain_text_is_nobody() -> None:
    gate = Authorizer(None, on_edge=True)
    with gate.admit(Context(), methods.ECHO) as caller:
        assert caller is None
    with gate.admit(Context("laptop"), methods.ECHO) as caller:
        assert caller == Caller(name="laptop")
    with (
        pytest.raises(Aborted, match=r"UNAUTHENTICATED: .* has no common name"),
        gate.admit(Context("", ["laptop"]), methods.ECHO),
    ):
        pass


def test_calls_are_counted_by_name_whatever_hosts_are_listed() -> None:
    gate = Authorizer(None, on_edge=True)
    entered = [
        gate.admit(Context("pi-1", [f"host-{n}"]), methods.PUSH_WEIGHTS)
        for n in range(MOST_AT_ONCE["transfers"] + 1)
    ]
    for call in entered[:-1]:
        call.__enter__()
    with pytest.raises(Aborted, match="RESOURCE_EXHAUSTED: pi-1 has 2 transfers under way"):
        entered[-1].__enter__()
    for call in entered[:-1]:
        call.__exit__(None, None, None)
