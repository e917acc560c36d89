"""Output of `collapipe cluster check`: a row per member, and below it what to fix."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from collapipe_flwr.cluster.profile import Measured, Measurements

_GIGA, _MEGA, _MILLI = 1e9, 1e6, 1e-3


def show_measurements(found: Measurements, console: Console) -> None:
    """Print the tables and one sentence per member or link that needs mending."""
    console.print(measurements_table(found))
    if found.links:
        console.print(links_table(found))
    if found.links_left_out:
        console.print(
            f"{found.links_left_out} more links between devices were not measured: "
            "`--most-links 0` tries all of them",
            highlight=False,
        )
    for fault in found.faults:
        console.print(f"mend {fault}", style="red", highlight=False, markup=False)


def measurements_table(found: Measurements) -> Table:
    """One line per member."""
    table = _table(f"cluster {found.cluster_id}", "member", "address")
    _add_numbers(table, "GFLOP\n/s", "free\nGB", "idle\nMB", "clock\ns", "Mbit\n/s", "delay\nms")
    for member in found.members:
        table.add_row(*_cells(member))
    return table


def links_table(found: Measurements) -> Table:
    """One line per way between two hosts."""
    table = _table("links", "from", "to")
    _add_numbers(table, "Mbit\n/s", "delay\nms")
    for link in found.links:
        rate, delay = _number(link.rate_bit_per_s, _MEGA, 0), _number(link.delay_s, _MILLI, 2)
        table.add_row(link.source, link.target, rate, delay, _mark(link.fault))
    return table


def _table(title: str, *names: str) -> Table:
    """Names may be folded where a terminal is narrow, numbers may not."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _add_numbers(table: Table, *headers: str) -> None:
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)


def _mark(fault: str) -> str:
    return "[red]mend[/red]" if fault else "[green]ok[/green]"


def _cells(member: Measured) -> tuple[str, ...]:
    return (
        member.name,
        member.address or "here",
        _number(member.speed_flop_per_s, _GIGA, 1),
        _number(member.memory_bytes, _GIGA, 1),
        _number(member.idle_bytes, _MEGA, 0),
        _number(member.clock_ahead_s, 1.0, 1),
        _number(member.rate_bit_per_s, _MEGA, 0),
        _number(member.delay_s, _MILLI, 2),
        _mark(member.fault),
    )


def _number(value: float | None, unit: float, digits: int) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"
