"""Hosts as network namespaces on one bridge; every host sends through a token bucket."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.testbed.network import Endpoint, Network

_PORTS = itertools.count(41_000)
_DEADLINE_S = 10.0
_NAMESPACES = Path("/run/netns")


class NamespaceNetwork(Network):
    """Each host has a namespace and an address of its own, in 10.77.0.0/24 unless told others."""

    kind = "network namespaces"

    def __init__(self, prefix: str, addresses: Mapping[str, str]) -> None:
        self._namespaces = {host: f"{prefix}{number}" for number, host in enumerate(addresses)}
        self._addresses = dict(addresses)
        self.switch = f"{prefix}sw"  # the namespace of the bridge

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts."""
        return tuple(self._namespaces)

    def namespace(self, host: str) -> str:
        """The name of a host's namespace."""
        return self._namespaces[host]

    def endpoint(self, host: str) -> Endpoint:
        """See Network."""
        address = f"{self._addresses[host]}:{next(_PORTS)}"
        return Endpoint(listen=address, dial=address)

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """See Network."""
        return ["ip", "netns", "exec", self._namespaces[host], *command]

    def sent_bytes(self, host: str) -> int:
        """See Network."""
        return int(_run(self.command(host, ["cat", "/sys/class/net/eth0/statistics/tx_bytes"])))

    def cut(self, host: str) -> None:
        """Unplug a host; nothing reaches it or comes from it."""
        self._port(host, "down")

    def plug(self, host: str) -> None:
        """The end of `cut`."""
        self._port(host, "up")

    def shape(self, host: str, rate_bit_per_s: int) -> None:
        """Another rate for what a host sends."""
        self._shape(host, "change", rate_bit_per_s)

    def processes(self) -> dict[int, str]:
        """The host of every process that runs on one, by process id."""
        names = self._namespaces.items()
        hosts = {f"net:[{(_NAMESPACES / name).stat().st_ino}]": host for host, name in names}
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if host := hosts.get(os.readlink(folder / "ns" / "net")):
                    found[int(folder.name)] = host
        return found

    def _port(self, host: str, state: str) -> None:
        number = list(self._namespaces).index(host)
        _ip("-n", self.switch, "link", "set", f"port{number}", state)

    def _shape(self, host: str, verb: str, rate_bit_per_s: int) -> None:
        bucket = f"tc qdisc {verb} dev eth0 root tbf rate {rate_bit_per_s}bit burst 64kb latency 1s"
        _run(self.command(host, bucket.split()))

    def build(self, rate_bit_per_s: int, undo: ExitStack) -> None:
        """Make everything; ``undo`` deletes it again, also after a half-made network."""
        switch = self.switch
        _add_namespace(switch, undo)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, (host, name) in enumerate(self._namespaces.items()):
            _add_namespace(name, undo)
            port = f"port{number}"
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{self._addresses[host]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            self._shape(host, "add", rate_bit_per_s)


@contextmanager
def namespaces(
    hosts: Sequence[str],
    *,
    rate_bit_per_s: int,
    addresses: Mapping[str, str] | None = None,
    within: str = "",
) -> Iterator[NamespaceNetwork]:
    """A network of namespaces while the body runs; addresses belong to one /24.

    ``within`` tells several networks of this process apart.
    """
    prefix = f"cp{os.getpid()}{within}-"
    if addresses is None:
        addresses = {host: f"10.77.0.{number + 1}" for number, host in enumerate(hosts)}
    network = NamespaceNetwork(prefix, {host: addresses[host] for host in hosts})
    with ExitStack() as undo:
        network.build(rate_bit_per_s, undo)
        yield network


@cache
def namespaces_allowed() -> bool:
    """Whether a shaped namespace can be made here; makes one to find out."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    try:
        with namespaces(["probe"], rate_bit_per_s=1_000_000):
            return True
    except subprocess.CalledProcessError:
        return False


def _add_namespace(name: str, undo: ExitStack) -> None:
    _ip("netns", "add", name)
    undo.callback(_ip, "netns", "del", name)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DEADLINE_S)
    return done.stdout
