"""Which boards train a model together, by the memory that plans count."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.cluster.boards import (
    LIBRARY_BYTES,
    BoardSetting,
    Cut,
    find_board_bytes,
    judge,
    survey,
)
from collapipe_flwr.cluster.forecast import ModelChoice
from collapipe_flwr.core.domain import BlockCost, ModelProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.reporting.tables import show_boards
from collapipe_flwr.simulation.devices import PRESETS
from tests.thorough import examples

MIB = 2**20
SETTING = BoardSetting(frozen_dtype="nf4", length=8, size=1, count=4)
PLANS = PricingOptions()
BOARDS = ("1gb", "2gb", "my-board-4gb", "raspberry-pi-5-8gb", "phone")
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
}


def cost(state_mib: float, stash_mib: float = 0.0, passing_mib: float = 0.0) -> BlockCost:
    return BlockCost(
        forward_flop=1.0,
        backward_flop=2.0,
        parameter_bytes=MIB,
        state_bytes=int(state_mib * MIB),
        stash_bytes=stash_mib * MIB,
        output_bytes=1.0,
        passing_bytes=passing_mib * MIB,
    )


def model(block: BlockCost, blocks: int, end_mib: float = 100.0) -> ModelProfile:
    end = cost(end_mib, 1.0, 1.0)
    return ModelProfile(embedding=end, blocks=(block,) * blocks, decoder=end)


models = st.builds(
    model,
    st.builds(cost, st.floats(5, 2000), st.floats(0, 60), st.floats(0, 90)),
    st.integers(1, 6),
    st.floats(5, 1500),
)


@examples(15, 200, deadline=None)
@given(models, st.lists(st.sampled_from(BOARDS), min_size=2, max_size=5), st.sampled_from(BOARDS))
def test_one_more_board_is_never_one_too_many(
    profile: ModelProfile, boards: list[str], more: str
) -> None:
    if judge(Cut(profile, SETTING, PLANS), boards).loads:
        assert judge(Cut(profile, SETTING, PLANS), [*boards, more]).loads


@examples(15, 200, deadline=None)
@given(models, st.lists(st.sampled_from(BOARDS), min_size=2, max_size=5))
def test_every_part_has_one_board_with_room_for_it(
    profile: ModelProfile, boards: list[str]
) -> None:
    loads = judge(Cut(profile, SETTING, PLANS), boards).loads
    used = [load.board for load in loads]
    assert all(used.count(name) <= boards.count(name) for name in used)
    assert all(load.bytes <= load.room_bytes for load in loads)
    if loads:
        held = [load.part for load in loads if load.part.startswith("block")]
        spans = [[int(n) for n in part.split()[1].split("-")] for part in held]
        assert spans[0][0] == 0 and spans[-1][-1] == len(profile.blocks) - 1
        assert all(one[-1] + 1 == other[0] for one, other in pairwise(spans))
        states = sum(part.state_bytes for part in (*profile.blocks, profile.embedding))
        assert states + profile.decoder.state_bytes == sum(
            load.frozen_bytes + load.trained_bytes for load in loads
        )


def test_the_least_number_trains_the_model_and_one_less_does_not() -> None:
    profile = model(cost(600.0, 5.0), blocks=8)
    for board, least in judge(Cut(profile, SETTING, PLANS), ["8gb", "8gb"]).least.items():
        assert least is not None and judge(Cut(profile, SETTING, PLANS), [board] * least).loads
        assert not judge(Cut(profile, SETTING, PLANS), [board] * (least - 1)).loads


def test_a_control_unit_has_room_for_the_message_of_all_that_trains() -> None:
    few, many = (model(cost(4.0), blocks, end_mib=4.0) for blocks in (1, 900))
    setting = BoardSetting(frozen_dtype="", length=8, size=1, count=2)
    small, large = (
        Cut(each, setting, PricingOptions()).load_ends("8gb", None) for each in (few, many)
    )
    assert small[0].bytes < large[0].bytes
    assert large[0].bytes >= (900 + 3) * MIB + LIBRARY_BYTES


def test_a_block_larger_than_the_board_fits_no_number_of_them() -> None:
    found = judge(Cut(model(cost(1500.0), blocks=2), SETTING, PLANS), ["2gb", "2gb"])
    assert found.least["2gb"] is None and not found.loads


def test_a_board_is_known_by_its_kind_or_by_its_memory() -> None:
    assert find_board_bytes("raspberry-pi-5") == PRESETS["raspberry-pi-5"].memory_bytes
    assert find_board_bytes("raspberry-pi-5-8gb") == PRESETS["raspberry-pi-5"].memory_bytes
    assert find_board_bytes("raspberry-pi-4-4gb") == PRESETS["raspberry-pi-4"].memory_bytes
    assert find_board_bytes("anything-2gb") == 1.5 * 2**30
    for name in ("toaster", "0gb", "8gb-board"):
        with pytest.raises(ConfigError, match="any name that ends in its memory"):
            find_board_bytes(name)


def ask(**changes: object) -> ModelChoice:
    shape = BatchShape(source_length=16, target_length=16)
    fields = {"model": "llama", "overrides": TINY, "shape": shape, "lora_rank": 2, **changes}
    return ModelChoice(**fields)  # type: ignore[arg-type]


@pytest.mark.slow
def test_fewer_bits_are_fewer_bytes_of_frozen_weights_and_nothing_else() -> None:
    pytest.importorskip("bitsandbytes")
    dtypes = ("float32", "bfloat16", "int8", "nf4")
    seen = survey(ask(), ["8gb"] * 3, dtypes, [16], [2], 2, PLANS)
    wide, half, quarter, four_bits = (
        next(load for load in verdict.loads if load.part.startswith("block"))
        for verdict in seen.verdicts
    )
    assert four_bits.frozen_bytes < quarter.frozen_bytes < half.frozen_bytes < wide.frozen_bytes
    assert {load.trained_bytes for load in (wide, half, quarter, four_bits)} == {wide.trained_bytes}
    assert wide.flight_bytes == half.flight_bytes


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["profile", *words])
    return result.exit_code, " ".join(f"{result.output} {result.exception or ''}".split())


def test_a_configuration_without_weights_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **TINY}))
    out = tmp_path / "found.json"
    words = ["--lora-rank", "2", "--frozen-dtypes", "bfloat16", "--length", "8,16"]
    words += ["--micro-batch-sizes", "1", "--boards", "2gb,2gb", "--json", str(out)]
    answers = []
    for name in (str(file), str(tmp_path)):
        code, output = run(name, *words)
        values = json.loads(out.read_text())
        assert code == 0 and values["fits"]
        assert "".join(values["answer"].split()) in "".join(output.split())  # lines are wrapped
        answers.append(values["verdicts"])
    assert answers[0] == answers[1]
    assert [each["setting"]["length"] for each in answers[0]] == [8, 16]


def test_what_does_not_fit_says_how_many_boards_would() -> None:
    shape = " ".join(f"{key}={value}" for key, value in TINY.items())
    code, output = run("llama", "--overrides", shape, "--boards", "0.4gb,0.4gb")
    assert code == 1 and "do not train llama in any of these settings; in the last" in output
    assert "2 of 2gb" in output


def test_names_of_boards_stay_whole_on_a_narrow_terminal() -> None:
    boards = ["jetson-orin-nano-8gb", "raspberry-pi-4-4gb", "raspberry-pi-5-8gb"]
    shape = BatchShape(source_length=8)
    request = ModelChoice(model="llama", overrides=TINY, shape=shape, lora_rank=2)
    found = survey(request, boards, ["nf4"], [8], [1], 4, PLANS)
    shown = StringIO()
    show_boards(found, Console(width=80, file=shown))
    text = shown.getvalue()
    assert all(f" {name} " in text for name in boards)
    assert " control unit " in text and " head " in text


def test_wrong_words_are_one_sentence() -> None:
    for words, why in (
        (("--boards", "toaster"), "unknown board 'toaster'; give one of raspberry-pi-4"),
        (("--boards", "2gb", "--devices", "phone"), "only one of them"),
        (("--length", "8,16"), "several only with --boards"),
        (("--boards", "2gb", "--frozen-dtypes", "int3"), "--frozen-dtypes"),
    ):
        code, output = run("llama", *words)
        assert code and why in output


def test_a_stage_peaks_as_predicted() -> None:
    """All allocations of torch in both passes of two blocks, beside what plans count."""
    from torch.profiler import ProfilerActivity, profile

    from collapipe_flwr.cluster.forecast import build_model
    from collapipe_flwr.models.profile import profile_model

    wide = {**TINY, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    request = ask(overrides=wide, shape=BatchShape(source_length=64))
    splitter = build_model(request)
    block = profile_model(splitter, request.shape).blocks[1]
    keys = [key for index in (1, 2) for key in splitter.held_keys(index)]
    drawn = {key: torch.randn(splitter.shapes[key][0]) * 0.02 for key in keys}
    segment = splitter.build_segment(1, 3, drawn).train()
    hidden = torch.randn(4, 64, 128, requires_grad=True)
    context = {"attention_mask": torch.ones(4, 64, dtype=torch.long)}

    def both_passes() -> None:
        output = segment(hidden, context)
        output.backward(torch.ones_like(output))
        segment.zero_grad(set_to_none=True)
        hidden.grad = None

    both_passes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        both_passes()
    held, peak = hidden.nbytes, 0
    for event in watched.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    foreseen = 4 * (2 * block.stash_bytes + block.passing_bytes)
    assert abs(foreseen - peak) < 0.1 * peak


def test_passing_memory_is_counted_once_per_device() -> None:
    calm, busy = model(cost(100.0, 30.0), 4), model(cost(100.0, 30.0, 50.0), 4)
    one, other = (
        judge(Cut(m, replace(SETTING, size=2), PLANS), ["8gb", "8gb"]).loads for m in (calm, busy)
    )
    assert other[1].bytes - one[1].bytes == 2 * 50 * MIB
