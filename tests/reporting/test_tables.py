"""`collapipe cluster status`, for eyes and for scripts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from collapipe_flwr.cluster.profile import Measured, MeasuredLink, Measurements
from collapipe_flwr.core.domain import BlockCost
from collapipe_flwr.deployment.deploy import show as show_deployment
from collapipe_flwr.deployment.ssh import Outcome
from collapipe_flwr.membership.members import AWAY, EXPECTED, READY, ClusterStatus, MemberStatus
from collapipe_flwr.reporting import output, tables
from collapipe_flwr.reporting.console import ProgressPrinter, summary_table
from collapipe_flwr.reporting.output import cell, format_count, progress, terminal
from collapipe_flwr.reporting.progress import ClusterProgress, RunProgress
from collapipe_flwr.reporting.screen import Bars
from collapipe_flwr.reporting.tables import (
    follow,
    show_forecast,
    show_measurements,
    status_lines,
    status_table,
)

MEMBERS = (
    MemberStatus(
        name="pi-1",
        role="device",
        address="[fe80::1]:50071",
        state=READY,
        roster=4,
        speed_flop_per_s=9.5e9,
        memory_bytes=1_500_000_000,
        resident_bytes=62_000_000,
        clock_ahead_s=-0.2,
    ),
    MemberStatus(name="pi-2", role="device", address="h:1", state=AWAY, fault="no answer"),
    MemberStatus(name="edge", role="edge", address="", state=EXPECTED),
)
FOUND = ClusterStatus(cluster_id="shed", version=5, members=MEMBERS)


def shown(console: Console) -> str:
    with console.capture() as capture:
        console.print(status_table(FOUND))
    return capture.get()


def test_lines_say_who_is_there_and_why_not() -> None:
    assert list(status_lines(FOUND)) == [
        "cluster shed, roster 5, 3 members",
        "device pi-1 at [fe80::1]:50071 ready",
        "device pi-2 at h:1 away: no answer",
        "edge edge has not joined",
    ]
    assert not FOUND.complete


def test_the_table_has_what_is_known() -> None:
    (row,) = [line for line in shown(Console(width=120)).splitlines() if "pi-1" in line]
    assert row.split() == [
        *("pi-1", "device", "[fe80::1]:50071", "ready"),
        *("9.5", "1.5", "62", "-0.2", "4"),
    ]


STRANGE = "a[bold]b[/]:b:c[/x]"  # rich would show it otherwise, or raise an error
STRANGELY_MEASURED = Measurements(
    cluster_id=STRANGE,
    members=(Measured(name=STRANGE, address="[fd00:1:2:a:1]:50071"),),
    links=(MeasuredLink(source=STRANGE, target=STRANGE, fault=STRANGE),),
)


def deployed() -> Any:
    """A deployment that failed, on machines with strange names."""
    machine = SimpleNamespace(name=STRANGE, host=STRANGE)
    failure = SimpleNamespace(machine=STRANGE, step=STRANGE, why=STRANGE, outcome=Outcome.FAILED)
    return SimpleNamespace(
        inventory=SimpleNamespace(clusters=[STRANGE], machines=[machine], registrar=machine),
        checks=[STRANGELY_MEASURED],
        failures=[failure],
        results=[failure],
        unlisted=[(STRANGE, STRANGE)],
        results_of=lambda *_: [failure],
    )


def forecast() -> Any:
    piece = BlockCost(
        forward_flop=1,
        backward_flop=1,
        parameter_bytes=1,
        state_bytes=1,
        stash_bytes=1,
        output_bytes=1,
    )
    return SimpleNamespace(
        model_type=STRANGE,
        task=STRANGE,
        parameter_bytes=1,
        profile=SimpleNamespace(embedding=piece, blocks=[piece], decoder=piece),
        measured=None,
        cluster=None,
        verdict=STRANGE,
    )


def bars() -> Bars:
    each = ClusterProgress(trained=1, of=4, per_step=1, examples=8)
    shown = Bars(now=lambda: 1.0)
    clusters = {STRANGE: each, f"{STRANGE}2": each}
    shown.show(RunProgress(phase=STRANGE, since_s=0.0, at_s=1.0, clusters=clusters))
    return shown


def summary() -> dict[str, Any]:
    return {
        "status": STRANGE,
        "metric": {"name": STRANGE, "initial": 0.0, "final": 0.5},
        "rounds": 1,
        "wall_s": 1.0,
        "lost": {STRANGE: [1]},
        "never_trained": [STRANGE],
        "energy": {"budget_j": {STRANGE: 1.0}, "mean_j": {STRANGE: 2.0}},
        "bytes": dict.fromkeys(("d2d", "d2e", "flower", "weights", "spared"), 1),
        "peak_memory_bytes": {STRANGE: 1},
    }


@pytest.mark.parametrize(
    ("show", "times"),
    [
        (lambda console: show_measurements(STRANGELY_MEASURED, console), 6),
        (lambda console: show_deployment(deployed(), console), 14),
        (lambda console: show_forecast(forecast(), console), 3),
        (lambda console: console.print(status_table(replace(FOUND, cluster_id=STRANGE))), 1),
        (lambda console: console.print(summary_table(summary())), 6),
        (lambda console: console.print(bars()), 3),
        (lambda console: ProgressPrinter(console=console).say(STRANGE), 1),
    ],
    ids=["check", "deploy", "profile", "status", "summary", "bars", "lines"],
)
def test_names_and_addresses_are_shown_as_they_are(
    show: Callable[[Console], object], times: int
) -> None:
    console = terminal(width=400)
    with console.capture() as capture:
        show(console)
    assert capture.get().count(STRANGE) >= times
    if "fd00" in capture.get():
        assert "[fd00:1:2:a:1]:50071" in capture.get()


def test_tables_and_consoles_are_made_where_markup_is_off() -> None:
    made = re.compile(r"(?<![\w.])(Table|Console)(\.grid)?\(")
    package = Path(output.__file__).parents[1]
    modules = {path: path.read_text() for path in package.rglob("*.py")}
    found = {
        path.name
        for path, text in modules.items()
        if re.search(r"from rich[.\w]* import", text) and made.search(text)
    }
    assert found == {"output.py"}


def test_it_follows_until_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_LOOK_S", 0.01)
    console = Console(force_terminal=True, width=120)
    later = ClusterStatus(cluster_id="shed", version=6, members=MEMBERS[:1])
    looks = iter([later])

    def look() -> ClusterStatus:
        try:
            return next(looks)
        except StopIteration:
            raise KeyboardInterrupt from None

    with console.capture() as capture:
        assert follow(console, FOUND, look) == later
    assert "roster 6" in capture.get()


def test_a_clock_that_is_ahead_by_almost_nothing_has_no_sign() -> None:
    assert cell(-0.01, 1.0, 1) == "0.0"


def test_a_pipe_is_told_what_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(3) as tick:
        tick("dssda")
        tick("dssda")
        begun = capsys.readouterr().err
        tick("uniform")
    assert begun.splitlines() == ["begun: 3 steps", "dssda ..."]
    assert "uniform ..." in capsys.readouterr().err


def test_a_terminal_on_which_no_bar_moves_is_told_as_a_pipe_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    with progress(3) as tick:
        tick("dssda")
        assert "dssda ..." in capsys.readouterr().err


def test_one_is_no_plural() -> None:
    assert (format_count(1, "round"), format_count(2000, "round")) == ("1 round", "2,000 rounds")
