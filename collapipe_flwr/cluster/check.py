"""Check a cluster: reach every member and measure it and the links between members.

A member that trains is not measured: its figures would be wrong, and its round slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from collapipe_flwr.cluster.profile import Measured, MeasuredLink, Measurements
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig
from collapipe_flwr.core.bounds import LEAST_SPEED, MOST_SPEED
from collapipe_flwr.core.errors import Busy, CollaPipeError, LinkTimeout, Unreachable
from collapipe_flwr.core.keys import AUTO
from collapipe_flwr.core.version import explain_version
from collapipe_flwr.pipeline.benchmark import BenchmarkAnswer, BenchmarkRequest, run_benchmark
from collapipe_flwr.pipeline.compute import resolve
from collapipe_flwr.transport.client import HostClient
from collapipe_flwr.transport.diagnosis import diagnose
from collapipe_flwr.transport.methods import MOST_PROBE_S, ProbeRequest

_MEGA = 1e6
CLOCKS_DIFFER_S = 60.0
LEAST_MEMORY_BYTES = 400 * 10**6  # torch and transformers, before any model


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Extent and deadlines of a check."""

    block: BenchmarkRequest = field(default_factory=BenchmarkRequest)
    payload_bytes: int = 4 * 2**20
    deadline_s: float = 10.0  # for an answer
    most_links: int = 64  # that are measured; 0: all
    wake_s: float = 180.0  # for a board to load its libraries and run the benchmark
    clock: Callable[[], float] = time.time


# Figures of a busy member that are read without disturbing it:
_SEEN = ("address", "clock_ahead_s", "energy_sensor", "power_w", "busy", "fault")
Way = tuple[MemberConfig, MemberConfig]
Benchmark = Callable[[BenchmarkRequest], BenchmarkAnswer]


def list_ways(config: ClusterConfig) -> tuple[Way, ...]:
    """List the links that plans may use: from each device to each edge and to every other device.

    Those to edges come first, then from each device to the next one in the file, to the one
    behind that, and so on: the first few include every device.
    """
    devices = config.devices
    others = (config.control_unit.name, *(device.name for device in devices))
    edges = [edge for edge in config.edges if edge.address and edge.name not in others]
    to_edge = [(device, edge) for edge in edges for device in devices]
    count = len(devices)
    between = [
        (devices[place], devices[(place + offset) % count])
        for offset in range(1, count)
        for place in range(count)
    ]
    return (*to_edge, *between)


def choose_ways(config: ClusterConfig, settings: CheckSettings) -> tuple[Way, ...]:
    """Return the first ``most_links`` of `list_ways`, whose number is quadratic in the devices'."""
    return list_ways(config)[: settings.most_links or None]


def check_cluster(
    config: ClusterConfig, settings: CheckSettings, on_done: Callable[[str], None]
) -> Measurements:
    """Measure all members and the links between them.

    Members are the control unit (here), every device, and edges whose address the file gives.
    ``on_done`` is called with the name of each member and link. Those that fail have a ``fault``.
    While a device is at work, the whole cluster is busy; an edge may work for another cluster.
    """
    others = (*config.devices, *(edge for edge in config.edge_machines if edge.address))
    with ThreadPoolExecutor(max(len(others), 1), thread_name_prefix="check") as pool:
        # All are asked at once, to share one deadline. Those that answer are measured one after the
        # other, as they share this machine's link.
        found = list(pool.map(lambda asked: _look_at(config, asked, settings), others))
    at_work = {member.name for member in found if member.busy}
    whole = any(device.name in at_work for device in config.devices)
    here = Measured(name=config.control_unit.name, busy=whole or _is_on(config, at_work))
    members = [here if here.busy else _measure_unit(config, settings)]
    on_done(here.name)
    for member, looked in zip(others, found, strict=True):
        if whole and not looked.fault:
            looked = replace(looked, busy=True)
        idle = not (looked.busy or looked.fault)
        measured = _measure(config, member, looked, settings) if idle else looked
        faults = (measured.fault, _explain_clock(measured.clock_ahead_s or 0.0))
        members.append(replace(measured, fault="; ".join(filter(None, faults))))
        on_done(member.name)
    there = {member.name for member in members if member.delay_s is not None}
    links = []
    for source, target in choose_ways(config, settings):
        if {source.name, target.name} <= there:  # else its row says what to repair
            links.append(_measure_link(config, source, target, settings))
        on_done(f"{source.name} -> {target.name}")
    return Measurements(
        cluster_id=config.id,
        members=tuple(members),
        links=tuple(links),
        links_left_out=len(list_ways(config)) - len(choose_ways(config, settings)),
    )


def add_earlier(found: Measurements, before: Measurements) -> Measurements:
    """Take the figures of busy members and of their links from an earlier check, for planning."""
    busy = set(found.busy)
    members = [
        replace(before.find(m.name), **{name: getattr(m, name) for name in _SEEN}) if m.busy else m
        for m in found.members
    ]
    names, new = {m.name for m in members}, {(link.source, link.target) for link in found.links}
    links = [
        link
        for link in before.links
        if (ends := (link.source, link.target)) not in new
        and busy & set(ends)
        and names >= set(ends)
    ]
    return replace(found, members=tuple(members), links=(*found.links, *links))


def _is_on(config: ClusterConfig, at_work: set[str]) -> bool:
    """Return whether an edge that is at work runs on this machine, the control unit's."""
    here = (config.control_unit.host, "127.0.0.1")
    return any(edge.name in at_work and edge.host in here for edge in config.edges)


def _measure_unit(config: ClusterConfig, settings: CheckSettings) -> Measured:
    here = measure_here(config.control_unit.name, settings)
    return replace(here, fault=_explain_memory(config.control_unit, here.memory_bytes or 0))


def measure_here(name: str, settings: CheckSettings) -> Measured:
    """Measure the speed and free memory of this machine, as a member with this ``name``."""
    run = partial(run_benchmark, place=resolve(AUTO))
    return _measure_computing(Measured(name=name), settings, run)


def _measure_computing(member: Measured, settings: CheckSettings, run: Benchmark) -> Measured:
    """Run the benchmark and return the member with its figures."""
    found = run(settings.block)
    one = run(replace(settings.block, examples=1))  # whose time is mostly overhead
    speed, overhead_s = fit_speed(found, one)
    return replace(
        member,
        speed_flop_per_s=speed,
        overhead_s=overhead_s,
        memory_bytes=found.memory_bytes,
        computes=found.computes,
        torch=found.torch,
    )


def fit_speed(many: BenchmarkAnswer, one: BenchmarkAnswer) -> tuple[float, float]:
    """Fit speed and overhead to a block's times for many examples and for one.

    Where noise hides the difference, the overhead is 0.
    """
    more_s, more_flop = many.seconds - one.seconds, many.flop - one.flop
    if not (more_s > 0 and more_flop > 0):
        return _clamp_speed(many.speed_flop_per_s), 0.0
    speed = _clamp_speed(more_flop / more_s)
    return speed, max(one.seconds - one.flop / speed, 0.0)


def _clamp_speed(speed_flop_per_s: float) -> float:
    """Clamp a speed to what figures may hold: it comes from seconds that a member sent."""
    return min(max(speed_flop_per_s, LEAST_SPEED), MOST_SPEED)


def _make_client(
    config: ClusterConfig, member: MemberConfig, settings: CheckSettings
) -> HostClient:
    return HostClient(
        member.address,
        what=member.name,
        tls=config.tls_files(config.control_unit.name),
        certificate_name=config.certificate_name(member),
        deadline_s=settings.deadline_s,
        transfer_s=settings.wake_s,
    )


def _ask(
    config: ClusterConfig,
    member: MemberConfig,
    settings: CheckSettings,
    ask: Callable[[HostClient], Measured],
) -> Measured:
    """Call ``ask`` with a client of the member; return its fault if it does not answer."""
    try:
        with _make_client(config, member, settings) as client:
            return ask(client)
    except CollaPipeError as error:
        fault = _advise(config, member, error)
        return Measured(name=member.name, address=member.address, fault=fault)


def _look_at(config: ClusterConfig, member: MemberConfig, settings: CheckSettings) -> Measured:
    """Read a member's own status, without disturbing its work."""

    def look(client: HostClient) -> Measured:
        client.echo()  # connects, which must not count as delay
        before_s = settings.clock()
        status = client.ask_status()
        ahead_s = status.unix_s - (before_s + settings.clock()) / 2
        found = Measured(name=member.name, address=member.address)
        if other := explain_version(
            "it", status.version, "this machine"
        ):  # messages may differ too
            return replace(found, fault=other)
        is_idle = bool(status.resident_bytes) and not status.awake
        return replace(
            found,
            idle_bytes=status.resident_bytes if is_idle else None,
            clock_ahead_s=ahead_s,
            energy_sensor=status.energy_sensor,
            power_w=status.power_w,
            busy=status.at_work,
        )

    return _ask(config, member, settings, look)


def _measure(
    config: ClusterConfig, member: MemberConfig, looked: Measured, settings: CheckSettings
) -> Measured:
    """Measure the link to a member that is not at work, its speed and its memory."""

    def measure(client: HostClient) -> Measured:
        client.echo()
        way = client.measure_way(settings.payload_bytes)
        reached = replace(looked, rate_bit_per_s=way.rate_bit_per_s, delay_s=way.delay_s)
        try:
            found = _measure_computing(reached, settings, client.benchmark)
        except Busy:  # it began work a moment ago
            return replace(looked, busy=True)
        return replace(found, fault=_explain_memory(member, found.memory_bytes or 0))

    return _ask(config, member, settings, measure)


def _measure_link(
    config: ClusterConfig, source: MemberConfig, target: MemberConfig, settings: CheckSettings
) -> MeasuredLink:
    request = ProbeRequest(
        name=target.name,
        address=target.address,
        certificate_name=config.certificate_name(target),
        payload_bytes=settings.payload_bytes,
        deadline_s=min(settings.deadline_s, MOST_PROBE_S),
    )
    try:
        with _make_client(config, source, settings) as client:
            way = client.probe(request)
    except CollaPipeError as error:
        fault = f"{error}; let {source.name} reach {target.address}"
        return MeasuredLink(source=source.name, target=target.name, fault=fault)
    return MeasuredLink(
        source=source.name,
        target=target.name,
        rate_bit_per_s=way.rate_bit_per_s,
        delay_s=way.delay_s,
    )


def _explain_clock(ahead_s: float) -> str:
    if abs(ahead_s) <= CLOCKS_DIFFER_S:
        return ""
    way = "ahead of" if ahead_s > 0 else "behind"
    return f"its clock is {abs(ahead_s):.0f} s {way} the one here: set both (`timedatectl`)"


def _explain_memory(member: MemberConfig, free_bytes: int) -> str:
    free_mb, wanted_mb = free_bytes / _MEGA, member.memory_mb
    if wanted_mb * _MEGA > free_bytes:
        return (
            f"the file lets training use {wanted_mb:g} MB, but {free_mb:.0f} MB are free: lower "
            "memory-mb or stop other programs there"
        )
    if free_bytes < LEAST_MEMORY_BYTES:
        return (
            f"only {free_mb:.0f} MB are free, and the libraries alone take "
            f"{LEAST_MEMORY_BYTES / _MEGA:.0f} MB: stop other programs there or take another board"
        )
    return ""


def _advise(config: ClusterConfig, member: MemberConfig, error: CollaPipeError) -> str:
    if not isinstance(error, LinkTimeout | Unreachable):
        return str(error)
    known = diagnose(
        member.address,
        config.certificate_name(member),
        config.tls_files(config.control_unit.name),
    )
    if member.dials and not known:
        return (
            f"no answer at {member.address}, where its control unit relays: start `collapipe "
            "cluster serve` there, and see that the firewall lets the port through"
        )
    return known or (
        f"no answer at {member.address}: start `collapipe device` (or `edge`) there, and see "
        "that the address is right and the firewall lets the port through"
    )
