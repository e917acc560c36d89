"""What clusters build on is what the model contains, whatever is lost, refused or resumed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.errors import ProtocolError, RunError
from collapipe_flwr.core.measurements import ClusterMeasurement
from collapipe_flwr.data.batches import draw_round_rows
from collapipe_flwr.federation.accepted import AcceptedReplies, Progress
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.checkpoint import ComponentState
from collapipe_flwr.federation.client.node_state import StateFiles
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.members import ClusterGrid
from collapipe_flwr.federation.planner import Unplanned
from collapipe_flwr.federation.records import (
    ARRAYS,
    METRICS,
    flower_round,
    read_assignment,
    write_telemetry,
)
from collapipe_flwr.federation.strategy import CollaPipe
from tests.thorough import examples

ROWS, LIMIT, MOST_ROUNDS = 7, 3, 12
CLUSTERS = (1, 2)
Model = dict[str, torch.Tensor]


def empty_model() -> Model:
    """What it has learnt: how often each row of each cluster, and in which rounds."""
    rows = {f"rows.{cluster}": torch.zeros(ROWS) for cluster in CLUSTERS}
    return {**rows, **{f"rounds.{cluster}": torch.zeros(MOST_ROUNDS + 1) for cluster in CLUSTERS}}


class Adds(FedAvg):
    """What the clusters learnt since the last round, all of it."""

    def aggregate_train(self, server_round, replies):
        del server_round
        found = [decode_tensors(reply.content[ARRAYS]) for reply in replies if reply.has_content()]
        if not found:
            return None, None
        best = {key: torch.stack([m[key] for m in found]).amax(0) for key in found[0]}
        return encode_tensors(best), None


class Fates(LocalGrid):
    """Clusters that train by the order's progress, each as ``fates`` says of this round."""

    def __init__(self, folder: Path) -> None:
        super().__init__(dict.fromkeys(CLUSTERS, self.train))
        self.fates: dict[int, str] = {}
        self._folder = folder

    def train(self, message: Message, context) -> Message:
        cluster = context.node_id
        fate, progress = self.fates[cluster], read_assignment(message.content).progress
        if fate == "fails":
            raise RuntimeError("no memory left")
        model = decode_tensors(message.content[ARRAYS])
        files = StateFiles.of(self._folder, "run", cluster, ".json")
        files.drop_outdated(progress.needed)
        known = files.recall(progress.last_round, lambda path: json.loads(path.read_text())) or []
        contained = model[f"rounds.{cluster}"].nonzero().flatten().tolist()
        assert known == contained, "the cluster's state is not that of the model"
        rows = draw_round_rows(
            ROWS, seed=0, rounds_done=progress.rounds, cluster_id=cluster, limit=LIMIT
        )
        server_round = flower_round(message.content)
        model[f"rows.{cluster}"] += torch.bincount(torch.tensor(rows), minlength=ROWS)
        model[f"rounds.{cluster}"][server_round] += 1
        state = json.dumps([*known, server_round])
        files.remember(server_round, lambda path: path.write_text(state))
        metrics = MetricRecord({"loss": 1.0, "num-examples": LIMIT})
        content = RecordDict({ARRAYS: encode_tensors(model), METRICS: metrics})
        name = "another" if fate == "refused" else str(cluster)
        told = ClusterMeasurement(cluster_id=name, examples=LIMIT, wall_s=0.1, losses=(1.0,))
        return Message(write_telemetry(content, told), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout=None) -> list[Message]:
        replies = super().send_and_receive(messages, timeout=timeout)
        for reply in replies:
            if reply.has_error():
                assert "no memory left" in reply.error.reason
        return [r for r in replies if self.fates[r.metadata.src_node_id] != "late"]


class Server:
    """A server process."""

    def __init__(self, folder: Path) -> None:
        names = {cluster: str(cluster) for cluster in CLUSTERS}
        self.grid = Fates(folder)
        self.members = ClusterGrid(self.grid, names)
        self.model = empty_model()
        self.strategy = CollaPipe(
            Adds(fraction_evaluate=0.0), scheduler=Unplanned(names), on_total_failure="raise"
        )
        self.accepted = self.strategy.resumable["accepted"]

    def play(self, server_round: int, fates: tuple[str, str]) -> None:
        """One round; raises RunError when nobody's reply can be used."""
        self.grid.fates = dict(zip(CLUSTERS, fates, strict=True))
        arrays = encode_tensors(self.model)
        asked = self.strategy.configure_train(server_round, arrays, ConfigRecord(), self.members)
        replies = self.members.send_and_receive(asked)
        after, _ = self.strategy.aggregate_train(server_round, replies)
        self.model = decode_tensors(after) if after else self.model


FATES = st.sampled_from(["done", "done", "fails", "late", "refused"])


@examples(8, 25)
@given(data=st.data())
def test_every_row_is_used_equally_often_and_state_is_of_the_rounds_in_the_model(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Replies fail, are refused or late; the server dies and resumes from a checkpoint."""
    folder = tmp_path_factory.mktemp("state")
    server, server_round = Server(folder), 0
    every = data.draw(st.integers(1, 3), label="checkpoint every")
    saved: list[tuple[int, Model, ComponentState]] = []  # checkpoints, oldest first
    for fates in data.draw(st.lists(st.tuples(FATES, FATES), max_size=MOST_ROUNDS), label="fates"):
        server_round += 1
        try:
            server.play(server_round, fates)
        except RunError:  # the run is over; it is resumed
            dies = True
        else:
            if server_round % every == 0:
                saved = [*saved, (server_round, server.model, server.accepted.dump())][-2:]
            dies = data.draw(st.booleans(), label="dies")
        if dies:
            if saved and data.draw(st.booleans(), label="newest is damaged"):
                saved.pop()
            server, server_round = Server(folder), 0
            if saved:
                server_round, server.model, memory = saved[-1]
                server.accepted.load(memory)
    for cluster in CLUSTERS:
        used = server.model[f"rows.{cluster}"]
        assert used.sum() == LIMIT * server.model[f"rounds.{cluster}"].sum()
        assert used.max() - used.min() <= 1


def test_clusters_are_told_their_own_rounds_and_those_of_two_checkpoints() -> None:
    accepted = AcceptedReplies()
    for server_round in (2, 3, 5):
        accepted.accept("a", server_round)
        accepted.dump()
    again = AcceptedReplies()
    again.load(accepted.dump())
    for counted in (accepted, again):
        assert counted.progress("a") == Progress(rounds=3, last_round=5, saved=(5,))
        assert counted.progress("b") == Progress()
    again.accept("a", 6)
    again.dump()
    assert again.progress("a") == Progress(rounds=4, last_round=6, saved=(5, 6))
    assert again.progress("a").needed == (6, 5, 6)


def test_a_strategy_that_starts_again_has_accepted_nothing() -> None:
    """As in a notebook, where the cell that starts it runs twice."""
    orders: list[tuple[int, int]] = []

    def train(message: Message, context: Context) -> Message:
        del context
        told = read_assignment(message.content).progress
        orders.append((told.rounds, told.last_round))
        metrics = MetricRecord({"loss": 1.0, "num-examples": LIMIT})
        model = {"w": decode_tensors(message.content[ARRAYS])["w"] + 1}
        content = RecordDict({ARRAYS: encode_tensors(model), METRICS: metrics})
        return Message(content, reply_to=message)

    strategy = CollaPipe(FedAvg(fraction_evaluate=0.0))
    grid, arrays = LocalGrid(dict.fromkeys(CLUSTERS, train)), encode_tensors({"w": torch.zeros(1)})
    for total in (3, 6):
        arrays = strategy.start(grid, arrays, num_rounds=3).arrays
        assert decode_tensors(arrays)["w"] == total
    first = [(done, done) for done in (0, 0, 1, 1, 2, 2)]
    assert orders == [*first, *first]


@pytest.mark.parametrize(
    "text", ["", "{}x", '{"clusters": {"a": {"rounds": 1}}}', '{"clusters": {"a": {"rounds": -1}}}']
)
def test_counts_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="the accepted rounds of the checkpoint"):
        AcceptedReplies().load(ComponentState(text=text))


def test_an_order_without_progress_is_refused() -> None:
    with pytest.raises(ProtocolError, match="wrap the server's strategy in CollaPipe"):
        read_assignment(RecordDict({"config": ConfigRecord({"server-round": 1})}))
