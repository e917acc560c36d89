"""Settings: what worlds they make and what they refuse, in one sentence each."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from collapipe_flwr import cli
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.simulation.devices import read_fleet
from collapipe_flwr.simulation.setting import ModelShape, Setting, overridden, preset
from collapipe_flwr.simulation.world import EnergyBudget, energy_budget, make_world, mixed_devices

BOARD = {"speed_gflop_per_s": 20, "memory_gib": 3, "load_w": 4, "tx_power_w": 0.1}
FLEET = {
    "kinds": {"my-board": BOARD},
    "clusters": [
        {"devices": ["raspberry-pi-5", "my-board", "phone"], "examples": 80},
        {"id": "attic", "devices": ["my-board", "raspberry-pi-4"]},
    ],
}


def _file(folder: Path, values: object) -> Path:
    path = folder / "fleet.json"
    path.write_text(json.dumps(values))
    return path


def test_no_kinds_and_endless_examples_are_refused(small: Setting, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kinds needs at least one kind"):
        replace(small, kinds=())
    endless = {"kinds": {"my-board": BOARD}, "clusters": [{"devices": ["my-board"] * 2}]}
    endless["clusters"][0]["examples"] = math.inf
    with pytest.raises(ConfigError, match=r"clusters\[0\].examples must be >= 1, got inf"):
        read_fleet(_file(tmp_path, endless))


def test_a_block_costs_the_stated_formula() -> None:
    d, s = 768, 128
    f = 4 * d
    block = ModelShape(blocks=2, width=d, tokens=s).profile().blocks[0]
    assert block.forward_flop == 2 * s * (4 * d**2 + 2 * d * f) + 4 * s**2 * d
    assert block.backward_flop == 2 * block.forward_flop


def test_drawn_worlds_equal_the_simulators_own(small: Setting) -> None:
    profile = small.model.profile()
    own = make_world(
        cluster_devices=mixed_devices(2, 2, 7, small.kinds),
        examples=[200, 200],
        channel=small.channel,
        seed=7,
        budget=small.budget,
        model=profile,
    )
    world = small.world(7, profile)
    assert world.clusters == own.clusters
    assert world.snapshot(3, profile) == own.snapshot(3, profile)


def test_a_file_of_clusters_defines_boards_and_examples(tmp_path: Path, small: Setting) -> None:
    setting = replace(small, fleet=read_fleet(_file(tmp_path, FLEET)))
    first, second = setting.world(0, setting.model.profile()).clusters
    assert [d.kind for d in first.devices] == ["my-board", "phone"]
    assert first.devices[0].speed_flop_per_s == 20e9
    assert first.devices[0].energy_per_flop_j == pytest.approx(4 / 20e9)
    assert (first.examples, second.examples) == (80, small.examples)
    assert second.control_unit.device_id == "attic/control-unit"


def test_toml_says_the_same(tmp_path: Path) -> None:
    toml = tmp_path / "fleet.toml"
    toml.write_text('[[clusters]]\ndevices = ["raspberry-pi-5", "phone"]\n')
    same = _file(tmp_path, {"clusters": [{"devices": ["raspberry-pi-5", "phone"]}]})
    assert read_fleet(toml) == read_fleet(same)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], 'needs a list "clusters"'),
        ({"clusters": []}, 'needs a list "clusters"'),
        ({"clusters": [{"devices": ["phone"]}]}, r"clusters\[0\] needs \"devices\""),
        ({"clusters": [{"devices": ["phone", "toaster"]}]}, "unknown device kind 'toaster'"),
        ({**FLEET, "kinds": {"my-board": {**BOARD, "memory_gib": 0}}}, "kind 'my-board' needs"),
        ({**FLEET, "kinds": {"my-board": {**BOARD, "d2d_mhz": 0}}}, "d2d_mhz must be a number > 0"),
        ({"clusters": [{"devices": ["phone", "phone"], "examples": 0}]}, "examples must be >= 1"),
        ({"clusters": [{"id": "a", "devices": ["phone"] * 2}] * 2}, '"id" of its own'),
    ],
)
def test_bad_files_are_refused_with_their_name(tmp_path: Path, values: object, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--devices-from .*fleet.json: .*{says}"):
        read_fleet(_file(tmp_path, values))


def test_energy_budgets_read_as_written() -> None:
    assert energy_budget("30%") == EnergyBudget(share=0.3)
    assert energy_budget("1.8x") == EnergyBudget(equal_shares=1.8)
    assert energy_budget("500") == EnergyBudget(joule=500.0)
    assert energy_budget("none") == EnergyBudget()
    assert all(str(energy_budget(text)) == text for text in ("1.8x", "30%", "500", "none"))


@pytest.mark.parametrize("text", ["30%x", "30%%", "1.8xx", "x30", "%", ""])
def test_an_energy_budget_has_one_unit(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--energy-budget must be .* or none, got '{text}'"):
        energy_budget(text)


def test_choices_change_a_preset_and_leave_the_rest() -> None:
    base = preset("paper")
    setting = overridden(base, clusters=3, blocks=6, seeds="1,2", policies="dssda")
    assert (setting.clusters, setting.model.blocks, setting.seeds) == (3, 6, (1, 2))
    assert setting.devices == base.devices
    assert overridden(preset(None), recompute=False, radio=None) == Setting()


def test_ranges_of_seeds_include_both_ends() -> None:
    assert overridden(Setting(), seeds="7,100-103").seeds == (7, 100, 101, 102, 103)


def test_all_policies_start_on_equal_terms() -> None:
    """One schedule, one cap for all pipelines, and the best micro-batches for rules, too."""
    for name in (None, "paper", "one-strong", "cellular"):
        terms = preset(name).settings
        assert (terms.schedule, terms.best_batches, terms.max_model_share) == ("1f1b", True, 1 / 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--clusters 0", "--clusters must lie between 1 and 10000, got 0"),
        ("--devices 0", "--devices must lie between 1 and 1000, got 0"),
        ("--blocks 0", "--blocks must lie between 1 and 1000, got 0"),
        ("--rounds -1", "--rounds must lie between 1 and 1000000, got -1"),
        ("--policies best", "--policies must be one of dssda, "),
        ("--policies dsda", "got 'dsda'; did you mean dssda?"),
        ("--profile-error 1", "--profile-error must be >= 0 and < 1, got 1"),
        ("--profile-error-kind bia", "--profile-error-kind must be one of noise, bias, got 'bia'"),
        ("--profile-delay -1", "--profile-delay must be at least 0, got -1"),
        ("--truth-error inf", "--truth-error must be a finite number, got inf"),
        ("--policies ,", "--policies needs at least one"),
        ("--policies dssda,dssda", "--policies names one twice"),
        ("--seeds x", "--seeds must list whole numbers"),
        ("--seeds ²", "--seeds must list whole numbers"),
        ("--seeds 3-", '--seeds: a range is like "100-119"'),
        ("--seeds 9-3", '--seeds: a range is like "100-119"'),
        ("--seeds 1,0-2", "--seeds names one twice"),
        ("--preset home", "--preset: unknown preset 'home'"),
        ("--energy-budget -3", "--energy-budget must be joules per round"),
        ("-c scheduler.penalty-weight=-1", "scheduler.penalty-weight must be at least 0"),
        ("-c scheduler.horizon=1", "run-config key scheduler.horizon is unknown"),
        ("-c train.recompute=true", "run-config key train.recompute is unknown"),
        ("--channel rain", "--channel: unknown channel 'rain'"),
        ("--channel trace:/nowhere", "--channel: channel trace '/nowhere' cannot be read (No such"),
        ("--radio am", "--radio: unknown radio 'am'"),
        ("--kinds toaster", "--kinds: unknown device kind 'toaster'"),
        ("--devices-from /nowhere", "--devices-from /nowhere cannot be read (No such file"),
        ("--json /dev/null/x.json", "--json /dev/null/x.json: its folder cannot be made"),
    ],
)
def test_bad_arguments_are_one_sentence_and_exit_code_1(
    arguments: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["collapipe", "simulate", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    printed = capsys.readouterr()
    said = printed.err.removesuffix("\n")
    assert end.value.code == 1 and "\n" not in said and not printed.out
    assert said.startswith("Error: ") and says in said
