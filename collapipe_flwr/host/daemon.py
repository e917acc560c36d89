"""The process of a host: it listens, serves, and stops in good order on SIGTERM."""

from __future__ import annotations

import faulthandler
import gc
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from collapipe_flwr.core.bounds import NAME
from collapipe_flwr.core.durable import make_own_folder
from collapipe_flwr.core.errors import ConfigError, prefix_errors
from collapipe_flwr.core.imports import allow
from collapipe_flwr.core.keys import AUTO, CPU, check, compute_name
from collapipe_flwr.core.links import TlsFiles, is_loopback, split_address
from collapipe_flwr.core.processes import stop_on_signals
from collapipe_flwr.host.allocator import configure_malloc
from collapipe_flwr.host.energy import NONE, EnergyMeter, make_energy_meter
from collapipe_flwr.host.metrics import HostMetrics, Tally, serve_metrics
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.host.server import Listener

if TYPE_CHECKING:
    from torch import Tensor, nn

    from collapipe_flwr.host.servicer import Servicer
    from collapipe_flwr.pipeline.config import SessionRequest

_log = logging.getLogger(__name__)
_BREAK_OFF_S = 1.0  # for the error to reach peers
_LEAVE_S = 30.0  # from the end of the grace until the process is ended by force
_IW_S = 5.0
_LEAST_W = 1e-3  # 0 dBm, the least that `iw` and most radios take
_COMPUTE = "--compute"
_INTERFACES = Path("/sys/class/net")
UNUSED_LIBRARIES = ("scipy", "sklearn")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """Settings of one daemon, which neighbours call `name`.

    `rosters` say who may call what (None: all whom the CA signed). On a stop, open sessions get
    `grace_s` to be closed; new ones are refused at once. Frozen weights are kept in `cache_dir`, up
    to `cache_bytes`. The daemon computes on `compute`, with `threads` (0: torch's choice), and
    holds up to `memory_bytes` of models there, see `ledger` (0: as much as is free when the first
    caller comes). Planned transmit power is set on `radio_interface` (empty: on none), and
    `energy_sensor` meters energy, see `energy`. Own models and losses may come from the modules in
    `imports`. Prometheus scrapes the address `metrics` (empty: nothing is served). With `dial` the
    daemon needs no open port: it dials the control unit called `unit` at that address.
    """

    listen: str
    name: str
    tls: TlsFiles | None = None
    insecure: bool = False
    rosters: Rosters | None = None
    cache_dir: Path | None = None
    cache_bytes: int = 8 * 10**9
    compute: str = AUTO
    memory_bytes: int = 8 * 2**30
    radio_interface: str = ""
    energy_sensor: str = NONE
    threads: int = 0
    imports: tuple[str, ...] = ()
    grace_s: float = 10.0
    metrics: str = ""
    dial: str = ""
    unit: str = ""

    @property
    def cache_folder(self) -> Path | None:
        """`cache_dir`, or None where nothing may be kept."""
        return self.cache_dir if self.cache_bytes > 0 else None

    def __post_init__(self) -> None:
        with prefix_errors("--listen"):
            host, _ = split_address(self.listen, least=0)
        if self.tls is None and not self.insecure and not is_loopback(host):
            raise ConfigError(
                f"--listen {self.listen} without TLS would let anybody in the network read and "
                "change the model: give --tls-ca, --tls-cert and --tls-key (`collapipe certs` "
                "makes them), or --insecure if that is meant"
            )
        check("--name", self.name, NAME)
        check(_COMPUTE, self.compute, compute_name())
        if not self.memory_bytes >= 0:
            raise ConfigError(f"--memory-mb must be >= 0, got {self.memory_bytes / 1e6:g}")
        name = self.radio_interface
        if name and (not name.isalnum() or len(name) > 15):
            raise ConfigError(
                f"--radio-interface must be the name of an interface, as wlan0, got {name!r}"
            )
        if name and _INTERFACES.is_dir() and not (_INTERFACES / name).exists():
            here = ", ".join(sorted(path.name for path in _INTERFACES.iterdir()))
            raise ConfigError(f"--radio-interface {name} is not here: choose one of {here}")


def serve(settings: HostSettings, *, passes_on: bool, announce: Callable[[str], None]) -> None:
    """Host parts until SIGTERM or SIGINT; `announce` gets the address once it listens.

    A device `passes_on` to the next host, the edge does not. Raises ConfigError when it cannot
    listen.
    """
    configure_malloc()
    if settings.cache_folder is not None:
        make_own_folder(
            settings.cache_folder, "--cache-dir"
        )  # it is used when the first caller comes
    allow(*settings.imports)
    if settings.tls is None:
        _log.warning(
            "plain text: anybody who reaches %s can read and change everything", settings.listen
        )
    meter = make_energy_meter(settings.energy_sensor)
    tally = Tally()
    make = partial(_make_servicer, settings, passes_on, meter, tally)
    at_once = settings.compute not in (AUTO, CPU)
    made = make() if at_once else None
    listener = Listener(
        settings.listen,
        lambda: made or make(),
        tls=settings.tls,
        meter=meter,
        rosters=settings.rosters,
        on_edge=not passes_on,
    )
    removed: list[str] = []
    metrics = HostMetrics(settings.name, listener.measure_load, tally)
    with stop_on_signals() as stop:

        def leave(why: str) -> None:
            removed.append(why)
            stop.set()

        if settings.rosters is not None:
            settings.rosters.on_removed = leave
        with (
            listener,
            serve_metrics(settings.metrics, metrics),
            _make_reachable(settings, listener.address, announce),
        ):
            stop.wait()
            # Nothing may keep the process: past this time it ends with 1, and stderr shows why.
            faulthandler.dump_traceback_later(settings.grace_s + _LEAVE_S, exit=True)
            for why in removed:
                _log.warning("%s: it stops, and what it was at is broken off", why)
            listener.drain(0.0 if removed else settings.grace_s)
            listener.stop(_BREAK_OFF_S)


@contextmanager
def _make_reachable(
    settings: HostSettings, listens: str, announce: Callable[[str], None]
) -> Iterator[None]:
    """Announce the address by which others reach this host: its own, or the one it dials."""
    if not settings.dial:
        announce(listens)
        yield
        return
    from collapipe_flwr.transport.dialing import Dialing  # most daemons need not load it

    assert settings.tls is not None
    first = iter([lambda: announce(settings.dial)])
    dialing = Dialing(
        relay=settings.dial,
        unit=settings.unit,
        tls=settings.tls,
        listens=listens,
        on_admitted=lambda: next(first, lambda: None)(),
    )
    with dialing():
        yield


def hide_unused_libraries() -> None:
    """Make libraries that no host uses impossible to import, unless one is loaded already.

    transformers loads them wherever they are installed, to match boxes and score text, which costs
    a device some 40 MB. Modules of a user may need them, so a host with such modules hides none.
    Python cannot import a name that is None in `sys.modules`.
    """
    modules = cast("dict[str, object]", sys.modules)
    for name in UNUSED_LIBRARIES:
        modules.setdefault(name, None)


def _make_servicer(
    settings: HostSettings, passes_on: bool, meter: EnergyMeter, tally: Tally
) -> Servicer:
    if not settings.imports:
        hide_unused_libraries()
    import torch

    from collapipe_flwr.host.ledger import Ledger
    from collapipe_flwr.host.service import HostService, refuse_next_hop
    from collapipe_flwr.host.servicer import Servicer
    from collapipe_flwr.host.stores import TensorStore, WeightCache
    from collapipe_flwr.pipeline.compute import describe, measure_free_bytes, resolve
    from collapipe_flwr.transport.client import Dialer

    if settings.threads:
        torch.set_num_threads(settings.threads)
    dialer = Dialer(name=settings.name, tls=settings.tls) if passes_on else None
    folder = settings.cache_folder
    place = resolve(settings.compute, _COMPUTE)
    _log.info("computing on %s", describe(place))
    ledger = Ledger(settings.memory_bytes or measure_free_bytes(place))
    service = HostService(
        build_part,
        connect=dialer or refuse_next_hop,
        store=TensorStore(ledger) if passes_on else None,  # the edge's clusters differ
        cache=WeightCache(folder, settings.cache_bytes) if folder is not None else None,
        set_power=partial(set_power, settings.radio_interface),
        meter=meter,
        ledger=ledger,
        tally=tally,
        compute=place,
    )
    probe = dialer.probe if dialer else None
    rosters = None if passes_on else settings.rosters
    return Servicer(
        service,
        control_units=lambda: rosters.access.control_units if rosters else 1,
        probe=probe,
    )


def build_part(request: SessionRequest, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build a part, and keep the garbage collector from the libraries that this imports."""
    from collapipe_flwr.host.service import build_transformers_part

    _freeze_libraries()
    return build_transformers_part(request, weights)


@cache
def _freeze_libraries() -> None:
    """Keep the garbage collector from all objects of the libraries, once per process.

    A collection that visits them would delay a slow board in the middle of a step.
    """
    import collapipe_flwr.models.splitter  # noqa: F401

    gc.collect()
    gc.freeze()


def set_power(interface: str, tx_power_w: float) -> None:
    """Set the transmit power of a Wi-Fi interface (empty: none), in W.

    ``iw`` sets it, which needs CAP_NET_ADMIN. A failure is logged, and training goes on.
    """
    if not interface:
        return
    command = [
        "iw",
        "dev",
        interface,
        "set",
        "txpower",
        "fixed",
        str(to_millibel_milliwatts(tx_power_w)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IW_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("planned power not applied: %s", error)
        return
    if done.returncode != 0:
        _log.warning("planned power not applied: `%s`: %s", " ".join(command), done.stderr)


def to_millibel_milliwatts(tx_power_w: float) -> int:
    """Convert watts to hundredths of dBm, the unit of ``iw``."""
    return round(100 * 10 * math.log10(max(tx_power_w, _LEAST_W) / 1e-3))
