"""Law: whenever the power goes, a run goes on from its newest checkpoint or the one before."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.checkpoint import Checkpoint, Checkpoints, ComponentState, rng_state
from tests.power_cuts import rebuilt, watched

ROUNDS = 4


def checkpoint(server_round: int) -> Checkpoint:
    marks = torch.full((3, 2), float(server_round))
    memory = ComponentState(
        text=str(server_round), arrays={"m": marks.numpy()}, tensors={"t": marks}
    )
    return Checkpoint(
        server_round=server_round,
        arrays=encode_tensors({"w": marks}),
        strategy="FedAvg",
        memories={"inner": memory},
    )


def assert_whole(found: Checkpoint) -> None:
    marks = torch.full((3, 2), float(found.server_round))
    assert torch.equal(decode_tensors(found.arrays)["w"], marks)
    memory = found.memories["inner"]
    assert memory.text == str(found.server_round)
    assert (memory.arrays["m"] == marks.numpy()).all() and torch.equal(memory.tensors["t"], marks)
    assert json.loads(found.rng_state).keys() == json.loads(rng_state()).keys()


def test_after_every_cut_the_newest_checkpoint_is_whole_and_none_is_missed(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    checkpoints = Checkpoints(folder=root / "run" / "checkpoints")
    with watched(root) as disk:
        for server_round in range(1, ROUNDS + 1):
            checkpoints.save(checkpoint(server_round))
            disk.done = server_round
            checkpoints.note_rng_state(server_round)
    assert len(disk.found) > 20 * ROUNDS
    for number, (done, tree) in enumerate(disk.found):
        folder = rebuilt(tree, tmp_path / str(number)) / "run" / "checkpoints"
        newest = Checkpoints(folder=folder).read_newest()
        if newest is None:
            assert done == 0
            continue
        assert newest.server_round in (done, done + 1)
        assert_whole(newest)


def test_a_run_goes_on_behind_every_cut_and_leaves_no_rubbish(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with watched(root) as disk:
        for server_round in (1, 2):
            Checkpoints(folder=root).save(checkpoint(server_round))
            disk.done = server_round
    for number, tree in enumerate(tree for done, tree in disk.found if done):
        checkpoints = Checkpoints(folder=rebuilt(tree, tmp_path / str(number)))
        newest = checkpoints.newest_round()
        checkpoints.save(checkpoint(newest + 1))
        left = sorted(path.name for path in checkpoints.folder.iterdir())
        assert left == [f"round-{kept:06d}" for kept in (newest, newest + 1)]
