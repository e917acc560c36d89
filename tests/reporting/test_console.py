"""The two lines of a round in plain output."""

from __future__ import annotations

import pytest

from collapipe_flwr.reporting.console import RoundPrinter
from collapipe_flwr.reporting.events import RoundEvent


def test_empty_energy_queues_have_no_sign(capsys: pytest.CaptureFixture[str]) -> None:
    queues_j = {"A/1": -0.0, "A/2": -0.0}
    event = RoundEvent(round_index=1, wall_s=1.0, metrics={}, loss=1.0, queues_j=queues_j)
    RoundPrinter(1).show(event)
    assert "energy queue at most 0 J" in capsys.readouterr().out
