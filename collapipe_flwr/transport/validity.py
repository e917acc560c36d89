"""From when to when a certificate holds, read without a library of cryptography.

A daemon that waits should hold little memory, and all it asks of its own certificate are two dates.
They stand in ASN.1 (X.690): a tag, a length, the content; the certificate's first element holds,
after an optional version, serial number, algorithm and issuer, the two times.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from collapipe_flwr.core.errors import ConfigError

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """Both ends belong to it."""

    begins: datetime
    ends: datetime


def validity_of(pem: bytes) -> Validity:
    """Of the first certificate in a PEM file; raises ConfigError when there is none."""
    found = _PEM.search(pem)
    if found is None:
        raise ConfigError("no certificate in PEM is in it")
    try:
        der = base64.b64decode(found[1])
        ((_, certificate),) = _elements(der)
        signed = next(content for _, content in _elements(certificate))
        fields = [(tag, content) for tag, content in _elements(signed) if tag != _VERSION]
        begins, ends = (_moment(tag, content) for tag, content in _elements(fields[3][1]))
    except (binascii.Error, IndexError, StopIteration, ValueError) as error:
        raise ConfigError(f"its certificate cannot be read: {error}") from error
    return Validity(begins=begins, ends=ends)


def check_validity(path: str, pem: bytes, now: datetime) -> None:
    """Raise ConfigError with the way out when a certificate does not hold now."""
    try:
        found = validity_of(pem)
    except ConfigError as error:
        raise ConfigError(f"{path} is no certificate: {error}") from error
    if now > found.ends:
        raise ConfigError(
            f"the certificate {path} expired on {found.ends:%Y-%m-%d}: make a new one with "
            "`collapipe certs --renew`, or set this machine's clock if that is in the future"
        )
    if now < found.begins:
        raise ConfigError(
            f"the certificate {path} holds from {found.begins:%Y-%m-%d} on, and this machine's "
            f"clock says {now:%Y-%m-%d}: set it (`timedatectl`)"
        )


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of what stands side by side."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(der[at : at + count]), at + count
        if at + length > len(der):
            raise ValueError("it is cut short")
        yield tag, der[at : at + length]
        at += length


def _moment(tag: int, text: bytes) -> datetime:
    """UTCTime has two digits for the year, of 1950 to 2049; GeneralizedTime has four."""
    digits = text.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("19" if digits[0] >= "5" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
