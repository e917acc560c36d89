"""Output of `collapipe cluster status`, `cluster check` and `profile`: tables, and a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from collapipe_flwr.core.json_codec import to_plain
from collapipe_flwr.reporting.output import cell, number_table

if TYPE_CHECKING:
    from collapipe_flwr.cluster.forecast import Forecast
    from collapipe_flwr.cluster.profile import Measured, Measurements
    from collapipe_flwr.core.domain import BlockCost
    from collapipe_flwr.membership.members import ClusterStatus

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collapipe_flwr.cluster.boards import Load, Survey, Verdict

_GIGA, _MEGA, _MILLI = 1e9, 1e6, 1e-3
_COLUMNS = (
    "forward\nGFLOP",
    "backward\nGFLOP",
    "weights\nMB",
    "training\nMB",  # weights, gradients and optimizer state
    "kept\nMB",  # activations until the backward pass
    "sent\nMB",
)
_LOOK_S = 1.0
_COLOURS = {"ready": "green", "stopping": "yellow", "away": "red"}
_GIB, _MIB = 2**30, 2**20
_HELD = ("frozen\ntrained", "in flight\npassing", "message\nlibraries", "peak\nallowed")


def show_measurements(found: Measurements, console: Console) -> None:
    """Print the tables and one sentence per fault."""
    console.print(measurements_table(found))
    if compute := describe_compute(found):
        console.print(f"compute: {compute}")
    console.print(f"energy: {describe_meters(found)}")
    if found.links:
        console.print(links_table(found))
    if found.links_left_out:
        console.print(
            f"{found.links_left_out} more links between devices were not measured: "
            "`--most-links 0` tries all of them",
        )
    if found.busy:
        console.print(
            f"at work, not measured: {', '.join(found.busy)}. Earlier figures stay in force; check "
            "again when nothing trains there",
            style="yellow",
        )
    for fault in found.faults:
        console.print(f"mend {fault}", style="red")


def measurements_table(found: Measurements) -> Table:
    """Build a table with a line per member."""
    figures = ("GFLOP\n/s", "free\nGB", "idle\nMB", "clock\ns", "Mbit\n/s", "delay\nms", "")
    table = number_table(f"cluster {found.cluster_id}", ("member", "address"), figures)
    for member in found.members:
        table.add_row(
            member.name,
            member.address or "here",
            cell(member.speed_flop_per_s, _GIGA, 1),
            cell(member.memory_bytes, _GIGA, 1),
            cell(member.idle_bytes, _MEGA, 0),
            cell(member.clock_ahead_s, 1.0, 1),
            cell(member.rate_bit_per_s, _MEGA, 0),
            cell(member.delay_s, _MILLI, 2),
            _mark(member.fault, busy=member.busy),
        )
    return table


def describe_compute(found: Measurements) -> str:
    """Name the processor and torch version of the benchmark; equal members are grouped."""
    alike: dict[str, list[str]] = {}
    for member in found.members:
        if member.computes:
            alike.setdefault(f"{member.computes}, torch {member.torch}", []).append(member.name)
    return "; ".join(f"{', '.join(names)} on {what}" for what, names in alike.items())


def describe_meters(found: Measurements) -> str:
    """Name sensor and power of each metered device, then the devices that are modelled."""

    def meter(member: Measured) -> str:
        tells = "tells no power now" if member.power_w is None else f"{member.power_w:.1f} W"
        return f"{member.name} {tells} ({member.energy_sensor})"

    metered = [meter(member) for member in found.members if member.energy_sensor]
    modelled = [m.name for m in found.members if not m.energy_sensor and not m.fault]
    return "; ".join([*metered, f"modelled for {', '.join(modelled)}"] if modelled else metered)


def links_table(found: Measurements) -> Table:
    """Build a table with a line per direction between two hosts."""
    table = number_table("links", ("from", "to"), ("Mbit\n/s", "delay\nms", ""))
    for link in found.links:
        rate, delay = cell(link.rate_bit_per_s, _MEGA, 0), cell(link.delay_s, _MILLI, 2)
        table.add_row(link.source, link.target, rate, delay, _mark(link.fault))
    return table


def _mark(fault: str, *, busy: bool = False) -> Text:
    if fault:
        return Text("mend", style="red")
    return Text("busy", style="yellow") if busy else Text("ok", style="green")


def show_forecast(found: Forecast, console: Console) -> None:
    """Print the table, this machine's speed, and the verdict."""
    console.print(cost_table(found))
    if found.measured is not None:
        timed = found.measured
        console.print(
            f"this machine: {timed.speed_flop_per_s / _GIGA:.1f} GFLOP/s on one block and "
            f"{timed.examples} examples (forward {timed.forward_s / _MILLI:.1f} ms, backward "
            f"{timed.backward_s / _MILLI:.1f} ms)",
        )
    fits = found.cluster is None or found.plan is not None
    console.print(found.verdict, style="green" if fits else "red")


def cost_table(found: Forecast) -> Table:
    """Build a table with a line per piece, equal neighbors together; costs are per example."""
    size = f"{found.parameter_bytes / _MEGA:.1f} MB of weights"
    title = f"{found.model_type} for {found.task}: {size}, costs per example"
    table = number_table(title, ("piece",), _COLUMNS)
    table.add_row("embedding (control unit)", *_cost_cells(found.profile.embedding))
    first = 0
    for cost, group in groupby(found.profile.blocks):
        last = first + len(list(group)) - 1
        name = f"block {first}" if last == first else f"each of blocks {first}-{last}"
        table.add_row(name, *_cost_cells(cost))
        first = last + 1
    table.add_row("edge", *_cost_cells(found.profile.decoder))
    return table


def as_json(found: Forecast) -> dict[str, Any]:
    """Return everything in SI units, for a file."""
    values: dict[str, Any] = to_plain(found)
    speed = None if found.measured is None else found.measured.speed_flop_per_s
    return {
        **values,
        "parameter_bytes": found.parameter_bytes,
        "speed_flop_per_s": speed,
        "fits": None if found.cluster is None else found.plan is not None,
        "verdict": found.verdict,
    }


def _cost_cells(cost: BlockCost) -> tuple[str, ...]:
    return (
        f"{cost.forward_flop / _GIGA:.3f}",
        f"{cost.backward_flop / _GIGA:.3f}",
        f"{cost.parameter_bytes / _MEGA:.2f}",
        f"{cost.state_bytes / _MEGA:.2f}",
        f"{cost.stash_bytes / _MEGA:.2f}",
        f"{cost.output_bytes / _MEGA:.3f}",
    )


def follow(
    console: Console, first: ClusterStatus, look: Callable[[], ClusterStatus]
) -> ClusterStatus:
    """Show the table, updated every second, until Ctrl-C; returns the last status."""
    found = first
    try:
        with Live(status_table(found), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(_LOOK_S)
                found = look()
                live.update(status_table(found), refresh=True)
    except KeyboardInterrupt:
        return found


def status_table(found: ClusterStatus) -> Table:
    """Build a table with a line per member."""
    title = f"cluster {found.cluster_id}, roster {found.version}"
    figures = ("GFLOP\n/s", "memory\nGB", "daemon\nMB", "clock\ns", "roster")
    table = number_table(title, ("member", "role", "address", "state"), figures)
    for member in found.members:
        table.add_row(
            member.name,
            member.role,
            member.address,
            Text(member.state, style=_COLOURS.get(member.state, "")),
            cell(member.speed_flop_per_s, _GIGA, 1),
            cell(member.memory_bytes, _GIGA, 1),
            cell(member.resident_bytes, _MEGA, 0),
            cell(member.clock_ahead_s, 1.0, 1),
            cell(member.roster, 1, 0),
        )
    return table


def status_lines(found: ClusterStatus) -> Iterator[str]:
    """Yield the status as text, with the reason why a member is away."""
    yield f"cluster {found.cluster_id}, roster {found.version}, {len(found.members)} members"
    for member in found.members:
        where = f" at {member.address}" if member.address else ""
        fault = f": {member.fault}" if member.fault else ""
        yield f"{member.role} {member.name}{where} {member.state}{fault}"


def show_boards(found: Survey, console: Console) -> None:
    """Print a line per setting, a line per board of the first that fits, and the answer."""
    console.print(settings_table(found))
    if found.fitting:
        console.print(loads_table(found.fitting[0]))
    console.print(found.answer, style="green" if found.fitting else "red")


def settings_table(found: Survey) -> Table:
    """Build a table with a line per setting."""
    kinds = tuple(found.verdicts[0].least)
    numbers = ("tokens", "micro-\nbatch", "fullest\nGiB", "these\nboards")
    least = tuple(f"least\n{kind}" for kind in kinds)
    table = number_table(f"{found.model}: who trains it", ("trains",), (*numbers, *least))
    for verdict in found.verdicts:
        setting, loads = verdict.setting, verdict.loads
        table.add_row(
            f"adapters over {setting.frozen_dtype}" if setting.frozen_dtype else "all weights",
            str(setting.length),
            str(setting.size),
            cell(max((load.bytes for load in loads), default=None), _GIB, 2),
            "yes" if loads else "no",
            *(str(verdict.least[kind] or "-") for kind in kinds),
        )
    return table


def loads_table(verdict: Verdict) -> Table:
    """Build a table with two lines per board, control unit first, and so two numbers in a cell."""
    title = f"MiB on each board, {verdict.setting.words}"
    table = number_table(title, ("board\npart",), _HELD)
    for load in verdict.loads:
        table.add_row(f"{load.board}\n{load.part}", *_cells(load))
    return table


def _cells(load: Load) -> Iterator[str]:
    pairs = (
        (load.frozen_bytes, load.trained_bytes),
        (load.flight_bytes, load.passing_bytes),
        (load.message_bytes, load.library_bytes),
        (load.bytes, load.room_bytes),
    )
    return ("\n".join(cell(size, _MIB, 0) for size in pair) for pair in pairs)
