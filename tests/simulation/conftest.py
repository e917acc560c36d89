"""One small setting that every policy can plan."""

from __future__ import annotations

import pytest

from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.models import ModelShape
from collapipe_flwr.simulation.setting import Setting


@pytest.fixture
def small() -> Setting:
    """Two clusters of two devices, four narrow blocks, three rounds."""
    return Setting(
        clusters=2,
        devices=2,
        examples=200,
        rounds=3,
        policies=("dssda", "fedavg", "uniform"),
        model=ModelShape(blocks=4, width=128, tokens=32),
        settings=SchedulerConfig(micro_batch_sizes=(2, 4), micro_batches=(2, 4)),
    )
