"""Output of `collapipe profile --boards`: the settings, what each board holds, and the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from collapipe_flwr.reporting.output import cell, number_table

if TYPE_CHECKING:
    from collapipe_flwr.cluster.boards import Load, Survey, Verdict

_GIB, _MIB = 2**30, 2**20
_HELD = ("frozen", "trained", "in flight", "passing", "libraries", "peak", "allowed")


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
    """Build a table with a line per board, control unit first."""
    title = f"MiB on each board, {verdict.setting.words}"
    table = number_table(title, ("board", "part"), _HELD)
    for load in verdict.loads:
        table.add_row(load.board, load.part, *_cells(load))
    return table


def _cells(load: Load) -> tuple[str, ...]:
    held = (load.frozen_bytes, load.trained_bytes, load.flight_bytes, load.passing_bytes)
    return tuple(
        cell(size, _MIB, 0) for size in (*held, load.library_bytes, load.bytes, load.room_bytes)
    )
