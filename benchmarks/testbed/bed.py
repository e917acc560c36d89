"""Everything that runs while policies are measured: namespaces, daemons, control units, brakes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data_plane.crew import BenchError
from benchmarks.data_plane.network import Shaped, shaped
from benchmarks.resident import forget_peak, peak_bytes, resident_bytes
from benchmarks.testbed.boards import (
    WIRED_BIT_PER_S,
    Cluster,
    Slowness,
    boards,
    cluster_toml,
)
from benchmarks.testbed.brake import slowed
from benchmarks.testbed.machines import Machine
from collapipe_flwr.cluster.profile import Measurements, read_measurements

PORT = 50071
SERVER, EDGE, FIRST = 0, 1, 2  # places; boards follow, cluster by cluster
RUN_S = 3600.0
Values = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident bytes of one device's process: before a run, and the most during it."""

    idle_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is known of a run besides its run directory."""

    useful_flop: float
    memory: Mapping[str, Memory]


class Bed:
    """Made by `running`; processes serve from then on."""

    def __init__(
        self,
        clusters: Sequence[Cluster],
        slow: Slowness,
        network: Shaped,
        folder: Path,
        stack: ExitStack,
    ) -> None:
        self._clusters, self._slow, self._network, self._folder = clusters, slow, network, folder
        self._stack, self._secret = stack, secrets.token_hex(16)
        self._files = self._write_files("cold", measured=False)
        self._server = self._start("server", SERVER, "benchmarks.testbed.server")
        edge = self._daemon("edge", "edge", EDGE)
        self._boards: dict[str, Machine] = {}
        self._devices: dict[str, Machine] = {}
        for cluster, place in self._with_places():
            for offset, board in enumerate(cluster.boards):
                self._boards[board.name] = self._board(board.name, place + offset, offset == 0)
            self._devices |= {board.name: self._boards[board.name] for board in cluster.devices}
        for machine in (edge, *self._boards.values()):
            machine.wait_until_it_serves()
        hosts = [self._network.host(place) for _, place in self._with_places()]
        self._server.ask("connect", RUN_S, _nothing, hosts=hosts)

    @property
    def links(self) -> str:
        """How links are shaped."""
        return self._network.rights.kind

    def slow_down(self) -> str:
        """Make every board as slow as it is from now on; by which means."""
        by_pid = {}
        for board in boards(self._clusters):
            machine, share = self._boards[board.name], self._slow.share(board)
            machine.share.write_text(str(share), encoding="utf-8")
            by_pid[machine.pid] = share
        return self._stack.enter_context(slowed(by_pid))

    def check(self, width: int) -> dict[str, Measurements]:
        """Measure all clusters as `collapipe cluster check` does; plans use the figures from now.

        Raises BenchError for a machine that needs mending.
        """
        files = self._write_files("checked", measured=True)
        measured = [str(self._measured(cluster)) for cluster in self._clusters]
        found = self._server.ask(
            "check", RUN_S, _nothing, clusters=self._files, measured=measured, width=width
        )
        if found:
            raise BenchError(f"the testbed is not in order: {'; '.join(found)}")
        self._files = files
        return {c.name: read_measurements(self._measured(c)) for c in self._clusters}

    def run(self, run_config: Values, look: Callable[[], None]) -> Told:
        """A whole run on these machines."""
        before = {}
        for name, machine in self._devices.items():
            before[name] = resident_bytes(machine.pid)
            forget_peak(machine.pid)
        ours = {"clusters": len(self._clusters), "edge.address": self._address(EDGE)}
        values = {**run_config, **ours}
        told = self._server.ask("run", RUN_S, look, clusters=self._files, run_config=values)
        memory = {
            name: Memory(idle_bytes=before[name], peak_bytes=peak_bytes(machine.pid))
            for name, machine in self._devices.items()
        }
        return Told(useful_flop=told["useful_flop"], memory=memory)

    def _with_places(self) -> Iterator[tuple[Cluster, int]]:
        place = FIRST
        for cluster in self._clusters:
            yield cluster, place
            place += len(cluster.boards)

    def _board(self, name: str, place: int, is_control_unit: bool) -> Machine:
        if is_control_unit:
            host = self._network.host(place)
            return self._start(name, place, "benchmarks.testbed.control_unit", host)
        return self._daemon("device", name, place)

    def _daemon(self, role: str, name: str, place: int) -> Machine:
        options = ("--listen", self._address(place), "--name", name, "--insecure", "--threads", "1")
        return self._start(name, place, "benchmarks.testbed.daemon", role, *options)

    def _start(self, name: str, place: int, *command: str) -> Machine:
        log = self._folder / f"{name}.log"
        machine = Machine(name, self._network.command(place), command, log, self._secret)
        self._stack.callback(machine.wait)
        self._stack.callback(machine.stop)
        return machine

    def _address(self, place: int) -> str:
        return f"{self._network.host(place)}:{PORT}"

    def _measured(self, cluster: Cluster) -> Path:
        return self._folder / f"{cluster.name}-measured.json"

    def _write_files(self, kind: str, *, measured: bool) -> list[str]:
        """A cluster file for every cluster."""
        paths = []
        for cluster, place in self._with_places():
            addresses = [self._address(place + n) for n in range(1, len(cluster.boards))]
            text = cluster_toml(
                cluster,
                self._slow,
                addresses,
                self._address(EDGE),
                self._measured(cluster).name if measured else "",
            )
            paths.append(self._folder / f"{cluster.name}-{kind}.toml")
            paths[-1].write_text(text, encoding="utf-8")
        return [str(path) for path in paths]


@contextmanager
def running(
    clusters: Sequence[Cluster], slow: Slowness, folder: Path, loss: float = 0.0
) -> Iterator[Bed]:
    """All machines serve while the body runs, as fast as they can until they are slowed down.

    ``loss`` is the share of packets that get lost.
    """
    uplinks = [WIRED_BIT_PER_S, WIRED_BIT_PER_S, *(b.uplink_bit_per_s for b in boards(clusters))]
    rates = [slow.rate_bytes_per_s(uplink) for uplink in uplinks]
    with shaped(rates, loss) as network, ExitStack() as stack:
        yield Bed(clusters, slow, network, folder, stack)


def _nothing() -> None:
    return None
