"""Of a cluster's files those stay that a resumed run may go on from, and no others."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.client.node_state import StateFiles, read_slots, write_slots
from collapipe_flwr.pipeline.state import OptimizerState
from tests.full_disk import full_disk
from tests.power_cuts import rebuilt, watched


def slots(mark: float) -> OptimizerState:
    return {"block.weight": (torch.full((2, 3), mark), torch.tensor(mark, dtype=torch.bfloat16))}


def files(folder: Path, suffix: str = ".txt") -> StateFiles:
    return StateFiles.of(folder, "../a run", 0, suffix)


def remember(kept: StateFiles, server_round: int, text: str | None = None) -> None:
    kept.remember(server_round, lambda path: path.write_text(text or str(server_round)))


def test_slots_come_back_bit_for_bit_in_every_dtype(tmp_path: Path) -> None:
    files(tmp_path).remember(1, partial(write_slots, slots(1 / 3)))
    found = files(tmp_path).recall(1, read_slots)
    assert found is not None and found.keys() == slots(0).keys()
    for ours, theirs in zip(found["block.weight"], slots(1 / 3)["block.weight"], strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_runs_and_clusters_are_strangers_and_nothing_leaves_the_folder(tmp_path: Path) -> None:
    remember(files(tmp_path / "state"), 1)
    for stranger in (("another", 0, ".txt"), ("../a run", 1, ".txt"), ("../a run", 0, ".json")):
        assert StateFiles.of(tmp_path / "state", *stranger).recall(1, Path.read_text) is None
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "state").rglob("*"))


def test_a_round_that_was_not_accepted_is_forgotten(tmp_path: Path) -> None:
    kept = files(tmp_path)
    remember(kept, 1)
    remember(kept, 2)
    assert kept.recall(1, Path.read_text) == "1"
    remember(kept, 3)
    assert kept.recall(3, Path.read_text) == "3"
    assert kept.recall(2, Path.read_text) is None


@pytest.mark.parametrize("accepted", [10, 11])
@pytest.mark.parametrize("ends", [(10, 11), (11, 10)])
def test_of_two_orders_for_one_round_the_accepted_one_counts(
    tmp_path: Path, accepted: int, ends: tuple[int, int]
) -> None:
    kept = files(tmp_path)
    remember(kept, 1)
    for attempt in ends:
        kept.remember(2, lambda path, text=str(attempt): path.write_text(text), attempt)
    assert kept.recall(2, Path.read_text, accepted) == str(accepted)
    assert kept.recall(2, Path.read_text, 21 - accepted) is None
    assert kept.recall(1, Path.read_text) == "1"


def test_a_round_that_ends_after_a_later_one_leaves_nothing(tmp_path: Path) -> None:
    kept = files(tmp_path)
    remember(kept, 1)
    remember(kept, 3)
    remember(kept, 2)
    assert kept.recall(3, Path.read_text) == "3"
    assert kept.recall(2, Path.read_text) is None


def test_of_earlier_rounds_only_those_stay_that_are_needed(tmp_path: Path) -> None:
    kept = files(tmp_path)
    for done in range(1, 8):
        kept.drop_outdated([done - 1, *(n for n in (2, 4) if n < done)])
        remember(kept, done)
    held = sorted(path.read_text() for path in kept.folder.iterdir())
    assert held == ["2", "4", "6", "7"]
    assert kept.recall(4, Path.read_text) == "4"  # a run that resumes behind round 4
    remember(kept, 5, "again")
    assert kept.recall(5, Path.read_text) == "again"


def test_an_old_order_that_ends_late_takes_nothing_from_the_run_that_went_on(
    tmp_path: Path,
) -> None:
    kept = files(tmp_path)
    kept.drop_outdated([0])
    remember(kept, 2)  # of a run that resumed before round 2
    remember(kept, 4)  # an order of before, given up
    kept.drop_outdated([2])
    assert kept.recall(2, Path.read_text) == "2"
    assert len(list(kept.folder.iterdir())) == 1


def test_a_damaged_file_is_named_and_no_other_taken_for_it(tmp_path: Path, caplog) -> None:
    kept = files(tmp_path)
    for done in (1, 2):
        remember(kept, done)
    victim = max(kept.folder.iterdir())
    victim.write_bytes(b"x" + victim.read_bytes()[1:])
    assert kept.recall(2, Path.read_text) is None
    assert f"{victim} cannot be read: its bytes are not those that were written" in caplog.text


def test_a_file_that_was_written_by_another_program_is_named(tmp_path: Path, caplog) -> None:
    kept = files(tmp_path, suffix=".safetensors")
    remember(kept, 1, "no tensors")
    assert kept.recall(1, read_slots) is None
    assert "cannot be read: Error while deserializing header" in caplog.text


def test_after_every_cut_what_was_kept_of_the_last_round_is_there(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with watched(root) as disk:
        for done in (1, 2, 3, 4):
            remember(files(root / "state"), done)
            disk.done = done
    for number, (done, tree) in enumerate(disk.found):
        kept = files(rebuilt(tree, tmp_path / str(number)) / "state")
        assert kept.recall(done + 1, Path.read_text) in (None, str(done + 1)), "begun, or whole"
        assert kept.recall(done, Path.read_text) == (str(done) if done else None)


def test_what_a_killed_process_left_goes_with_the_next_round(tmp_path: Path) -> None:
    kept = files(tmp_path)
    remember(kept, 1)
    for number in (7, 9):
        left = kept.folder / f"round-00000{number}.txt.abcdefgh.collapipe.partial"
        left.mkdir()
        (left / f"round-00000{number}.txt").write_text("half")
    remember(kept, 2)
    assert {path.suffix for path in kept.folder.iterdir()} == {".txt"}


def test_a_full_disk_is_one_sentence_and_the_round_before_stays(tmp_path: Path) -> None:
    kept = files(tmp_path, suffix=".safetensors")
    kept.remember(1, partial(write_slots, slots(0.5)))
    many = {"block.weight": (torch.zeros(10_000),)}
    words = f'state-dir: "{kept.folder}" cannot be written: .*File too large'
    with full_disk(), pytest.raises(ConfigError, match=words):
        kept.remember(2, partial(write_slots, many))
    assert len(list(kept.folder.iterdir())) == 1
    assert kept.recall(1, read_slots) is not None
