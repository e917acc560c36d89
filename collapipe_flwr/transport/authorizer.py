"""Who calls: the name that a certificate proves, what it may do, and how much of it at once.

All of this is known before a byte of the call's messages is read.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import grpc

from collapipe_flwr.config.access_control import AccessControl, Caller
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.transport.methods import Method
from collapipe_flwr.transport.tls import fingerprint

_COMMON_NAME, _CERTIFICATE = "x509_common_name", "x509_pem_cert"
# Of one peer; a cluster needs half.
MOST_AT_ONCE = {"transfers": 2, "streams": 16, "texts": 16, "calls": 8}


class PeerRefused(LinkError):
    """A peer without a certificate of this cluster, or not in the role for what it asks."""


class PeerBusy(LinkError):
    """A peer that has too much under way."""


def peer_name(context: grpc.ServicerContext) -> str | None:
    """Who the caller's certificate says it is; None without a certificate.

    That is its common name alone. The alternative names beside it are where its bearer is reached,
    and a machine's address or host name may once have been, or be called like, another member.
    """
    found = tuple(context.auth_context().get(_COMMON_NAME, ()))
    return found[0].decode("utf-8", "replace") if found else None


def peer_fingerprint(context: grpc.ServicerContext) -> str:
    """The SHA-256 of the certificate that the caller showed; empty without one."""
    found = tuple(context.auth_context().get(_CERTIFICATE, ()))
    return _fingerprint(found[0]) if found else ""


_fingerprint = lru_cache(maxsize=256)(fingerprint)


class Authorizer:
    """Lets the members of an access control in, each in its role, with so many calls at once.

    Without one, whoever the CA signed may do everything, and on plain text everybody.
    """

    def __init__(self, access: AccessControl | None, *, on_edge: bool) -> None:
        self._access = access
        self._on_edge = on_edge
        self._under_way: Counter[tuple[str, str]] = Counter()
        self._calls: dict[grpc.ServicerContext, tuple[str, str]] = {}  # name and fingerprint
        self._lock = threading.Lock()

    @contextmanager
    def admitted(self, context: grpc.ServicerContext, method: Method) -> Iterator[Caller | None]:
        """The caller (None: nobody in particular) while its call runs.

        Ends the call as UNAUTHENTICATED for a stranger or a wrong role, as RESOURCE_EXHAUSTED
        beyond what the caller may have at once.
        """
        try:
            caller = self._known(context)
            if caller is not None and not caller.may_call(method.name, on_edge=self._on_edge):
                assert caller.role is not None
                raise PeerRefused(
                    f"{caller.name} is a {caller.role.value}: it may not call {method.name}"
                )
            with self._counted(caller, method.counts_as), self._cut_short(caller, context):
                yield caller
        except PeerRefused as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except PeerBusy as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    def replace(self, access: AccessControl) -> None:
        """Go by another access control, and cut the calls of whoever is not in it."""
        with self._lock:
            self._access = access
            calls = list(self._calls.items())
        for context, (name, shown) in calls:
            if (caller := access.callers.get(name)) is None or not caller.may_show(shown):
                context.cancel()

    @contextmanager
    def _cut_short(self, caller: Caller | None, context: grpc.ServicerContext) -> Iterator[None]:
        """Let `replace` cut the call; one that began by an older roster is refused here."""
        if self._access is None or caller is None:
            yield
            return
        with self._lock:
            self._calls[context] = (caller.name, peer_fingerprint(context))
        try:
            self._known(context)
            yield
        finally:
            with self._lock:
                del self._calls[context]

    def _known(self, context: grpc.ServicerContext) -> Caller | None:
        name = peer_name(context)
        if name == "":
            raise PeerRefused("the peer's certificate has no common name, so it is nobody's here")
        if self._access is None:
            return None if name is None else Caller(name=name)
        caller = None if name is None else self._access.callers.get(name)
        if caller is None:
            shown = "no name at all" if name is None else name[:80]
            raise PeerRefused(f"the peer's certificate names {shown}, which is no member here")
        if not caller.may_show(peer_fingerprint(context)):
            raise PeerRefused(
                f"the peer's certificate names {caller.name}, which is a member here, but it is "
                "not the one that this member joined with"
            )
        return caller

    @contextmanager
    def _counted(self, caller: Caller | None, kind: str) -> Iterator[None]:
        if caller is None:
            yield
            return
        name = caller.name
        with self._lock:
            if self._under_way[name, kind] >= MOST_AT_ONCE[kind]:
                raise PeerBusy(f"{name} has {MOST_AT_ONCE[kind]} {kind} under way, its limit here")
            self._under_way[name, kind] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[name, kind] -= 1
