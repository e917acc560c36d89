"""Worlds are functions of (seed, round); presets and channels are checked by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.simulation.channel import channel_model
from collapipe_flwr.simulation.devices import PRESETS, RADIOS, device_preset, radio_preset
from collapipe_flwr.simulation.setting import ModelShape
from collapipe_flwr.simulation.world import EnergyBudget, World, make_world, mixed_devices

MODEL = ModelShape(blocks=4, decoder_blocks=4, width=64, tokens=16).profile()


def a_world(channel: str = "block-fading", seed: int = 0) -> World:
    return make_world(
        cluster_devices=mixed_devices(3, 2, seed, ["phone", "jetson-nano"]),
        examples=[10, 20, 30],
        channel=channel,
        seed=seed,
    )


@pytest.mark.parametrize("channel", ["static", "block-fading", "mobility"])
def test_equal_seeds_and_rounds_give_equal_snapshots(channel: str) -> None:
    assert a_world(channel).snapshot(7, MODEL) == a_world(channel).snapshot(7, MODEL)
    other = a_world(channel, seed=1).snapshot(7, MODEL)
    assert other.clusters[0].channel != a_world(channel).snapshot(7, MODEL).clusters[0].channel


def test_channels_change_over_rounds_as_they_should() -> None:
    def gain(channel: str, index: int) -> float:
        return a_world(channel).snapshot(index, MODEL).clusters[0].channel.edge_gain[1]

    assert gain("static", 1) == gain("static", 9)
    assert gain("block-fading", 1) != gain("block-fading", 2)
    assert gain("mobility", 1) != gain("mobility", 2)
    assert gain("mobility", 1) == pytest.approx(gain("mobility", 41))


def test_fading_has_unit_mean_and_is_reciprocal() -> None:
    still = a_world("static").snapshot(1, MODEL).clusters[1].channel.edge_gain[2]
    faded = [
        a_world("block-fading").snapshot(r, MODEL).clusters[1].channel.edge_gain[2]
        for r in range(1, 400)
    ]
    assert np.mean(faded) / still == pytest.approx(1.0, abs=0.15)
    gains = np.array(a_world().snapshot(3, MODEL).clusters[0].channel.d2d_gain)
    assert gains == pytest.approx(gains.T)


def test_a_cluster_does_not_depend_on_who_else_is_present() -> None:
    world = a_world()
    alone = world.snapshot(5, MODEL, present=["cluster-1"])
    assert alone.clusters == (world.snapshot(5, MODEL).clusters[1],)


def test_traces_replay_and_repeat(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps([1.0, 0.5]))
    world = a_world(f"trace:{file}")
    gains = [world.snapshot(r, MODEL).clusters[0].channel.edge_gain[0] for r in (1, 2, 3)]
    assert gains[1] == pytest.approx(gains[0] / 2) and gains[2] == gains[0]


@pytest.mark.parametrize("text", ["{", "[]", "[0]", '["x"]', "3"])
def test_broken_traces_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="trace"):
        channel_model(f"trace:{file}")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"raspberry-pi-4.*phone"):
        device_preset("raspberry-pi-3")
    with pytest.raises(ConfigError, match=r"wifi.*5g"):
        radio_preset("lora")
    with pytest.raises(ConfigError, match=r"static.*mobility"):
        channel_model("rician")


def test_presets_are_plausible() -> None:
    for preset in PRESETS.values():
        watts = preset.speed_flop_per_s * preset.energy_per_flop_j
        assert 1 < watts < 30 and 1e9 < preset.speed_flop_per_s < 1e12
        assert 2**30 < preset.memory_bytes < 2**34 and 0.05 <= preset.tx_power_max_w <= 0.5
    assert set(RADIOS) == {"wifi", "5g"}


def test_budgets_scale_with_work_or_are_fixed() -> None:
    assert a_world().clusters[0].devices[0].energy_budget_j == math.inf
    device = a_world().clusters[0].devices[0]
    small, large, third = (
        budget.of(device, 10, MODEL, 3)
        for budget in (
            EnergyBudget(share=0.5, radio_s=0.0),
            EnergyBudget(share=1.0, radio_s=0.0),
            EnergyBudget(equal_shares=1.0, radio_s=0.0),
        )
    )
    assert large == pytest.approx(2 * small) == pytest.approx(3 * third)
    assert EnergyBudget(joule=7.0).of(device, 10, MODEL, 3) == 7.0


def test_tables_follow_the_snapshot() -> None:
    snapshot = a_world().snapshot(1, MODEL)
    tables = tabulate(snapshot)
    assert tables.gain_mij.shape == (3, 3, 4)
    assert tables.gain_mij[2, 1, tables.edge] == snapshot.clusters[2].channel.edge_gain[1]
    assert tables.blocks.forward_flop_l[0, -1] == sum(b.forward_flop for b in MODEL.blocks)
