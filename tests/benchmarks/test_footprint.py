"""The bench of memory: small models, real processes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory import footprint
from benchmarks.memory.footprint import (
    BERT_BASE,
    LLAMA_1B,
    SMOLLM2,
    measure,
    read_modes,
    read_sizes,
)
from benchmarks.resident import AnonymousPeak, peak_bytes
from collapipe_flwr.core.errors import ConfigError

SMALL = replace(
    LLAMA_1B,
    name="small",
    overrides={
        **LLAMA_1B.overrides,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 2,
        "intermediate_size": 96,
    },
    vocabulary=200_000,
    devices=2,
    tokens=8,
)


@pytest.mark.slow
def test_every_role_is_measured_in_its_own_process(tmp_path: Path) -> None:
    cases = measure([SMALL], ["lora"], tmp_path, limit=2**40, tick=lambda _: None)
    roles = [case.role for case in cases]
    assert roles == [
        "whole",
        "control-unit",
        "control-unit-and-edge",
        "device 0..0",
        "device 1..1",
        "edge",
    ]
    whole = cases[0].peak_bytes
    for case in cases:
        assert case.peak_bytes is not None and case.peak_bytes > case.needed_bytes
        assert case.whole_model_peak_bytes == whole
        assert case.needed_bytes < case.peak_anonymous_bytes < case.peak_bytes
        assert case.ratio == pytest.approx(case.peak_bytes / whole)
    device, edge = cases[3], cases[5]
    assert cases[1].message_bytes > cases[1].edge_message_bytes == 0  # of a head that is frozen
    assert edge.message_bytes is None
    table = 200_000 * 64 * 4
    assert edge.needed_bytes - device.needed_bytes > 0.9 * table
    assert edge.peak_bytes - device.peak_bytes > 0.5 * table  # seen from outside as well


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "lora-bfloat16"])
def test_smollm2_peaks_as_predicted(tmp_path: Path, mode: str) -> None:
    roles = ("device", "edge")
    cases = measure([SMOLLM2], [mode], tmp_path, 2**40, lambda _: None, roles)
    assert [case.role.partition(" ")[0] for case in cases] == [*["device"] * 3, "edge"]
    for case in cases:
        assert case.predicted_bytes == pytest.approx(
            case.lasting_bytes, rel=0.15
        )  # heads differ by 10 %


def test_what_would_not_fit_is_left_out_and_says_so(tmp_path: Path) -> None:
    cases = measure([SMALL], ["full"], tmp_path, limit=0, tick=lambda _: None)
    assert all(case.peak_bytes is None and case.ratio is None for case in cases)
    assert cases[0].needed_bytes > 4 * 200_000 * 64 * 4
    assert all(case.whole_model_peak_bytes == cases[0].needed_bytes for case in cases)
    assert not any(case.whole_model_measured for case in cases)
    assert all("--limit-gib is 0" in case.left_out for case in cases)


def test_what_the_machine_has_no_room_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "read_available_bytes", lambda: 2**30)
    assert footprint._misfit(2**30, limit=2**40) == ""
    assert "1.5 GiB, 1.0 GiB are free" in footprint._misfit(3 * 2**29, limit=2**40)


def test_pages_of_files_are_no_anonymous_memory() -> None:
    with AnonymousPeak() as peak:
        block = bytearray(os.urandom(2**20) * 64)
    assert len(block) <= peak.bytes < peak_bytes()


def test_names_are_checked() -> None:
    assert read_sizes("bert-12x768") == [BERT_BASE]
    assert read_modes("full, lora-int8") == ["full", "lora-int8"]
    with pytest.raises(ConfigError, match="--modes must list some of full"):
        read_modes("half")
