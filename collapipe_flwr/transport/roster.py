"""A cluster file signed by the CA: members accept a newer one from anybody."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.transport.connection import Connection
from collapipe_flwr.transport.methods import ROSTER

_CONTEXT = b"collapipe roster\0"  # what else this CA signs cannot pass as a roster


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The text of a cluster file with a version, and the CA's signature in base64.

    ``figures`` (JSON of `Measurements`) are what members measured when they joined, for a control
    unit on another machine than the CA; empty elsewhere. ``certificate`` is the receiver's own, in
    PEM, which the CA has signed as well; empty if it is not sent.
    """

    text: str
    signature: str
    figures: str = ""
    certificate: str = ""

    @property
    def signed(self) -> bytes:
        """The signed bytes; there is no NUL in TOML."""
        figures = f"\0{self.figures}" if self.figures else ""
        return _CONTEXT + (self.text + figures).encode()


def sign_roster(text: str, sign: Callable[[bytes], bytes], figures: str = "") -> Roster:
    """Sign a roster, so that members accept it."""
    roster = Roster(text=text, signature="", figures=figures)
    return replace(roster, signature=base64.b64encode(sign(roster.signed)).decode())


def check_roster(roster: Roster, ca: Path) -> None:
    """Raise ProtocolError when the CA in ``ca`` did not sign this text."""
    # Imported here, because a daemon that waits should hold little memory.
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        signature = base64.b64decode(roster.signature, validate=True)
        key = x509.load_pem_x509_certificate(ca.read_bytes()).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ProtocolError(f"{ca} is no CA that signs rosters")
        key.verify(signature, roster.signed, ec.ECDSA(hashes.SHA256()))
    except (OSError, ValueError, InvalidSignature) as error:
        raise ProtocolError("the roster was not signed by this cluster's CA") from error


def send_roster(connection: Connection, roster: Roster) -> int:
    """Send a member its roster; return the version that it has then. Raises LinkError."""
    return connection.call(ROSTER, roster, int)
