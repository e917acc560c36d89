"""Sites behind routers that translate addresses: their members reach the server, nobody them.

A router lets connections to the server's port out, and nothing in. What is forbidden is dropped and
counted, at routers and at a host where the server's is or that is shut by itself.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from tests.testbed.namespaces import NamespaceNetwork, namespaces, namespaces_allowed
from tests.testbed.network import Endpoint, Network

SERVER, SERVER_ADDRESS, SERVER_PORT = "server", "10.77.0.1", 9092
_RATE_BIT_PER_S = 100_000_000
_RULES = """
table ip wall {
  counter forbidden {}
  chain input { type filter hook input priority 0; %s }
  chain forward { type filter hook forward priority 0; %s }
  chain output { type filter hook output priority 0; %s }
  chain translate { type nat hook postrouting priority 100; oifname "outside" masquerade; }
}
"""
_DROP = "counter name forbidden drop"
_KNOWN = "ct state established,related accept;"
_IN, _OUT = (f"{side} lo accept; {_KNOWN} {_DROP};" for side in ("iif", "oif"))


class Sites(Network):
    """A server, and sites of several hosts, each in 10.78.N.0/24 behind a router of its own."""

    kind = "sites behind routers"

    def __init__(self, wan: NamespaceNetwork, sites: Mapping[str, NamespaceNetwork]) -> None:
        self._wan, self._sites = wan, dict(sites)
        self._shut = [SERVER]
        for number, site in enumerate(sites.values(), 1):
            self._place_router(number, site)
        # What the server sent to a host of a site would leave it, and be counted.
        self._on(SERVER, f"ip route add default via {_outside(1)}")
        self._wall(wan.namespace(SERVER), output=_OUT)

    def endpoint(self, host: str) -> Endpoint:
        """See Network."""
        if host == SERVER:
            address = f"{SERVER_ADDRESS}:{SERVER_PORT}"
            return Endpoint(listen=address, dial=address)
        return self._of(host).endpoint(host)

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """See Network."""
        return self._of(host).command(host, command)

    def sent_bytes(self, host: str) -> int:
        """See Network."""
        return self._of(host).sent_bytes(host)

    def shut(self, host: str) -> None:
        """Let a host accept no connection any more, from its site either."""
        self._wall(self._of(host).namespace(host), input=_IN)
        self._shut.append(host)

    def forbidden(self) -> dict[str, int]:
        """The packets that were dropped, by the name of the site or host."""
        names = {name: site.switch for name, site in self._sites.items()}
        names |= {host: self._of(host).namespace(host) for host in self._shut}
        return {name: _dropped(namespace) for name, namespace in names.items()}

    def _of(self, host: str) -> NamespaceNetwork:
        return next(n for n in (self._wan, *self._sites.values()) if host in n.hosts)

    def _on(self, host: str, command: str) -> None:
        _run(self.command(host, command.split()))

    def _place_router(self, number: int, site: NamespaceNetwork) -> None:
        """Make a site's switch its router, with one end outside."""
        inside, router = f"10.78.{number}.254", site.switch
        ends = f"outside netns {router} type veth peer site{number} netns {self._wan.switch}"
        for command in (
            f"ip -n {router} addr add {inside}/24 dev bridge",
            f"ip link add {ends}",
            f"ip -n {self._wan.switch} link set site{number} master bridge up",
            f"ip -n {router} addr add {_outside(number)}/24 dev outside",
            f"ip -n {router} link set outside up",
            f"ip netns exec {router} sysctl -qw net.ipv4.ip_forward=1",
        ):
            _run(command.split())
        for host in site.hosts:
            self._on(host, f"ip route add default via {inside}")
        to_server = f'iifname "bridge" ip daddr {SERVER_ADDRESS} tcp dport {SERVER_PORT} accept;'
        self._wall(
            router,
            input=f'iifname "outside" {_DROP};',
            forward=f'iifname "bridge" oifname "bridge" accept; {_KNOWN} {to_server} {_DROP};',
        )

    @staticmethod
    def _wall(namespace: str, *, input: str = "", forward: str = "", output: str = "") -> None:
        rules = _RULES % (input, forward, output)
        command = ["ip", "netns", "exec", namespace, "nft", "-f", "-"]
        subprocess.run(command, input=rules, text=True, check=True, timeout=10.0)


@contextmanager
def sites(hosts: Mapping[str, Sequence[str]]) -> Iterator[Sites]:
    """The hosts of every site, and the server, while the body runs."""
    with ExitStack() as stack:
        wan = stack.enter_context(
            namespaces([SERVER], rate_bit_per_s=_RATE_BIT_PER_S, addresses={SERVER: SERVER_ADDRESS})
        )
        lans = {}
        for number, (name, members) in enumerate(hosts.items(), 1):
            addresses = {host: f"10.78.{number}.{n}" for n, host in enumerate(members, 1)}
            lan = namespaces(
                members, rate_bit_per_s=_RATE_BIT_PER_S, addresses=addresses, within=name
            )
            lans[name] = stack.enter_context(lan)
        yield Sites(wan, lans)


def sites_allowed() -> bool:
    """Whether they can be made here."""
    return namespaces_allowed() and shutil.which("nft") is not None


def _outside(number: int) -> str:
    """A router as the server sees it."""
    return f"10.77.0.{100 + number}"


def _dropped(namespace: str) -> int:
    listing = ["nft", "list", "counter", "ip", "wall", "forbidden"]
    found = re.search(r"packets (\d+)", _run(["ip", "netns", "exec", namespace, *listing]))
    assert found is not None
    return int(found[1])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10.0)
    return done.stdout
