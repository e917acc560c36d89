"""Authorization of calls by the name in a certificate, its role, and the number of its calls.

Everything is checked before a byte of the call's messages is read.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NoReturn

import grpc

from collapipe_flwr.config.access_control import AccessControl, Caller
from collapipe_flwr.config.cluster_file import Role
from collapipe_flwr.transport.methods import ROSTER, Method
from collapipe_flwr.transport.tls import fingerprint

_COMMON_NAME, _CERTIFICATE = "x509_common_name", "x509_pem_cert"
# Of one peer; a cluster needs half.
MOST_AT_ONCE = {"transfers": 2, "streams": 16, "texts": 16, "calls": 8, "rosters": 2}


def read_fingerprint(context: grpc.ServicerContext) -> str:
    """Return the SHA-256 of the caller's certificate; empty without one."""
    found = tuple(context.auth_context().get(_CERTIFICATE, ()))
    return _fingerprint(found[0]) if found else ""


_fingerprint = lru_cache(maxsize=256)(fingerprint)


class Authorizer:
    """Admits calls of the members in an access control, by role and up to `MOST_AT_ONCE` at once.

    Without an access control everybody whom the CA signed may do everything, and anybody on plain
    text.
    """

    def __init__(self, access: AccessControl | None, *, on_edge: bool) -> None:
        self._access = access
        self._on_edge = on_edge
        self._counts: Counter[tuple[str, str]] = Counter()  # by name and kind
        self._calls: dict[grpc.ServicerContext, tuple[str, str]] = {}  # name and fingerprint
        self._lock = threading.Lock()

    @contextmanager
    def admit(self, context: grpc.ServicerContext, method: Method) -> Iterator[Caller | None]:
        """Yield the caller (None: anonymous) while its call runs.

        Ends the call with UNAUTHENTICATED for a stranger or a wrong role, and with
        RESOURCE_EXHAUSTED for a call beyond the limit.
        """
        caller = self._identify(context, method)
        if caller is not None and not caller.may_call(method.name, on_edge=self._on_edge):
            assert caller.role is not None
            _refuse(
                context, f"{caller.name} is a {caller.role.value}: it may not call {method.name}"
            )
        with self._count_call(caller, context, method):
            yield caller

    def replace(self, access: AccessControl) -> list[grpc.ServicerContext]:
        """Apply another access control; return the running calls of callers that it lacks."""
        with self._lock:
            self._access = access
            calls = list(self._calls.items())
        return [context for context, (name, shown) in calls if not access.knows(name, shown)]

    def _identify(self, context: grpc.ServicerContext, method: Method) -> Caller | None:
        """Find the caller by its certificate's common name; None without a certificate.

        Alternative names do not count: they are addresses and host names, which may equal the name
        of another member, or have belonged to one. A control unit may send a roster with a
        certificate that the roster in force does not list.
        """
        found = tuple(context.auth_context().get(_COMMON_NAME, ()))
        name = found[0].decode("utf-8", "replace") if found else None
        if name == "":
            _refuse(
                context, "the peer's certificate has no common name, so it identifies no member"
            )
        if self._access is None:
            return None if name is None else Caller(name=name)
        caller = None if name is None else self._access.callers.get(name)
        if caller is None:
            shown = "no name at all" if name is None else name[:80]
            _refuse(context, f"the peer's certificate names {shown}, which is no member here")
        renews = method is ROSTER and caller.role is Role.CONTROL_UNIT
        if not (renews or caller.may_show(read_fingerprint(context))):
            _refuse(
                context,
                f"the peer's certificate names {caller.name}, which is a member here, but it is "
                "not the one that this member joined with",
            )
        return caller

    @contextmanager
    def _count_call(
        self, caller: Caller | None, context: grpc.ServicerContext, method: Method
    ) -> Iterator[None]:
        """Count the call, and let `replace` cut it."""
        if caller is None:
            yield
            return
        name, shown, kind = caller.name, read_fingerprint(context), method.counts_as
        with self._lock:
            if self._counts[name, kind] >= MOST_AT_ONCE[kind]:
                said = f"{name} has {MOST_AT_ONCE[kind]} {kind} under way, its limit here"
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, said)
            self._counts[name, kind] += 1
            self._calls[context] = (name, shown)
        try:
            self._identify(context, method)  # an access control that was replaced meanwhile counts
            yield
        finally:
            with self._lock:
                self._counts[name, kind] -= 1
                del self._calls[context]


def _refuse(context: grpc.ServicerContext, said: str) -> NoReturn:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, said)
    raise AssertionError("abort raises")
