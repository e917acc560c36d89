"""The table of `collapipe cluster check` keeps every figure in a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Console

from collapipe_flwr.cluster.profile import Measured, MeasuredLink, Measurements
from collapipe_flwr.reporting.cost_tables import show_measurements

PI = Measured(
    name="a-rather-long-name-of-a-board",
    address="192.168.178.121:50071",
    speed_flop_per_s=123.4e9,
    memory_bytes=22_845_000_000,
    idle_bytes=260_000_000,
    clock_ahead_s=-12.3,
    rate_bit_per_s=14_573e6,
    delay_s=0.12345,
)
LINK = MeasuredLink(source=PI.name, target="edge", rate_bit_per_s=98.47e6, delay_s=0.00192)


def test_names_are_folded_and_numbers_are_whole() -> None:
    console = Console(width=80, record=True)
    show_measurements(Measurements(cluster_id="c", members=(PI,), links=(LINK,)), console)
    shown = console.export_text()
    assert "…" not in shown
    for figure in ("123.4", "22.8", "260", "-12.3", "14573", "123.45", "98", "1.92", "ok"):
        assert figure in shown.split()
