"""A device that holds every block of the whole model does all of the training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.work import merge_ends
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from tests.worlds import equal_ends, first_round, planned

MODEL = equal_ends(3, 64, 16)


def test_nothing_of_the_model_is_lost() -> None:
    whole, parts = merge_ends(MODEL), (MODEL.embedding, *MODEL.blocks, MODEL.decoder)
    for field in ("forward_flop", "backward_flop", "parameter_bytes", "state_bytes", "stash_bytes"):
        moved = sum(getattr(block, field) for block in whole.blocks)
        assert moved == pytest.approx(sum(getattr(part, field) for part in parts))
        assert getattr(whole.embedding, field) == getattr(whole.decoder, field) == 0
    assert len(whole.blocks) == len(MODEL.blocks)


def test_one_block_takes_both_ends() -> None:
    tiny = replace(MODEL, blocks=MODEL.blocks[:1])
    ends = tiny.embedding.state_bytes + tiny.decoder.state_bytes
    assert merge_ends(tiny).blocks[0].state_bytes == tiny.blocks[0].state_bytes + ends


def test_fedavg_of_the_whole_model_costs_its_device_everything() -> None:
    snapshot = first_round([["raspberry-pi-5", "phone"]], merge_ends(MODEL), 96)
    settings = SchedulerConfig(schedule="gpipe", micro_batch_sizes=(4,), micro_batches=(4,))
    plan = planned(snapshot, settings, "fedavg")
    priced = price(plan, snapshot, settings).clusters[0]
    phone = snapshot.clusters[0].profile.devices[0]
    parts = (MODEL.embedding, *MODEL.blocks, MODEL.decoder)
    held = sum(p.state_bytes + 16 * p.stash_bytes for p in parts)
    assert priced.memory_bytes[phone.device_id] == pytest.approx(held, abs=1)
    assert plan.clusters[0].whole_bytes == pytest.approx(held, abs=1)
    flop = 16 * sum(p.forward_flop + p.backward_flop for p in parts)
    assert priced.step_s == pytest.approx(flop / phone.speed_flop_per_s, rel=1e-3)
    work_j = phone.energy_per_flop_j * 6 * flop  # 96 examples; then optimiser and sending home
    assert work_j < priced.energy_j[phone.device_id] < 2 * work_j
    assert priced.memory_bytes[snapshot.clusters[0].profile.control_unit.device_id] == 0
