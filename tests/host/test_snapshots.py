"""A recoverable session: back to its snapshot after a failure, on request, and after a restart."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from collapipe_flwr.core.errors import ConfigError, LinkError, ModelError, Unreachable
from collapipe_flwr.host.service import EdgeService
from collapipe_flwr.host.session import SessionRefused, Snapshot
from collapipe_flwr.host.stores import SnapshotStore
from collapipe_flwr.pipeline.config import SessionKey
from collapipe_flwr.pipeline.link import memory_pair
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.roles import FirstStage
from collapipe_flwr.pipeline.state import PartState, live_state, load_optimizer_state
from collapipe_flwr.transport.client import EdgeClient
from tests.forked import Process, start
from tests.full_disk import full_disk
from tests.host.chain_to_edge import build_head, request, service, session_key
from tests.pipeline.chains import WIDTH, Head, make_batch, make_parts, settings
from tests.power_cuts import rebuilt, watched

ADAMW = OptimizerConfig(name="adamw", learning_rate=0.05)
BATCHES = [make_batch((2, 2), seed=n) for n in range(4)]


def opened(edge: EdgeService, **options: object) -> EdgeService:
    edge.open(request(optimizer=ADAMW, recoverable=True, **options))
    torch.manual_seed(4)
    edge.push_weights(session_key(), make_parts((1,))[-1].state_dict())
    return edge


def train(
    edge: EdgeService, batches, *, first_step: int = 0, break_before_step: int | None = None
) -> None:
    """The embedding is made anew each time, so that only the head has a past."""
    part = make_parts((1,))[0]
    ours, theirs = memory_pair("control unit", "edge")
    thread = threading.Thread(target=run_quietly, args=(edge, theirs))
    thread.start()
    optimizer = Optimizer(ADAMW, [])
    control_unit = settings("control unit")
    first = FirstStage(part, optimizer, control_unit, downstream=ours, first_step=first_step)
    for index, batch in enumerate(batches):
        if index == break_before_step:
            ours.close("lost power")
            break
        first.train_step(batch)
    else:
        first.finish()
    thread.join(20)
    assert not thread.is_alive()


def run_quietly(edge: EdgeService, link) -> None:
    try:
        edge.run(session_key(), link)
    except LinkError as error:
        assert "lost power" in str(error) or "rolled back" in str(error)


def everything(edge: EdgeService) -> dict[str, torch.Tensor]:
    return edge.weights(session_key(), with_optimizer=True)


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert set(left) == set(right)
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.fixture
def undisturbed() -> dict[str, torch.Tensor]:
    """Weights and optimiser after four steps."""
    edge = opened(service())
    train(edge, BATCHES)
    return everything(edge)


def test_streams_one_after_the_other_are_one_stream(undisturbed):
    edge = opened(service())
    train(edge, BATCHES[:1])
    train(edge, BATCHES[1:])
    assert_same(everything(edge), undisturbed)


def test_a_broken_stream_goes_back_to_the_snapshot_and_replays_to_the_same_bits(undisturbed):
    edge = opened(service())
    train(edge, BATCHES[:2])
    edge.snapshot(session_key(), 2)
    snapshot = everything(edge)
    train(edge, BATCHES[2:], break_before_step=1)
    assert_same(everything(edge), snapshot)
    assert edge.health().sessions == 1
    train(edge, BATCHES[2:])
    assert_same(everything(edge), undisturbed)


def test_a_rollback_undoes_steps_that_went_well_here(undisturbed):
    edge = opened(service())
    train(edge, [*BATCHES[2:], *BATCHES])  # of a chain in which somebody else was lost
    edge.rollback(session_key(), 0)
    edge.rollback(session_key(), 0)
    train(edge, BATCHES)
    assert_same(everything(edge), undisturbed)


def counted(edge: EdgeService) -> tuple[int, int, list[tuple[int, int]]]:
    """Steps and bytes of the report, and the passes in the timeline."""
    report = edge.report(session_key())
    passes = [(s.step, s.micro_batch) for s in report.spans if s.work == "forward"]
    return report.steps, report.received_up.bytes, passes


@pytest.fixture
def all_counted() -> tuple[int, int, list[tuple[int, int]]]:
    """Of four steps in one stream."""
    edge = opened(service(), keep_spans=True)
    train(edge, BATCHES)
    return counted(edge)


def test_a_report_adds_up_the_streams_of_a_session(all_counted):
    edge = opened(service(), keep_spans=True)
    for first, stop in ((0, 1), (1, 4)):
        train(edge, BATCHES[first:stop], first_step=first)
    assert counted(edge) == all_counted


def test_steps_that_are_replayed_count_once(all_counted):
    edge = opened(service(), keep_spans=True)
    train(edge, BATCHES[:2])
    edge.snapshot(session_key(), 2)
    train(edge, BATCHES[2:], first_step=2, break_before_step=1)
    train(edge, BATCHES[2:], first_step=2)  # of a chain in which somebody else was lost
    edge.rollback(session_key(), 2)
    assert edge.report(session_key()).steps == 2
    train(edge, BATCHES[2:], first_step=2)
    assert counted(edge) == all_counted


def test_the_report_of_the_steps_before_outlives_a_restart(tmp_path, all_counted):
    edge = opened(EdgeService(build_head, snapshots=SnapshotStore(tmp_path)), keep_spans=True)
    train(edge, BATCHES[:2])
    edge.snapshot(session_key(), 2)
    again = EdgeService(build_head, snapshots=SnapshotStore(tmp_path))
    train(again, BATCHES[2:], first_step=2)
    assert counted(again) == all_counted


def test_new_weights_begin_a_new_report():
    edge = opened(service())
    train(edge, BATCHES[:1])
    edge.push_weights(session_key(), edge.weights(session_key()))
    train(edge, BATCHES[1:])
    assert edge.report(session_key()).steps == 3


def test_a_rollback_ends_a_stream_whose_device_hangs(undisturbed):
    edge = opened(service())
    ours, theirs = memory_pair("device", "edge")
    thread = threading.Thread(target=run_quietly, args=(edge, theirs))
    session = edge.find(session_key())
    thread.start()
    while session.stream is None:
        thread.join(0.01)
    edge.rollback(session_key(), 0)
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(LinkError, match="rolled back"):
        ours.receive(deadline_s=1.0)
    train(edge, BATCHES)
    assert_same(everything(edge), undisturbed)


def test_only_the_step_at_which_it_stands_can_be_kept_or_restored():
    edge = opened(service())
    train(edge, BATCHES[:2])
    with pytest.raises(SessionRefused, match="stands after step 2, not 3"):
        edge.snapshot(session_key(), 3)
    with pytest.raises(SessionRefused, match="no snapshot after step 1"):
        edge.rollback(session_key(), 1)
    edge.snapshot(session_key(), 2)
    edge.snapshot(session_key(), 2)
    with pytest.raises(SessionRefused, match="no snapshot after step 0"):
        edge.rollback(session_key(), 0)


def test_sessions_that_are_not_recoverable_keep_nothing():
    edge = service()
    edge.open(request())
    edge.push_weights(session_key(), Head().state_dict())
    for call in (edge.snapshot, edge.rollback):
        with pytest.raises(SessionRefused):
            call(session_key(), 0)


def test_a_snapshot_store_gives_the_next_process_the_last_snapshot(tmp_path, undisturbed):
    edge = opened(EdgeService(build_head, snapshots=SnapshotStore(tmp_path)))
    train(edge, BATCHES[:2])
    edge.snapshot(session_key(), 2)
    train(edge, BATCHES[2:], break_before_step=1)
    again = EdgeService(build_head, snapshots=SnapshotStore(tmp_path))
    with pytest.raises(SessionRefused, match="no session"):
        again.weights(SessionKey(session_id="c1", token="another token of length"))
    again.rollback(session_key(), 2)
    train(again, BATCHES[2:])
    assert_same(everything(again), undisturbed)
    again.close(session_key())
    assert not list(tmp_path.iterdir())
    assert EdgeService(build_head, snapshots=SnapshotStore(tmp_path)).health().sessions == 0


def test_a_vault_is_private_and_survives_rubbish(tmp_path, caplog):
    folder = tmp_path / "state"
    opened(EdgeService(build_head, snapshots=SnapshotStore(folder)))
    assert folder.stat().st_mode & 0o077 == 0
    (folder / "half.partial").write_bytes(b"{")  # not ours
    rubbish = folder / f"{'a' * 32}.safetensors"
    rubbish.write_bytes(b"{")
    again = EdgeService(build_head, snapshots=SnapshotStore(folder))
    assert again.health().sessions == 1
    assert f"{rubbish.name} cannot be read" in caplog.text
    assert rubbish.exists()  # it may be whole, and the disk or this version unable to read it


def test_a_users_own_files_beside_the_sessions_are_neither_read_nor_deleted(tmp_path, caplog):
    (tmp_path / "model.safetensors").write_bytes(b"{")
    opened(EdgeService(build_head, snapshots=SnapshotStore(tmp_path)))
    SnapshotStore(tmp_path).keep_only(())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert "model.safetensors" not in caplog.text


def test_state_travels_flat_and_comes_back_whole():
    part = make_parts((1,))[-1]
    optimizer = Optimizer(ADAMW, part.named_parameters())
    labels = torch.zeros(2, 4, dtype=torch.long)
    part(torch.randn(2, 4, WIDTH), {"labels": labels}).backward()
    optimizer.step()
    state = live_state(part, optimizer).copy()
    back = PartState.of_tensors(state.tensors())
    assert back.optimizer.keys() == state.optimizer.keys() == state.weights.keys()
    assert_same(back.tensors(), state.tensors())
    other = Optimizer(ADAMW, part.named_parameters())
    load_optimizer_state(other, back.optimizer)
    assert_same(live_state(part, other).tensors(), state.tensors())
    with pytest.raises(ModelError, match="sgd keeps tensors of shapes"):
        load_optimizer_state(
            Optimizer(OptimizerConfig(name="sgd"), part.named_parameters()), back.optimizer
        )


def edge_process(folder: Path, listen: str) -> tuple[Process, str]:
    process = start("tests.host.edge_process", listen, str(folder), env=os.environ)
    return process, process.stdout.readline().strip()


def test_a_killed_edge_process_is_waited_for_and_goes_on_where_it_was(tmp_path):
    process, address = edge_process(tmp_path, "127.0.0.1:0")
    again = None
    try:
        with EdgeClient(address, deadline_s=10, patience_s=60) as client:
            client.open_session(request(recoverable=True))
            client.session(session_key()).push_weights(Head().state_dict())
            before = client.session(session_key()).fetch_weights()
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            with EdgeClient(address) as hasty, pytest.raises(Unreachable):
                hasty.session(session_key()).rollback(0)
            again, _ = edge_process(tmp_path, address)
            client.session(session_key()).rollback(0)
            assert_same(client.session(session_key()).fetch_weights(), before)
            client.session(session_key()).close()
    finally:
        for each in filter(None, (process, again)):
            each.kill()
            each.wait(60)
            each.stdout.close()


def kept(step: int, size: int = 4) -> Snapshot:
    weights = {"weight": torch.full((size,), float(step))}
    state = PartState(weights=weights, optimizer={})
    return Snapshot(request=request(), step=step, state=state, report=None)


def test_after_every_cut_a_session_stands_at_its_last_snapshot_or_the_one_before(tmp_path, caplog):
    root = tmp_path / "disk"
    root.mkdir()
    with watched(root) as disk:
        for step in (1, 2, 3):
            SnapshotStore(root / "state").write(kept(step))
            disk.done = step
        SnapshotStore(root / "state").forget("c1")
        disk.done = 4
    for number, (done, tree) in enumerate(disk.found):
        found = list(SnapshotStore(rebuilt(tree, tmp_path / str(number)) / "state").read())
        steps = [session.step for session in found]
        assert steps in {0: ([], [1]), 3: ([3], []), 4: ([],)}.get(done, ([done], [done + 1]))
        assert all(torch.equal(s.state.weights["weight"], torch.full((4,), s.step)) for s in found)
    assert not caplog.records


def test_a_store_that_opens_removes_what_a_killed_one_was_writing(tmp_path):
    SnapshotStore(tmp_path).write(kept(1))
    (tmp_path / "half.safetensors.abcdefgh.collapipe.partial").mkdir()
    assert [session.step for session in SnapshotStore(tmp_path).read()] == [1]
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


def test_a_snapshot_that_finds_the_disk_full_is_one_sentence_and_the_last_one_stays(tmp_path):
    store = SnapshotStore(tmp_path)
    store.write(kept(1))
    words = f'--state-dir "{tmp_path}" cannot be written: .*File too large'
    with full_disk(), pytest.raises(ConfigError, match=words):
        store.write(kept(2, size=10_000))
    assert [session.step for session in store.read()] == [1]
    assert len(list(tmp_path.iterdir())) == 1
