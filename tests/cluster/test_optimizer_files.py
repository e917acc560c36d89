"""Of a cluster's optimiser files those stay that a resumed run may go on from, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from collapipe_flwr.cluster.optimizer_files import OptimizerFiles
from collapipe_flwr.pipeline.state import Slots


def slots(mark: float) -> Slots:
    return {"block.weight": (torch.full((2, 3), mark), torch.tensor(mark, dtype=torch.bfloat16))}


def files(folder: Path, every: int = 1) -> OptimizerFiles:
    return OptimizerFiles.of(folder, "../a run", 0, every)


def mark(found: Slots | None) -> float | None:
    return None if found is None else float(found["block.weight"][0][0, 0])


def test_slots_come_back_bit_for_bit_in_every_dtype(tmp_path: Path) -> None:
    files(tmp_path).remember(1, slots(1 / 3))
    found = files(tmp_path).recall(2)
    assert found is not None and found.keys() == slots(0).keys()
    for ours, theirs in zip(found["block.weight"], slots(1 / 3)["block.weight"], strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_runs_and_clusters_are_strangers_and_nothing_leaves_the_folder(tmp_path: Path) -> None:
    files(tmp_path / "state").remember(1, slots(1.0))
    assert OptimizerFiles.of(tmp_path / "state", "another", 0, 1).recall(2) is None
    assert OptimizerFiles.of(tmp_path / "state", "../a run", 1, 1).recall(2) is None
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "state").rglob("*"))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_run_that_goes_on_from_either_checkpoint_finds_what_was_there_then(
    tmp_path: Path, every: int
) -> None:
    missed, rounds = 4, 9  # the cluster took no part in one round
    for now in range(1, rounds + 1):
        if now == missed:
            continue
        kept = files(tmp_path / str(now), every)
        for done in range(1, now + 1):
            if done != missed:
                kept.remember(done, slots(done))
        newest = (now - 1) // every * every
        for start in (newest, newest - every):
            if start <= 0:
                continue
            expected = start - 1 if start == missed else start
            copies = files(tmp_path / f"{now}-{start}", every)
            copies.folder.mkdir(parents=True)
            for path in kept.folder.iterdir():
                (copies.folder / path.name).write_bytes(path.read_bytes())
            assert mark(copies.recall(start + 1)) == expected
        assert len(list(kept.folder.iterdir())) <= 3
        assert mark(kept.recall(now + 1)) == now


def test_rounds_that_are_trained_again_are_forgotten(tmp_path: Path) -> None:
    kept = files(tmp_path)
    for done in (1, 2, 3):
        kept.remember(done, slots(done))
    assert mark(kept.recall(3)) == 2.0
    assert mark(kept.recall(4)) == 2.0  # the third round of the lost time is gone
    kept.remember(3, slots(33.0))
    assert mark(kept.recall(4)) == 33.0


def test_a_damaged_file_is_named_and_no_other_taken_for_it(tmp_path: Path, caplog) -> None:
    kept = files(tmp_path)
    for done in (1, 2):
        kept.remember(done, slots(done))
    victim = max(kept.folder.iterdir())
    victim.write_bytes(victim.read_bytes()[:-1] + b"\0")
    assert kept.recall(3) is None
    assert f"{victim} cannot be read: its bytes are not those that were written" in caplog.text
