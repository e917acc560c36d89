"""The machines of the testbed: boards of the presets, all slowed down by one factor.

Everything that a board does per second is divided by the same factor: operations, bits sent and
watts. So a round takes that many times as long as on the boards, joules and all proportions stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from collapipe_flwr.core.domain import DeviceProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.simulation.devices import GIGA, MEGA, device_preset

CONTROL_UNIT = "raspberry-pi-5"
# The boards of two clusters of six, as preset `paper` draws them for the first seed of its table.
DEVICES = (
    "raspberry-pi-5,jetson-nano,jetson-nano,phone,raspberry-pi-4,phone;"
    "raspberry-pi-5,raspberry-pi-4,raspberry-pi-5,phone,jetson-nano,phone"
)
LOAD = 0.9  # of the host's processors, if all boards computed at once; no plan keeps all busy
# What boards send per second: 802.11ac, one antenna or two, and Gigabit Ethernet at a socket.
UPLINK_BIT_PER_S = {
    "raspberry-pi-4": 200e6,
    "raspberry-pi-5": 200e6,
    "phone": 400e6,
    "jetson-nano": 600e6,
    "jetson-orin-nano": 600e6,
}
WIRED_BIT_PER_S = 900e6  # control units, the edge and the server
D2D_MHZ = 20.0  # of a hop, from which plans expect rates before they have seen any


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One process: its name, its class of board, and the bits that it sends per second."""

    name: str
    preset: DeviceProfile
    uplink_bit_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A control unit and its devices."""

    name: str
    control_unit: Board
    devices: tuple[Board, ...]

    @property
    def boards(self) -> tuple[Board, ...]:
        """The control unit first."""
        return (self.control_unit, *self.devices)


def read_clusters(text: str, uplink_bit_per_s: float = 0.0) -> tuple[Cluster, ...]:
    """Kinds of devices, with ``,`` between them and ``;`` between clusters; raises ConfigError.

    All boards send ``uplink_bit_per_s``, or with 0 each what its class does.
    """
    lists = [[kind.strip() for kind in part.split(",")] for part in text.split(";")]
    return tuple(_cluster(f"cluster-{m}", kinds, uplink_bit_per_s) for m, kinds in enumerate(lists))


def _cluster(name: str, kinds: Sequence[str], uplink_bit_per_s: float) -> Cluster:
    return Cluster(
        name=name,
        control_unit=Board(
            name=f"{name}-cu",
            preset=device_preset(CONTROL_UNIT),
            uplink_bit_per_s=uplink_bit_per_s or WIRED_BIT_PER_S,
        ),
        devices=tuple(
            Board(
                name=f"{name}-{n}-{kind}",
                preset=device_preset(kind),
                uplink_bit_per_s=uplink_bit_per_s or UPLINK_BIT_PER_S[kind],
            )
            for n, kind in enumerate(kinds, start=1)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """How the boards fit on this host.

    A board is ``factor`` times slower than its preset and has a share of one processor of this
    host, which computes ``host_flop_per_s`` on one thread.
    """

    factor: float
    host_flop_per_s: float

    def share(self, board: Board) -> float:
        """Of one processor."""
        return board.preset.speed_flop_per_s / self.factor / self.host_flop_per_s

    def rate_bytes_per_s(self, uplink_bit_per_s: float) -> float:
        """What is sent at most, through a shaped link."""
        return uplink_bit_per_s / self.factor / 8


def slowness(
    clusters: Sequence[Cluster], host_flop_per_s: float, processors: int, factor: float
) -> Slowness:
    """The factor asked for; with 0 that at which all boards at once take `LOAD` of the host.

    Raises ConfigError for a factor that would leave the host nothing.
    """
    speeds = [board.preset.speed_flop_per_s for board in boards(clusters)]
    whole = sum(speeds) / (host_flop_per_s * processors)
    least = max(whole, max(speeds) / host_flop_per_s) / 0.9
    if 0 < factor < least:
        raise ConfigError(
            f"--slow-down {factor:g}: these boards need more of this host than it has; take at "
            f"least {least:.1f}, or 0 to have it chosen"
        )
    return Slowness(factor=factor or max(whole / LOAD, least), host_flop_per_s=host_flop_per_s)


def boards(clusters: Sequence[Cluster]) -> Iterator[Board]:
    """All of them, cluster by cluster."""
    return (board for cluster in clusters for board in cluster.boards)


def cluster_toml(
    cluster: Cluster, slow: Slowness, addresses: Sequence[str], edge: str, measured: str
) -> str:
    """The cluster file; speeds come from the file ``measured``, where that is not empty."""
    server_bit_per_s = cluster.control_unit.uplink_bit_per_s / slow.factor
    tables = [
        f'id = "{cluster.name}"\n' + (f'measured = "{measured}"\n' if measured else ""),
        _member("[control-unit]", cluster.control_unit, slow, ""),
        *(
            _member("[[device]]", board, slow, address)
            for board, address in zip(cluster.devices, addresses, strict=True)
        ),
        f'[edge]\naddress = "{edge}"\n',
        f"[links]\nserver-mbit-per-s = {server_bit_per_s / MEGA}\n"
        f"bandwidth-mhz = {D2D_MHZ / slow.factor}\n",
    ]
    return "\n".join(tables)


def _member(title: str, board: Board, slow: Slowness, address: str) -> str:
    preset = board.preset
    lines = [
        title,
        f'name = "{board.name}"',
        f'kind = "{preset.kind}"',
        f"energy-per-gflop-j = {preset.energy_per_flop_j * GIGA}",
        f"tx-power-w = {preset.tx_power_max_w / slow.factor}",
        f"memory-mb = {preset.memory_bytes / MEGA}",
        *([f'address = "{address}"'] if address else []),
    ]
    return "\n".join(lines) + "\n"
