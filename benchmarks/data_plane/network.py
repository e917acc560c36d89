"""Where the processes of a benchmark run: all on loopback, or each behind a shaped link of its own.

A shaped network is made of the kernel's own parts (a namespace and a virtual cable per process,
one bridge, one bucket per destination), so that both runtimes see the same links through their
sockets. Making it needs the rights of root, or a kernel that lets users create user namespaces.
Either way one process holds a private mount where ``ip netns`` keeps its names, and commands enter
it. That process ends when its stdin is closed, also if the benchmark is killed, and all namespaces
disappear with it.
"""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from collapipe_flwr.core.errors import CollaPipeError
from collapipe_flwr.core.links import find_free_ports

_DEADLINE_S = 10.0
_HOLD = "mount -t tmpfs tmpfs /var/run && echo ready && exec cat"


class NetworkError(CollaPipeError):
    """The kernel refuses namespaces or shaping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What to put before a command so that it may shape links."""

    kind: str
    command: Sequence[str] = ()


@contextmanager
def own_rights() -> Iterator[Rights]:
    """Those of this process, which suffice for root; raises NetworkError where they do not."""
    with _held() as enter:
        yield Rights(kind="network namespaces", command=enter)


@contextmanager
def user_rights() -> Iterator[Rights]:
    """Root in a new user namespace; raises NetworkError where the kernel allows none."""
    with _held("--user", "--net", root=True) as enter:
        kind = "network namespaces in a user namespace"
        yield Rights(kind=kind, command=(*enter, "--preserve-credentials"))


@contextmanager
def _held(*namespaces: str, root: bool = False) -> Iterator[tuple[str, ...]]:
    """How to enter a mount namespace, and these besides, that a process holds meanwhile."""
    shared = (*namespaces, "--mount")
    command = ("unshare", *shared, *(["--map-root-user"] if root else []), "sh", "-c", _HOLD)
    try:
        holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError as error:
        raise NetworkError("namespaces need the program unshare (util-linux)") from error
    with holder:  # closes its input, which ends it, and waits
        _await_ready(holder)
        # Commands stay in this directory: entering a mount namespace would take them to its root.
        yield ("nsenter", f"--target={holder.pid}", f"--wd={os.getcwd()}", *shared)


def _await_ready(holder: subprocess.Popen[str]) -> None:
    assert holder.stdout is not None and holder.stderr is not None
    if not select.select([holder.stdout], [], [], _DEADLINE_S)[0]:
        holder.kill()
        raise NetworkError(f"a namespace was not made within {_DEADLINE_S:g} s")
    if holder.stdout.readline().strip() != "ready":
        words = holder.stderr.read().strip() or "no word why"
        raise NetworkError(f"the kernel allows no namespaces here: {words}")


_BURST_BYTES = 32 * 1024
_RANDOM = 2**32 - 4096 + 56  # SKF_AD_OFF + SKF_AD_RANDOM: from where a packet filter loads a draw


class Network(Protocol):
    """Places for processes, by index."""

    @property
    def interface(self) -> str:
        """Name of the network interface at every place."""
        ...

    def host(self, index: int) -> str:
        """Address of a place."""
        ...

    def command(self, index: int) -> Sequence[str]:
        """What to put before a command so that it runs there."""
        ...

    def free_port(self) -> int:
        """A port that nobody uses at place 0."""
        ...


class Loopback:
    """All places on 127.0.0.1."""

    interface = "lo"

    def host(self, index: int) -> str:
        """See `Network.host`."""
        del index
        return "127.0.0.1"

    def command(self, index: int) -> Sequence[str]:
        """See `Network.command`."""
        del index
        return ()

    def free_port(self) -> int:
        """See `Network.free_port`."""
        return find_free_ports(1)[0]


class Shaped:
    """Places in namespaces of this process; made by `shaped`."""

    interface = "eth0"

    def __init__(self, rights: Rights) -> None:
        self.name = f"cpbench{os.getpid()}"
        self.rights = rights
        self._next_port = 29500

    def host(self, index: int) -> str:
        """See `Network.host`."""
        return f"10.213.0.{index + 1}"

    def place(self, index: int) -> str:
        """The namespace of a place."""
        return f"{self.name}-{index}"

    def command(self, index: int) -> Sequence[str]:
        """See `Network.command`."""
        return (*self.rights.command, "ip", "netns", "exec", self.place(index))

    def free_port(self) -> int:
        """See `Network.free_port`; the places are ours, so counting suffices."""
        self._next_port += 1
        return self._next_port

    def run(self, *command: str) -> None:
        """A command that makes a part of the network; raises NetworkError."""
        _run(*self.rights.command, *command)


@contextmanager
def shaped(rates_bytes_per_s: Sequence[float], loss: float = 0.0) -> Iterator[Shaped]:
    """A place for each rate, at which it sends to every neighbour, independently.

    ``loss`` is the share of packets that get lost, at random. Made with the rights that we have,
    else with those of a user namespace; raises NetworkError where the kernel forbids both.
    """
    with ExitStack() as undo:
        yield _made(rates_bytes_per_s, loss, undo)


def _made(rates_bytes_per_s: Sequence[float], loss: float, undo: ExitStack) -> Shaped:
    refusals = []
    for rights in (own_rights, user_rights):
        try:
            with ExitStack() as attempt:
                network = Shaped(attempt.enter_context(rights()))
                _build(network, rates_bytes_per_s, loss, attempt)
                undo.push(attempt.pop_all())
                return network
        except NetworkError as error:
            refusals.append(str(error))
    raise NetworkError("; ".join(refusals))


def _build(
    network: Shaped, rates_bytes_per_s: Sequence[float], loss: float, undo: ExitStack
) -> None:
    """All namespaces and cables; ``undo`` deletes what was made, also of a half-made network."""
    hub, places = f"{network.name}-hub", len(rates_bytes_per_s)
    for name in (hub, *(network.place(i) for i in range(places))):
        network.run("ip", "netns", "add", name)
        delete = (*network.rights.command, "ip", "netns", "delete", name)
        undo.callback(subprocess.run, delete, check=False, capture_output=True)
    network.run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
    network.run("ip", "-n", hub, "link", "set", "br0", "up")
    for index, rate in enumerate(rates_bytes_per_s):
        _plug_in(network, hub, index)
        _shape(network, index, places, rate)
        if loss:
            _lose(network, index, loss)


def _plug_in(network: Shaped, hub: str, index: int) -> None:
    """A cable from a place to the bridge."""
    place = network.place(index)
    network.run(
        *("ip", "-n", hub, "link", "add", f"p{index}", "type", "veth"),
        *("peer", "name", "eth0", "netns", place),
    )
    network.run("ip", "-n", hub, "link", "set", f"p{index}", "master", "br0", "up")
    network.run("ip", "-n", place, "address", "add", f"{network.host(index)}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        network.run("ip", "-n", place, "link", "set", device, "up")


def _shape(network: Shaped, index: int, places: int, rate_bytes_per_s: float) -> None:
    """One bucket per destination, so that a stage's two neighbours do not share one."""
    rate, tc = f"{round(8 * rate_bytes_per_s)}bit", ("tc", "-n", network.place(index))
    network.run(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "r2q", "100")
    for other in range(places):
        if other != index:
            class_id = f"1:{other + 1}"
            bucket = ("htb", "rate", rate, "burst", str(_BURST_BYTES))
            network.run(
                *tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", class_id, *bucket
            )
            match = ("match", "ip", "dst", f"{network.host(other)}/32", "flowid", class_id)
            where = ("parent", "1:", "protocol", "ip", "prio", "2", "u32")
            network.run(*tc, "filter", "add", "dev", "eth0", *where, *match)


def _lose(network: Shaped, index: int, share: float) -> None:
    """Drop a share of the packets that a place sends: a filter draws, a black hole takes them."""
    place = network.place(index)
    tc = ("tc", "-n", place)
    # Else the kernel hands on 64 kB at once, of which a draw would take all.
    network.run("ip", "-n", place, "link", "set", "eth0", "gso_max_segs", "1")
    made = ("dev", "eth0", "parent", "1:", "classid", "1:fff", "htb", "rate", "1mbit")
    network.run(*tc, "class", "add", *made)
    network.run(*tc, "qdisc", "add", "dev", "eth0", "parent", "1:fff", "blackhole")
    drawn = f"4,32 0 0 {_RANDOM},53 1 0 {round(share * 2**32)},6 0 0 {2**32 - 1},6 0 0 0"
    where = ("dev", "eth0", "parent", "1:", "protocol", "ip", "prio", "1")
    network.run(*tc, "filter", "add", *where, "bpf", "bytecode", drawn, "flowid", "1:fff")


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NetworkError(f"a shaped link needs the program {command[0]} (iproute2)") from error
    except subprocess.CalledProcessError as error:
        words = error.stderr.strip() or f"status {error.returncode}"
        raise NetworkError(f"a shaped link cannot be made: {' '.join(command)}: {words}") from error
