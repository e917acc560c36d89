"""Which names may stand in certificates of one CA, so that nobody passes as somebody else.

A caller is known by its common name alone (`peers`). A client cannot ask for that: it looks for the
name of the host that it wants among all names of the certificate that it is shown, without regard
to case or a dot at the end. So no machine's host may be called like another member.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography import x509

from collapipe_flwr.config.cluster_file import MEMBER_NAME
from collapipe_flwr.core.errors import ConfigError

AUTHORITY = "ca"
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
Hosts = Mapping[str, Iterable[str]]


def check_names(members: Hosts, signed: Hosts) -> None:
    """Check ``members`` (name to hosts), who are about to be signed, among those who are.

    Raises ConfigError when two cannot be told apart, or when one could pass as another.
    """
    for name, hosts in members.items():
        _check_name(name)
        for host in hosts:
            _check_host(name, host)
    bearers = {_compared(name): name for name in signed} | {_compared(n): n for n in members}
    for name in (*signed, *members):
        other = bearers[_compared(name)]
        if other != name:
            raise ConfigError(
                f"the names {other!r} and {name!r} cannot be told apart in certificates and on "
                "every disk: call one of these members otherwise"
            )
    _check_no_host_is_a_member(members, bearers)
    for name, hosts in signed.items():
        for host in hosts:
            bearer = bearers.get(_compared(host), name)
            if bearer != name and bearer in members:
                raise ConfigError(
                    f"{name}.pem, which was signed here, is valid for the host {host!r}: whoever "
                    f"has it would pass as {bearer}; call that member otherwise, or make a new CA "
                    "with --new-ca"
                )


def names_in(folder: Path) -> dict[str, tuple[str, ...]]:
    """Who has a certificate in a folder, with the hosts that it is valid for."""
    paths = (path for path in sorted(folder.glob("*.pem")) if path.stem != AUTHORITY)
    return {path.stem: hosts for path in paths if (hosts := _hosts_in(path)) is not None}


def general_name(host: str) -> x509.GeneralName:
    """An IP address or a host name, as an alternative name."""
    address = _address(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _check_name(name: str) -> None:
    if MEMBER_NAME.holds(name) and name.casefold() != AUTHORITY:
        return
    what = f"{MEMBER_NAME.says}, and not {AUTHORITY!r}, whose files are the CA's own"
    raise ConfigError(f"a member cannot be called {name[:80]!r}: its name {what}")


def _check_host(name: str, host: str) -> None:
    if _address(host) is None and not _HOST.fullmatch(host):
        raise ConfigError(f"{name} is reached at {host[:80]!r}: give an IP address or a host name")


def _check_no_host_is_a_member(members: Hosts, bearers: Mapping[str, str]) -> None:
    for name, hosts in members.items():
        for host in hosts:
            if bearers.get(_compared(host), name) != name:
                raise ConfigError(
                    f"{name} is reached at {host!r}, and another member is called so, as whom it "
                    f"would pass: reach {name} by its IP address or another host name, or call "
                    "that member otherwise"
                )


def _compared(host: str) -> str:
    """Equal for what a client takes for the same."""
    address = _address(host)
    return host.casefold().rstrip(".") if address is None else str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _hosts_in(path: Path) -> tuple[str, ...] | None:
    """None for a file that is no certificate."""
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except ValueError:
        return None
    except x509.ExtensionNotFound:
        return ()
    addresses = names.get_values_for_type(x509.IPAddress)
    return (*names.get_values_for_type(x509.DNSName), *map(str, addresses))
