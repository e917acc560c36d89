"""Daemons that slow down in mid-run: plans follow what they measured, and predictions hold."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from transformers import BertForSequenceClassification

from collapipe_flwr import Cluster, CollaPipe, LocalGrid, SplitModel
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.round import RoundRecord
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from tests.cluster.daemon_processes import Daemon, running
from tests.federation.test_library import CONFIG, LENGTH, loader

NODE, BATCH, BLOCKS = 1, 8, 6
BOARDS = ("board-1", "board-2", "board-3")
FILE = 'id = "shed"\n[control-unit]\nname = "shed-cu"\n'
DEVICE = '[[device]]\nname = "{}"\naddress = "{}"\nspeed-gflop-per-s = 0.03\n'
Factors = Callable[[int, RoundRecord | None], Mapping[str, float | str]]


def new_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    deep = CONFIG.to_dict() | {"num_hidden_layers": BLOCKS}
    return BertForSequenceClassification(type(CONFIG)(**deep))


def run(
    tmp_path: Path, rounds: int, slowness: Factors, *, sensor: str = "none"
) -> list[RoundRecord]:
    """A user's project on three daemons; ``slowness`` of a round may look at the one before it."""
    records: list[RoundRecord] = []
    files = {name: tmp_path / f"{name}.factor" for name in BOARDS}

    def set_boards() -> None:
        factors = slowness(len(records) + 1, records[-1] if records else None)
        for name, file in files.items():
            file.write_text(str(factors.get(f"shed/{name}", 1.0)))

    def on_round(record: RoundRecord) -> None:
        records.append(record)
        set_boards()

    app = ClientApp()
    cluster = Cluster(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return cluster.train(message, context, loader(NODE, BATCH), epochs=2)

    set_boards()
    daemons = [
        Daemon("device", "--name", n, "--energy-sensor", sensor, slow=f) for n, f in files.items()
    ]
    with running(*daemons) as hosts:
        file = tmp_path / "shed.toml"
        addresses = zip(BOARDS, (host.address for host in hosts), strict=True)
        file.write_text(FILE + "".join(DEVICE.format(*each) for each in addresses))
        strategy = CollaPipe(
            FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1),
            model=SplitModel(new_model(), batch_size=BATCH, length=LENGTH),
            scheduler=Planning(settings=SchedulerConfig(bound=False)),
            on_round=on_round,
            on_total_failure="raise",
        )
        grid = LocalGrid({NODE: app}, node_configs={NODE: {"cluster": str(file)}})
        start = ArrayRecord(new_model().state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds)
    return records


def blocks(record: RoundRecord) -> dict[str, int]:
    (plan,) = record.plan.clusters
    return {s.device_id: s.stop_block - s.first_block for s in plan.segments}


def error(record: RoundRecord) -> float:
    (outcome,) = record.outcome.clusters
    assert outcome.measured
    return abs(math.log(record.plan.clusters[0].latency_s / outcome.latency_s))


def throttling(start: int, stop: int) -> tuple[Factors, Callable[[], str]]:
    """The device with most blocks is 4 times slower from one round up to another."""
    chosen: list[str] = []

    def slowness(index: int, before: RoundRecord | None) -> Mapping[str, float]:
        if index == start and before is not None:
            held = blocks(before)
            chosen.append(max(held, key=lambda name: held[name]))
        return {chosen[0]: 4.0} if chosen and start <= index < stop else {}

    return slowness, lambda: chosen[0]


def assert_followed(records: list[RoundRecord], name: str) -> None:
    """Round 5 was the first in which the device was slow."""
    held = [blocks(record).get(name, 0) for record in records]
    assert held[6] < held[3]


def assert_predicted(records: list[RoundRecord]) -> None:
    """Of a cluster whose 5th to 7th rounds were surprises; on a machine that does nothing else."""
    calm = [*records[2:4], *records[6:9]]
    assert np.median([error(record) for record in calm]) < 0.1
    stages = [s for r in calm for s in r.outcome.clusters[0].stages if s.device_id in blocks(r)]
    missed = [abs(math.log(sample.expected_s / sample.busy_s)) for sample in stages]
    assert np.median(missed) < 0.1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_throttled_daemon_loses_blocks_within_three_rounds(tmp_path: Path) -> None:
    slowness, name = throttling(5, 100)
    records = run(tmp_path, 9, slowness)
    assert_followed(records, name())
    (outcome,) = records[-1].outcome.clusters
    busy = {s.device_id for s in outcome.stages if s.device_id}
    assert all(outcome.energy_j[device] > 0 for device in busy)
    assert outcome.metered == ()


@pytest.mark.timeout(300)
@pytest.mark.long
def test_rounds_go_on_modelled_when_a_sensor_that_metered_them_vanishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensor = tmp_path / "vcgencmd"
    sensor.write_text("#!/bin/sh\necho VDD_A 'current(0)=3.0A'\necho VDD_V 'volt(1)=1.0V'\n")
    sensor.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def vanish(index: int, before: RoundRecord | None) -> Mapping[str, float]:
        del before
        if index == 3:
            sensor.unlink()
        return {}

    records = run(tmp_path, 3, vanish, sensor="auto")
    outcomes = [record.outcome.clusters[0] for record in records]
    busy = [set(blocks(record)) for record in records]
    assert [set(outcome.metered) for outcome in outcomes] == [busy[0], busy[1], set()]
    for record, outcome in zip(records, outcomes, strict=True):
        assert all(outcome.energy_j[device] > 0 for device in blocks(record))
    watts = [stage.watt for stage in outcomes[0].stages if stage.device_id in busy[0]]
    assert watts and all(watt is not None and watt > 3.0 for watt in watts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_daemon_that_recovers_gets_its_blocks_back(tmp_path: Path) -> None:
    slowness, name = throttling(5, 11)
    records = run(tmp_path, 22, slowness)
    assert_followed(records, name())
    assert_predicted(records)
    held = [blocks(record).get(name(), 0) for record in records]
    assert held[-1] == held[3]
    assert np.median([error(record) for record in records[18:]]) < 0.15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_daemon_whose_reports_are_false_moves_at_most_a_block(tmp_path: Path) -> None:
    """It says 0, and 1000 times more and less than is true, in every other round, and then NaN."""
    lies = {5: "1.0 0.0", 7: "1.0 1000", 9: "1.0 0.001", 11: "1.0 nan"}
    liar = "shed/board-2"

    def slowness(index: int, before: RoundRecord | None) -> Mapping[str, str]:
        del before
        return {liar: lies[index]} if index in lies else {}

    records = run(tmp_path, 12, slowness)
    held = [blocks(record).get(liar, 0) for record in records]
    assert held[3] > 0
    assert all(abs(after - before) <= 1 for before, after in pairwise(held[3:11]))
    for index in (5, 7):  # cannot be true
        (outcome,) = records[index - 1].outcome.clusters
        assert liar not in {sample.device_id for sample in outcome.stages}
    # What cannot be read at all is as any other garbage.
    assert any(f"quarantined {liar}" in incident.text for incident in records[10].incidents)
    assert held[11] == 0
