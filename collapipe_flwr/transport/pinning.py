"""The CA of a cluster, fetched from a control unit and believed for its fingerprint alone."""

from __future__ import annotations

import hmac
import socket
import ssl
from hashlib import sha256
from typing import Any

from collapipe_flwr.core.errors import LinkError, Unreachable
from collapipe_flwr.core.links import host_and_port
from collapipe_flwr.transport.tls import unverified


def pinned_ca(address: str, pin: bytes, deadline_s: float) -> bytes:
    """The CA's certificate in PEM whose SHA-256 is ``pin``, from the chain that is shown there.

    Nothing is sent: who shows it may be anybody, and is to prove by that CA who it is. Raises
    LinkError when nobody answers, or with another CA.
    """
    place = host_and_port(address)
    try:
        with (
            socket.create_connection(place, deadline_s) as peer,
            unverified().wrap_socket(peer) as shaken,
        ):
            chain = _chain(shaken)
    except (OSError, OverflowError) as error:
        raise Unreachable(
            f"no control unit answers at {address} ({error}): see that `collapipe cluster serve` "
            "runs there and that the firewall lets the port through"
        ) from error
    for der in chain:
        if hmac.compare_digest(sha256(der).digest(), pin):
            return ssl.DER_cert_to_PEM_cert(der).encode()
    raise LinkError(
        f"who answers at {address} is not of the CA that the token names, so nothing was sent: "
        "print a token on the control unit of today, or find out who sits in between"
    )


def _chain(shaken: ssl.SSLSocket) -> list[bytes]:
    """What was shown, in DER. `SSLSocket` has a method for it from Python 3.13 on."""
    if hasattr(shaken, "get_unverified_chain"):
        return list(shaken.get_unverified_chain())
    inner: Any = shaken._sslobj  # type: ignore[attr-defined]
    return [
        ssl.PEM_cert_to_DER_cert(shown.public_bytes()) for shown in inner.get_unverified_chain()
    ]
