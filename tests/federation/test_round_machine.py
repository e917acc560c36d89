"""Whatever befalls its rounds, a run contains each training once or never.

Replies are late, stray, huge, broken or missing; rounds are repeated, dropped and refused; the
server is resumed from a checkpoint or started anew. The strategy, its late updates and the nodes'
state are the real ones; nodes and transport are in this process.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvgM
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.measurements import ClusterMeasurement
from collapipe_flwr.federation import attempts, open_round
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.client.node_state import NodeState, StateCodec
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.records import (
    ARRAYS,
    EXAMPLES,
    LATE,
    METRICS,
    SHORT,
    read_assignment,
    write_telemetry,
)
from collapipe_flwr.federation.strategy import CollaPipe
from collapipe_flwr.models.any_splitter import DescribedModel
from tests.federation.split_clusters import FixedPlanner

CLUSTERS = (1, 2)
HUGE = 3e38  # finite, but not twice
LOST = st.sampled_from(["stray", "stray", "fails"])
FATE = st.sampled_from(["done", "done", "done", "late", "huge", "nan"]) | LOST
Ids = tuple[int, ...]


def read_id(record: ArrayRecord | ConfigRecord) -> int | None:
    return record["id"] if isinstance(record, ConfigRecord) else None


IDS: StateCodec[int] = StateCodec(
    name="training",
    suffix=".json",
    write=lambda number, path: path.write_text(json.dumps(number)),
    read=lambda path: int(json.loads(path.read_text())),
    encode=lambda number: ConfigRecord({"id": number}),
    decode=read_id,
)


def first_model() -> dict[str, torch.Tensor]:
    """The personal part holds the training that made it; 0 is none."""
    return {"body": torch.ones(2), "head": torch.ones(2), "own": torch.zeros(1)}


def described() -> DescribedModel:
    splitter = SimpleNamespace(
        all_keys=first_model,
        state_keys=frozenset(first_model()),
        constant_keys=frozenset(),
        aliases={},
        prefix="",
        held_blocks=0,
        spec=SimpleNamespace(to_json=lambda: "{}"),
    )
    return DescribedModel(splitter, SHORT, personal=("own",))


class Own:
    """An object of a user's own code."""

    def __init__(self) -> None:
        self.seen = {"rounds": [0]}


class Stateful(FedAvgM):
    """Changes all that a strategy may hold, most of it in place."""

    def __init__(self, machine: Rounds) -> None:
        super().__init__(
            fraction_evaluate=0.0,
            min_train_nodes=1,
            min_available_nodes=1,
            server_momentum=0.5,
            server_learning_rate=2.0,
        )
        self.counts: Counter[str] = Counter()
        self.moment, self.tensor = np.zeros(2), torch.zeros(2)
        self.draws, self.own = random.Random(5), Own()
        self.began, self.told = machine.on_configure, machine.on_aggregate

    def configure_train(self, server_round, arrays, config, grid):
        self.began(self)
        self.counts["asked"] += 1
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        usable = [reply for reply in replies if reply.has_content()]
        if self.told(tuple(int(reply.content[METRICS]["id"]) for reply in usable)):
            return None, None
        self.counts["aggregated"] += 1
        self.moment += self.draws.random()
        self.tensor.add_(1)
        self.own.seen["rounds"].append(server_round)
        with np.errstate(over="ignore", invalid="ignore"):
            return super().aggregate_train(server_round, usable)


def image(strategy: Stateful) -> object:
    """All of its state, as values that can be compared."""
    arrays = strategy.current_arrays
    return (
        dict(strategy.counts),
        strategy.moment.tolist(),
        strategy.tensor.tolist(),
        strategy.draws.getstate(),
        deepcopy(strategy.own.seen),
        None if arrays is None else {k: a.data for k, a in arrays.items()},
        None
        if strategy.momentum_vector is None
        else [m.tolist() for m in strategy.momentum_vector],
    )


class Settling(FixedPlanner):
    """Notes the trainings that were measured."""

    def __init__(self) -> None:
        super().__init__(*(f"c{cluster}" for cluster in CLUSTERS))
        self.measured: list[int] = []

    def settle(self, closed):
        self.measured += [int(told.losses[0]) for told in closed.telemetry.values()]
        return super().settle(closed)


class Fates(LocalGrid):
    """Late replies can be pulled a round later, stray ones never."""

    def __init__(self, machine: Rounds) -> None:
        super().__init__(dict.fromkeys(CLUSTERS, machine.train))
        self._machine, self.clock = machine, 0
        self._due: dict[str, int] = {}

    def send_and_receive(self, messages, *, timeout=None):
        del timeout
        self.clock += 1
        sent, replies = list(messages), []
        fates = [self._machine.next_fate(m.metadata.dst_node_id) for m in sent]
        for message, fate, name in zip(sent, fates, self.push_messages(sent), strict=True):
            if fate == "late":
                self._due[name] = self.clock + 1
                replies.append(Message(Error(LATE, "late"), reply_to=message))
            elif fate != "stray":
                replies += super().pull_messages([name])
        return replies

    def pull_messages(self, message_ids):
        due = [name for name in message_ids if self._due.get(name, self.clock) <= self.clock]
        return super().pull_messages(due)

    def hurry(self, _seconds: float) -> None:
        self.clock += 1


class Rounds(RuleBasedStateMachine):
    """A run, and what it should contain: ``contained`` are the trainings of accepted rounds."""

    def __init__(self) -> None:
        super().__init__()
        self._open = ExitStack()
        self._folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
        self._open.enter_context(mock.patch.object(attempts, "sleep", lambda _: None))
        orders = partial(random.Random(3).getrandbits, 31)  # in no order, and the same every time
        self._open.enter_context(mock.patch.object(open_round, "new_attempt", orders))
        self.running = ExitStack()
        self.trained = 0  # trainings so far; each has its number
        self.fates: dict[int, list[str]] = {}
        self.now: dict[int, str] = {}
        self.strays: list[tuple[NodeState, int]] = []
        self.wrong = ""
        self.records: dict[int, RecordDict] = {cluster: RecordDict() for cluster in CLUSTERS}
        self.grid = Fates(self)
        self.clusters_of: dict[int, int] = {}
        self.started_anew()
        self.saved: tuple | None = None

    def started_anew(self) -> None:
        """What a new run contains."""
        self.round, self.model = 0, encode_tensors(first_model())
        self.contained: list[int] = []
        self.last = dict.fromkeys(CLUSTERS, 0)  # the training that each cluster continues from
        self.remembered = dict(self.last)  # the one whose state it still has

    @initialize()
    def start_a_server(self) -> None:
        self.planner, self.inner = Settling(), Stateful(self)
        self.told: list = []
        self.strategy = CollaPipe(
            self.inner,
            model=described(),
            scheduler=self.planner,
            learning=lambda _: LearningSettings(keep_optimizer=True),
            edge="127.0.0.1:1",  # nobody asks it
            on_round=self.told.append,
            retries=1,
            late="join",
        )
        self.strategy._hooks.late._sleep = self.grid.hurry
        self.running = ExitStack()
        self.running.enter_context(self.strategy.running())

    # What the nodes do

    def next_fate(self, cluster: int) -> str:
        fates = self.fates[cluster]
        self.now[cluster] = fates.pop(0) if len(fates) > 1 else fates[0]
        return self.now[cluster]

    def train(self, message: Message, context) -> Message:
        """Check that the cluster builds on the accepted training, and train once more."""
        cluster, fate = context.node_id, self.now[context.node_id]
        asked = read_assignment(message.content)
        state = NodeState(
            records=self.records[cluster],
            server_round=asked.server_round,
            progress=asked.progress,
            run_id="run",
            index=cluster,
            state_dir=self._folder if cluster == 1 else None,  # the other has Flower's records
            attempt=asked.attempt,
        )
        sent = decode_tensors(message.content[ARRAYS])
        built_on = int(sent["own"]), state.recall(IDS) or 0
        expected = self.last[cluster], self.remembered[cluster]
        if built_on != expected:  # an error would only be that of a node
            self.wrong = f"cluster {cluster} builds on {built_on}, not on {expected}"
        if fate == "fails":
            raise LinkError("no memory left")
        self.trained += 1
        self.clusters_of[self.trained] = cluster
        if fate == "stray":  # it ends some time later
            self.strays.append((state, self.trained))
        else:
            state.remember(IDS, self.trained)
        step = {"huge": HUGE, "nan": torch.nan}.get(fate, float(cluster))
        moved = {"body": sent["body"] + step, "head": sent["head"] + 1.0}
        moved["own"] = torch.tensor([float(self.trained)])
        metrics = MetricRecord({"loss": 1.0, EXAMPLES: 10, "id": self.trained})
        content = RecordDict({ARRAYS: encode_tensors(moved), METRICS: metrics})
        told = ClusterMeasurement(
            cluster_id=f"c{cluster}", examples=10, wall_s=0.1, losses=(float(self.trained),)
        )
        return Message(write_telemetry(content, told), reply_to=message)

    # What the inner strategy sees

    def on_configure(self, inner: Stateful) -> None:
        assert image(inner) == self.before, "an attempt at the round left its traces"

    def on_aggregate(self, seen: Ids) -> bool:
        self.seen = seen
        return self.drops or not seen

    # What may happen

    @rule(first=FATE, second=FATE, drops=st.sampled_from([False, False, True]))
    def play_a_round(self, first: str, second: str, drops: bool) -> None:
        """``drops`` has the inner strategy refuse it."""
        self._play([first], [second], drops)

    @rule(lost=st.tuples(LOST, LOST), then=st.tuples(FATE, FATE))
    def repeat_a_round(self, lost: tuple[str, str], then: tuple[str, str]) -> None:
        self._play(*(list(fates) for fates in zip(lost, then, strict=True)), drops=False)

    def _play(self, first: list[str], second: list[str], drops: bool) -> None:
        """One fate for each attempt at the round."""
        self.round += 1
        self.fates, self.drops, self.seen = {1: first, 2: second}, drops, ()
        self.before = image(self.inner)
        config = ConfigRecord()
        asked = self.strategy.configure_train(self.round, self.model, config, self.grid)
        replies = self.grid.send_and_receive(asked)
        after, _ = self.strategy.aggregate_train(self.round, replies)
        assert not self.wrong, self.wrong
        assert len(set(self.planner.measured)) == len(self.planner.measured)
        if after is not None:
            assert not set(self.seen) & set(self.contained), "a training counts twice"
            assert len(set(self.seen)) == len(self.seen)
            self.contained += self.seen
            accepted = {self.clusters_of[number]: number for number in self.seen}
            self.last |= accepted
            self.remembered |= accepted
            self.model = after
        elif self.seen and not drops:
            assert image(self.inner) == self.before, "a refused round left its traces"
            assert any("infinite or NaN" in remark for remark in map(str, self.told[-1].incidents))
        assert all(torch.isfinite(tensor).all() for tensor in decode_tensors(self.model).values())

    @precondition(lambda self: self.strays)
    @rule()
    def end_a_stray_training(self) -> None:
        """A cluster finishes an order that the server has given up."""
        state, number = self.strays.pop(0)
        state.remember(IDS, number)

    @rule()
    def save_a_checkpoint(self) -> None:
        parts = {name: part.dump() for name, part in self.strategy.resumable.items()}
        inner = {
            name: deepcopy(value)
            for name, value in vars(self.inner).items()
            if name not in ("began", "told")
        }
        ours = self.round, self.model, list(self.contained), dict(self.last)
        self.saved = parts, inner, ours

    @precondition(lambda self: self.saved)
    @rule()
    def resume_from_the_checkpoint(self) -> None:
        parts, inner, (done, model, contained, last) = self.saved
        self.running.close()
        self.start_a_server()
        for name, part in self.strategy.resumable.items():
            part.load(parts[name])
        vars(self.inner).update(deepcopy(inner))
        self.round, self.model = done, model
        self.contained, self.last = list(contained), dict(last)
        self.records = {cluster: RecordDict() for cluster in CLUSTERS}  # Flower's are of one run
        self.remembered = {1: last[1], 2: 0}

    @rule()
    def start_the_same_strategy_again(self) -> None:
        self.running.close()
        self.running.enter_context(self.strategy.running())
        self.started_anew()
        self.saved = None  # it was of the run before
        self.inner.current_arrays = self.inner.momentum_vector = None  # the user's own business

    def teardown(self) -> None:
        with self._open:
            self.running.close()


class TestRounds(Rounds.TestCase):
    settings = settings(max_examples=20, stateful_step_count=12, derandomize=True)


@pytest.mark.slow
class TestManyRounds(Rounds.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=20, derandomize=True)
