"""The numbers of docs/results-pipeline.md are those of the recorded file."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import audits
from benchmarks.boards_table import measured_table
from benchmarks.data_plane.report import codec_cells, markdown
from benchmarks.privacy import document
from benchmarks.rounds import anatomy, slowed
from tests.program import printed_by

ROOT = Path(__file__).parents[2]


def test_the_codec_table_is_the_file() -> None:
    document = (ROOT / "docs" / "results-pipeline.md").read_text(encoding="utf-8")
    recorded = json.loads((ROOT / "docs/results/data-plane/codecs.json").read_text())
    settings = recorded["settings"]
    assert f"--steps {settings['steps']} --seeds {len(settings['seeds'])} " in document
    for row in recorded["codecs"]:
        assert f"| {' | '.join(codec_cells(row))} |" in document


def test_the_table_of_step_times_is_the_recorded_bench() -> None:
    recorded = json.loads((ROOT / "docs/results/data-plane/pipeline.json").read_text())
    assert markdown(recorded) in (ROOT / "docs/results-pipeline.md").read_text(encoding="utf-8")


def test_the_table_of_cpu_seconds_is_the_recorded_bench() -> None:
    files = (ROOT / f"docs/results/anatomy/{name}.json" for name in ("before", "after"))
    table = anatomy.markdown(*(json.loads(file.read_text()) for file in files))
    assert table in (ROOT / "docs/results-pipeline.md").read_text(encoding="utf-8")


def test_the_table_of_slow_rounds_is_the_recorded_bench() -> None:
    """And its parts sum to the rounds within 3 %."""
    found = json.loads((ROOT / "docs/results/anatomy/slowed.json").read_text())
    assert slowed.markdown(found) in (ROOT / "docs/results-pipeline.md").read_text(encoding="utf-8")
    for done in found["rounds"]:
        for device in done["devices"]:
            off_s = sum(device["parts_s"].values()) - done["round_s"]
            assert abs(off_s) <= slowed.MOST_OFF * done["round_s"]


def test_the_table_of_predictions_is_the_recorded_bench() -> None:
    """Devices and control units are within 7 %, heads within 15 %."""
    cases = [
        case
        for file in sorted((ROOT / "docs/results/boards").glob("*.json"))
        for case in json.loads(file.read_text())["cases"]
    ]
    text = (ROOT / "docs/choosing.md").read_text(encoding="utf-8")
    assert measured_table(cases) in text
    for case in cases:
        seen, said = case["lasting_bytes"], case["predicted_bytes"]
        assert abs(said / seen - 1) < (0.15 if case["role"].endswith("edge") else 0.07)


def test_the_table_of_memory_is_the_recorded_bench() -> None:
    """It must be that of the recorded files, whole."""
    script = ROOT / "benchmarks/memory_table.py"
    recorded = sorted((ROOT / "docs/results/memory").glob("*.json"))
    text = (ROOT / "docs/lora.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- table memory -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == printed_by(script, *map(str, recorded)).strip()


def test_the_table_of_ranks_is_the_recorded_bench() -> None:
    """With every seed, products end with a lower loss than what is averaged beside them."""
    recorded = ROOT / "docs/results/ranks.json"
    table = printed_by(ROOT / "benchmarks/ranks.py", "--table", str(recorded))
    assert table.strip() in (ROOT / "docs/lora.md").read_text(encoding="utf-8")
    runs = json.loads(recorded.read_text())["runs"]
    for better, other in (("products", "factors"), ("products, own ranks", "padded, own ranks")):
        for one, two in zip(runs[better], runs[other], strict=True):
            assert one["loss"][-1] < two["loss"][-1]


def test_the_table_of_audits_is_the_recorded_bench() -> None:
    recorded = json.loads((ROOT / "docs/results/audits.json").read_text())
    assert audits.table(recorded) in (ROOT / "docs/recovery.md").read_text(encoding="utf-8")


def test_the_tables_of_privacy_are_the_recorded_bench() -> None:
    files = sorted((ROOT / "docs/results/privacy").glob("*.json"))
    text = (ROOT / "docs/privacy.md").read_text(encoding="utf-8")
    told = document.read(files)
    assert told and document.rendered(text, told) == text
    assert all(f"<!-- table {name} -->" in text for name in document.tables(told))
    assert (files[0].parent / document.PICTURE).is_file()
