"""Output of `collapipe cluster status`: a table that stays up to date, or plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from collapipe_flwr.reporting.output import number, number_table

if TYPE_CHECKING:
    from collapipe_flwr.membership.members import ClusterStatus, MemberStatus

_GIGA, _MEGA = 1e9, 1e6
_LOOK_S = 1.0
_COLOURS = {"ready": "green", "stopping": "yellow", "away": "red"}


def follow(
    console: Console, first: ClusterStatus, look: Callable[[], ClusterStatus]
) -> ClusterStatus:
    """Show the table, anew every second, until Ctrl-C; the last status."""
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
    """One line per member."""
    title = f"cluster {found.cluster_id}, roster {found.version}"
    figures = ("GFLOP\n/s", "memory\nGB", "daemon\nMB", "clock\ns", "roster")
    table = number_table(title, ("member", "role", "address", "state"), figures)
    for member in found.members:
        colour = _COLOURS.get(member.state, "")
        state = f"[{colour}]{member.state}[/]" if colour else member.state
        table.add_row(member.name, member.role, escape(member.address), state, *_figures(member))
    return table


def status_lines(found: ClusterStatus) -> Iterator[str]:
    """The same as text, with why somebody is away."""
    yield f"cluster {found.cluster_id}, roster {found.version}, {len(found.members)} members"
    for member in found.members:
        where = f" at {member.address}" if member.address else ""
        fault = f": {member.fault}" if member.fault else ""
        yield f"{member.role} {member.name}{where} {member.state}{fault}"


def _figures(member: MemberStatus) -> tuple[str, ...]:
    return (
        number(member.speed_flop_per_s, _GIGA, 1),
        number(member.memory_bytes, _GIGA, 1),
        number(member.resident_bytes, _MEGA, 0),
        number(member.clock_ahead_s, 1.0, 1),
        "" if member.roster is None else str(member.roster),
    )
