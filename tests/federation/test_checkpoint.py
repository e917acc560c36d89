"""A server that dies and comes back ends with the bits of one that never died."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    Krum,
    Strategy,
)

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.checkpoint import (
    VERSION,
    Checkpoint,
    Checkpoints,
    ComponentState,
    encode_state,
    restore_state,
)
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.resuming import Checkpointed
from collapipe_flwr.federation.strategy import CollaPipe
from tests.full_disk import full_disk
from tests.power_cuts import Killed

SOME = {"fraction_train": 0.5}  # so that sampling draws from the generators
INNER: dict[str, Callable[[], Strategy]] = {
    "fedavg": lambda: FedAvg(**SOME),
    "fedadam": lambda: FedAdam(**SOME, beta_1=0.9, beta_2=0.99),
    "fedyogi": lambda: FedYogi(**SOME, beta_1=0.9, beta_2=0.99),
    "fedavgm": lambda: FedAvgM(**SOME, server_momentum=0.8),
    "krum": lambda: Krum(num_malicious_nodes=1),
    "dp-fixed": lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(**SOME), 0.7, 0.5, 3),
    "dp-adaptive": lambda: DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(**SOME), 0.2, 3),
}


class FragileGrid(LocalGrid):
    """Dies when it is asked to train in one round."""

    deadly_round = 0

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        rounds = {m.content["config"]["server-round"] for m in messages if m.content.get("config")}
        if self.deadly_round in rounds and messages[0].metadata.message_type == "train":
            raise Killed
        return super().send_and_receive(messages, timeout=timeout)


def grid(drifting, deadly_round: int = 0) -> FragileGrid:
    made = FragileGrid({n: drifting(0.1 * n, examples=7 * n) for n in range(1, 7)})
    made.deadly_round = deadly_round
    return made


def model() -> ArrayRecord:
    return encode_tensors(
        {
            "w": torch.linspace(-1, 1, 12).reshape(3, 4),
            "b": torch.zeros(4),
            "steps": torch.tensor(3),
        }
    )


def seed() -> None:
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)


def checkpointed(name: str, folder, *, resume: bool) -> Checkpointed:
    strategy = CollaPipe(INNER[name]())
    return Checkpointed(strategy, Checkpoints(folder=folder, resume=resume))


@pytest.mark.parametrize("name", INNER)
def test_a_killed_run_ends_with_the_same_bits(name, tmp_path, drifting):
    seed()
    whole = CollaPipe(INNER[name]()).start(grid(drifting), model(), num_rounds=5)
    seed()
    with pytest.raises(Killed):
        checkpointed(name, tmp_path, resume=False).start(grid(drifting, 4), model(), num_rounds=5)
    random.seed(1)
    np.random.seed(1)  # another process: its generators stand elsewhere
    resumed = checkpointed(name, tmp_path, resume=True).start(grid(drifting), model(), num_rounds=5)
    assert {k: a.data for k, a in resumed.arrays.items()} == {
        k: a.data for k, a in whole.arrays.items()
    }
    assert sorted(resumed.train_metrics_clientapp) == [4, 5]
    assert resumed.train_metrics_clientapp[5] == whole.train_metrics_clientapp[5]


def test_rounds_are_counted_on_for_clients_and_evaluation(tmp_path, drifting):
    with pytest.raises(Killed):
        checkpointed("fedavg", tmp_path, resume=False).start(grid(drifting, 3), model(), 5)
    seen: list[int] = []
    nodes = grid(drifting)
    result = checkpointed("fedavg", tmp_path, resume=True).start(
        nodes,
        model(),
        num_rounds=4,
        evaluate_fn=lambda r, arrays: seen.append(r) or MetricRecord({"n": len(arrays)}),
    )
    assert seen == [2, 3, 4]
    assert sorted(result.evaluate_metrics_serverapp) == [2, 3, 4]
    rounds = {m.content["config"]["server-round"] for m in nodes.sent}
    assert rounds == {3, 4}


def test_a_finished_run_resumes_to_its_own_model(tmp_path, drifting):
    done = checkpointed("fedavg", tmp_path, resume=False).start(grid(drifting), model(), 2)
    again = checkpointed("fedavg", tmp_path, resume=True).start(grid(drifting), model(), 2)
    assert {k: a.data for k, a in again.arrays.items()} == {
        k: a.data for k, a in done.arrays.items()
    }


def test_only_the_newest_are_kept_and_no_partial_one_counts(tmp_path, drifting):
    checkpointed("fedavg", tmp_path, resume=False).start(grid(drifting), model(), 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-000003", "round-000004"]
    (tmp_path / "round-000009.abcdefgh.collapipe.partial").mkdir()
    assert Checkpoints(folder=tmp_path).read_newest().server_round == 4


def test_every_dtype_survives_in_its_order(tmp_path):
    tensors = {
        "z": torch.ones(2, dtype=torch.bfloat16),
        "a": torch.tensor(True),
        "m": torch.arange(3),
        "half": torch.ones(2, 2, dtype=torch.float16).T,
    }
    checkpoints = Checkpoints(folder=tmp_path)
    checkpoints.save(a_checkpoint(encode_tensors(tensors)))
    read = decode_tensors(checkpoints.read_newest().arrays)
    assert list(read) == list(tensors)
    for key, tensor in tensors.items():
        assert read[key].dtype == tensor.dtype
        assert torch.equal(read[key], tensor)


def test_an_occupied_folder_is_not_overwritten(tmp_path, drifting):
    checkpointed("fedavg", tmp_path, resume=False).start(grid(drifting), model(), 1)
    with pytest.raises(RunError, match="holds a checkpoint of round 1 already"):
        checkpointed("fedavg", tmp_path, resume=False).start(grid(drifting), model(), 1)


@pytest.mark.parametrize("victim", ["state.json", "global.safetensors", "chance.json"])
def test_a_damaged_checkpoint_is_named(tmp_path, drifting, victim):
    checkpointed("fedavg", tmp_path, resume=False).start(grid(drifting), model(), 2)
    (tmp_path / "round-000002" / victim).write_bytes(b"{}")
    with pytest.raises(RunError, match="checkpoint"):
        checkpointed("fedavg", tmp_path, resume=True).start(grid(drifting), model(), 3)


@pytest.mark.parametrize("part", ["inner", "accepted"])
@pytest.mark.parametrize("text", ["[", "7"])
def test_a_damaged_memory_is_named_with_its_part(tmp_path, drifting, part, text):
    checkpointed("fedadam", tmp_path, resume=False).start(grid(drifting), model(), 1)
    path = tmp_path / "round-000001" / "state.json"
    state = json.loads(path.read_text())
    state["memories"][part] = text
    path.write_text(json.dumps(state))
    with pytest.raises(RunError, match=f"{part}.* cannot be read"):
        checkpointed("fedadam", tmp_path, resume=True).start(grid(drifting), model(), 2)


def test_a_checkpoint_of_another_run_is_refused(tmp_path, drifting):
    checkpointed("fedavg", tmp_path, resume=False).start(grid(drifting), model(), 1)
    with pytest.raises(RunError, match="holds the state of FedAvg, this run uses FedAdam"):
        checkpointed("fedadam", tmp_path, resume=True).start(grid(drifting), model(), 2)
    other = encode_tensors({"w": torch.zeros(3, 5), "b": torch.zeros(4), "steps": torch.tensor(0)})
    with pytest.raises(RunError, match=r"w has shape \(3, 4\), this run's has \(3, 5\)"):
        checkpointed("fedavg", tmp_path, resume=True).start(grid(drifting), other, 2)
    with pytest.raises(RunError, match="another model"):
        checkpointed("fedavg", tmp_path, resume=True).start(grid(drifting), ArrayRecord(), 2)


def test_a_checkpoint_of_another_version_is_refused_in_one_sentence(tmp_path, drifting):
    checkpointed("fedavg", tmp_path, resume=False).start(grid(drifting), model(), 1)
    file = next(tmp_path.glob("round-*/state.json"))
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": VERSION - 1}))
    with pytest.raises(RunError, match=rf"is of version {VERSION - 1}, this program of {VERSION}$"):
        checkpointed("fedavg", tmp_path, resume=True).start(grid(drifting), model(), 2)


def test_a_strategy_whose_memory_has_no_plain_form_is_refused_before_it_matters():
    inner = FedAvg()
    inner.accountant = object()
    with pytest.raises(RunError, match=r"inner\.accountant is a object, which a checkpoint cannot"):
        Checkpointed(CollaPipe(inner), Checkpoints(folder=None))


@pytest.mark.parametrize(
    "made", [{"a": 1, 2: [3], None: {4.5: "b"}}, Counter(a=2, b=1), OrderedDict(b=1, a=2)]
)
def test_a_dict_comes_back_as_what_it_was(made):
    inner, again = FedAvg(), FedAvg()
    inner.seen = made
    restore_state(again, json.loads(json.dumps(encode_state(inner, {}))), {})
    assert (type(again.seen), list(again.seen.items())) == (type(made), list(made.items()))


@pytest.mark.parametrize(
    "made", [defaultdict(list, a=[1]), {("a", 1): 2}, {np.int64(3): 1}, {"a": {b"b": 1}}]
)
def test_a_dict_that_would_come_back_as_another_is_refused(made):
    inner = FedAvg()
    inner.seen = made
    with pytest.raises(
        RunError, match=r"inner\.seen.* is a .*dict, which a checkpoint cannot hold"
    ):
        encode_state(inner, {})


class Best(NamedTuple):
    server_round: int
    scores: tuple[float, ...]


def test_a_named_tuple_comes_back_as_what_it_was(monkeypatch):
    inner, again = FedAvg(), FedAvg()
    inner.best = [Best(3, (0.5, 0.7))]
    saved = json.loads(json.dumps(encode_state(inner, {})))
    restore_state(again, saved, {})
    assert again.best == inner.best
    assert type(again.best[0]) is Best and type(again.best[0].scores) is tuple
    monkeypatch.delattr(sys.modules[__name__], "Best")
    with pytest.raises(RunError, match=r"holds a Best of .*, which this run has not: use the same"):
        restore_state(again, saved, {})


def test_a_named_tuple_that_could_not_be_found_again_is_refused():
    class Hidden(NamedTuple):
        loss: float

    inner = FedAvg()
    inner.best = Hidden(0.5)
    with pytest.raises(RunError, match=r"inner\.best is a Hidden, which a checkpoint cannot hold"):
        encode_state(inner, {})


def a_checkpoint(arrays: ArrayRecord):

    return Checkpoint(
        server_round=1, arrays=arrays, strategy="FedAvg", memories={"inner": ComponentState()}
    )


def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_stays(tmp_path):
    checkpoints = Checkpoints(folder=tmp_path)
    checkpoints.save(a_checkpoint(model()))
    large = encode_tensors({"w": torch.zeros(100_000)})
    second = replace(a_checkpoint(large), server_round=2)
    words = r"the checkpoint .*round-000002 cannot be written .*File too large.* make room"
    with full_disk(), pytest.raises(RunError, match=words):
        checkpoints.save(second)
    assert checkpoints.read_newest().server_round == 1
    assert [path.name for path in tmp_path.iterdir()] == ["round-000001"]
