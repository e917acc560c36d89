"""What a model costs and whether it fits, said before anything is started."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.cluster.forecast import (
    Forecast,
    ModelChoice,
    build_model,
    forecast,
)
from collapipe_flwr.cluster.profile import build_cluster
from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.models.profile import profile_model, time_block
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.scheduler.plans import check_cluster_plan
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from tests.thorough import few

SHAPE = BatchShape(source_length=12, target_length=7)
TINY: dict[str, dict[str, object]] = {
    "bert": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 60,
    },
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 64, "vocab_size": 60},
    "t5": {"d_model": 32, "num_layers": 4, "num_heads": 2, "d_kv": 16, "d_ff": 48},
    "vit": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "image_size": 16,
        "patch_size": 8,
    },
}
SETTINGS = SchedulerConfig(micro_batch_sizes=(1, 2), micro_batches=(1, 2))


def request(model_type: str, task: str = "", length: int = 12) -> ModelChoice:
    shape = BatchShape(source_length=length, target_length=7)
    return ModelChoice(model=model_type, task=task, overrides=TINY[model_type], shape=shape)


def found(model_type: str, devices: list[str], seconds: float = 0.0) -> Forecast:
    cluster = build_cluster(devices, "raspberry-pi-5", examples=16) if devices else None
    return forecast(build_model(request(model_type)), SHAPE, cluster, SETTINGS, seconds=seconds)


@pytest.mark.parametrize("model_type", few(sorted(TINY), 0, 2))
def test_every_block_has_costs_and_a_place(model_type: str) -> None:
    forecast = found(model_type, ["phone", "jetson-nano"])
    assert len(forecast.profile.blocks) == 4
    assert all(
        block.forward_flop > 0 and block.stash_bytes > 0 for block in forecast.profile.blocks
    )
    assert forecast.plan is not None
    check_cluster_plan(forecast.plan, 4)
    assert "fits these-devices" in forecast.verdict
    assert "\n" not in forecast.verdict


def test_parameters_are_those_of_the_model() -> None:
    splitter = build_model(request("bert"))
    count = sum(
        shape.numel() for shape, dtype in splitter.shapes.values() if dtype.is_floating_point
    )
    assert abs(found("bert", []).parameter_bytes - 4 * count) < 0.02 * 4 * count  # buffers


def test_a_tied_table_counts_as_often_as_a_run_keeps_it() -> None:
    free = profile_model(build_model(request("gpt2")), SHAPE)
    lent = profile_model(build_model(replace(request("gpt2"), ties="rows")), SHAPE)
    assert free.embedding.parameter_bytes - lent.embedding.parameter_bytes == 4 * 60 * 32
    assert free.decoder.parameter_bytes == lent.decoder.parameter_bytes


def test_what_does_not_fit_says_why() -> None:
    large = ModelChoice(
        model="llama", overrides={"num_hidden_layers": 2, "vocab_size": 100}, shape=SHAPE
    )
    cluster = build_cluster(["phone"], "raspberry-pi-5", examples=16)
    forecast_ = forecast(build_model(large), SHAPE, cluster, SETTINGS, seconds=0.0)
    assert forecast_.plan is None
    assert "does not fit: cluster 'these-devices': no plan fits its memories" in forecast_.verdict


def test_a_timed_block_gives_its_work_over_its_time() -> None:
    ticks = itertools.count()
    splitter = build_model(request("gpt2"))
    cost = profile_model(splitter, SHAPE).blocks[0]
    timed = time_block(splitter, cost, examples=3, seconds=5.0, clock=lambda: 0.25 * next(ticks))
    assert (timed.forward_s, timed.backward_s) == (0.25, 0.25)
    assert timed.flop == 3 * (cost.forward_flop + cost.backward_flop)
    assert timed.speed_flop_per_s == timed.flop / 0.5


@pytest.mark.parametrize("model_type", few(sorted(TINY), 1, 3))
def test_every_kind_of_block_can_be_timed(model_type: str) -> None:
    measured = found(model_type, [], seconds=0.01).measured
    assert measured is not None
    assert measured.speed_flop_per_s > 0


def test_bad_wishes_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--length 100 is more than the model's 64 positions"):
        build_model(request("gpt2", length=100))
    with pytest.raises(ModelError, match="cannot read the checkpoint"):
        build_model(ModelChoice(model=str(tmp_path), overrides={}, shape=SHAPE))
    with pytest.raises(ModelError, match="cannot do the task"):
        build_model(request("gpt2", task="seq2seq"))
    with pytest.raises(ConfigError, match="unknown device kind 'toaster'"):
        build_cluster(["toaster"], "raspberry-pi-5", 1)


def run(*arguments: str) -> tuple[int, str]:
    overrides = " ".join(f"{k}={v}" for k, v in TINY["gpt2"].items())
    words = ["profile", "gpt2", "--overrides", overrides, "--length", "12", "--seconds", "0"]
    result = CliRunner().invoke(app, [*words, *arguments])
    return result.exit_code, result.output


def test_the_command_prints_and_writes_the_same(tmp_path: Path) -> None:
    file = tmp_path / "out" / "gpt2.json"
    code, output = run("--devices", "phone,phone", "--json", str(file))
    assert code == 0
    assert output.startswith("measuring gpt2\n")  # before libraries are loaded
    values = json.loads(file.read_text())
    assert values["verdict"] in " ".join(output.split())
    assert values["fits"] is True
    assert len(values["profile"]["blocks"]) == 4
    assert {s["device_id"] for s in values["plan"]["segments"]} <= {
        "these-devices/1-phone",
        "these-devices/2-phone",
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_share_of_the_model_is_printed_and_recorded(tmp_path: Path, schedule: str) -> None:
    file = tmp_path / "gpt2.json"
    options = ("--schedule", schedule, "--max-model-share", "0.6", "--micro-batches", "2,4")
    code, output = run("--devices", "phone,phone,phone", *options, "--json", str(file))
    plan = json.loads(file.read_text())["plan"]
    share = (
        max(plan["memory_bytes"][s["device_id"]] for s in plan["segments"]) / plan["whole_bytes"]
    )
    assert code == 0 and share <= plan["model_share"]
    assert f"every device at most {100 * share:.0f} % of the" in " ".join(output.split())
    assert run("--devices", "phone", "--schedule", "zip")[0] != 0


def test_a_cluster_file_is_planned_for_and_tells_by_its_exit_code(tmp_path: Path) -> None:
    text = 'id = "shed"\n[[device]]\nname = "pi-1"\naddress = "127.0.0.1:1"\nmemory-mb = {}\n'
    (tmp_path / "roomy.toml").write_text(text.format("500.0"))
    (tmp_path / "tiny.toml").write_text(text.format("0.01"))
    code, output = run("--cluster", str(tmp_path / "roomy.toml"))
    assert (code, "fits shed: pi-1 blocks 0-3" in " ".join(output.split())) == (0, True)
    code, output = run("--cluster", str(tmp_path / "tiny.toml"))
    assert (code, "does not fit" in output) == (1, True)
