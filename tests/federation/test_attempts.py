"""A round in which everybody failed is repeated; what comes of it is an undisturbed round."""

from __future__ import annotations

import logging
import random
import traceback

import pytest
import torch
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.clientapp.client_app import ClientAppException
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr.core.errors import DataError, Diverged, LinkError, RunError
from collapipe_flwr.federation import attempts
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.strategy import CollaPipe
from tests.federation.split_clusters import FixedPlanner, model, trainer, wrapped


class Flaky:
    """A client whose first ``failures`` calls raise; it also draws, as a ClientApp may."""

    def __init__(self, train, failures: int, error: Exception | None = None) -> None:
        self._train, self._left = train, failures
        self._error = error or LinkError("device d2 does not answer")
        self.calls = 0

    def __call__(self, message: Message, context) -> Message:
        self.calls += 1
        random.random()
        if self._left:
            self._left -= 1
            raise self._error
        return self._train(message, context)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that were made, in seconds that did not pass."""
    made: list[float] = []
    monkeypatch.setattr(attempts, "sleep", made.append)
    return made


def patient(records: list, most: int) -> CollaPipe:
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    return wrapped(FixedPlanner("c1", "c2"), records, inner, retries=most)


def test_a_round_in_which_all_failed_is_repeated_after_growing_pauses_to_the_same_bits(pauses):
    models = []
    for failures in (0, 3):
        records = []
        pauses.clear()
        nodes = {n: Flaky(trainer(float(n), 10 * n), failures) for n in (1, 2)}
        strategy = patient(records, 3)
        result = strategy.start(LocalGrid(nodes), encode_tensors(model()), num_rounds=2)
        models.append({key: array.data for key, array in result.arrays.items()})
        assert pauses == [2.0, 4.0, 8.0][:failures]
        assert [len(record.incidents) for record in records] == [failures, 0]
        assert not records[0].failures
    assert models[0] == models[1]


def test_nodes_are_drawn_as_if_nothing_had_failed():
    """The inner strategy samples half of its clients, by Python's generator."""
    sampled = []
    for failures in (0, 1):
        random.seed(5)
        nodes = {n: Flaky(trainer(1.0, 10), failures) for n in range(1, 9)}
        inner = FedAvg(fraction_train=0.5, fraction_evaluate=0.0, min_available_nodes=8)
        names = [f"c{n}" for n in nodes]
        strategy = wrapped(FixedPlanner(*names), [], inner, retries=1)
        grid = LocalGrid(nodes)
        strategy.start(grid, encode_tensors(model()), num_rounds=1)
        sampled.append([m.metadata.dst_node_id for m in grid.sent])
    assert sampled[1] == 2 * sampled[0]


def test_when_the_repetitions_are_used_up_the_run_ends_with_the_last_sentence_and_their_number():
    nodes = {n: Flaky(trainer(1.0, 10), 99) for n in (1, 2)}
    words = r"all 2 clusters failed, first c1: device d2 does not answer \(tried 3 times in 0 s\)"
    with pytest.raises(RunError, match=words):
        patient([], 2).start(LocalGrid(nodes), encode_tensors(model()))
    assert [node.calls for node in nodes.values()] == [3, 3]


def test_what_time_does_not_mend_is_not_repeated(pauses):
    nodes = {n: Flaky(trainer(1.0, 10), 9, DataError("no column text")) for n in (1, 2)}
    with pytest.raises(RunError, match=r"first c1: no column text$"):
        patient([], 5).start(LocalGrid(nodes), encode_tensors(model()))
    assert pauses == []


def test_models_that_diverged_are_not_trained_again(pauses):
    bad = {"embed.weight": torch.full((3, 2), torch.nan)}
    nodes = {n: Flaky(trainer(1.0, 10, extra=bad), 0) for n in (1, 2)}
    with pytest.raises(RunError, match=r"lower the learning rate$"):
        patient([], 5).start(LocalGrid(nodes), encode_tensors(model()))
    whole = CollaPipe(FedAvg(), on_total_failure="raise", retries=5)
    with pytest.raises(RunError, match=r"lower the learning rate$"):
        whole.start(LocalGrid(dict.fromkeys((1, 2), _infinite)), encode_tensors(model()))
    assert pauses == []


def simulated(error: Exception, why: Exception | None = None) -> Message:
    """The reply of Flower's simulation to a message for which its ClientApp raised an error."""
    from ray.exceptions import RayTaskError

    try:
        try:
            raise error from why
        except Exception as raised:
            raise ClientAppException(str(raised)) from raised
    except ClientAppException as raised:
        text, cause = traceback.format_exc(), raised
    task = RayTaskError("run", text, cause, proctitle="ray::ClientAppActor.run", pid=1, ip="::1")
    found = task.as_instanceof_cause()
    reason = f"{type(found)}:<'{found}'>"
    return Message(Error(2, reason), reply_to=Message(RecordDict(), 1, "train"))


@pytest.mark.usefixtures("identity")
def test_errors_are_told_apart_in_the_tracebacks_of_a_simulation():
    pytest.importorskip("ray")
    lasting = [simulated(DataError("no column text")), simulated(Diverged("loss is nan"))]
    lasting.append(simulated(DataError("no column text"), KeyError("text")))
    assert attempts.are_permanent(lasting)
    assert "RayTaskError(ClientAppException)'" in lasting[0].error.reason
    for error in (LinkError("no column text"), ValueError("no column text")):
        assert not attempts.are_permanent([*lasting, simulated(error)])
        assert not attempts.are_permanent([simulated(error, DataError("no column text"))])


def test_a_strategy_that_makes_finite_replies_infinite_does_not_spoil_the_model(caplog):
    class Spoiling(FedAvg):
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            broken = {k: v / 0.0 for k, v in decode_tensors(arrays).items()}
            return encode_tensors(broken), metrics

    seen = []
    grid = LocalGrid({n: trainer(1.0, 10) for n in (1, 2)})
    strategy = wrapped(FixedPlanner("c1", "c2"), [], Spoiling(fraction_evaluate=0.0))
    with pytest.raises(RunError, match=r"Spoiling made embed\.weight of the model infinite or NaN"):
        strategy.start(grid, encode_tensors(model()), num_rounds=1)
    forgiving = CollaPipe(Spoiling(fraction_evaluate=0.0))
    whole = LocalGrid(dict.fromkeys((1, 2), _whole))
    with caplog.at_level(logging.WARNING, "flwr.collapipe"):
        forgiving.start(
            whole,
            encode_tensors({"w": torch.ones(2)}),
            num_rounds=1,
            evaluate_fn=lambda _, arrays: seen.append(decode_tensors(arrays)["w"]),
        )
    assert [w.tolist() for w in seen] == [[1.0, 1.0]] * 2
    assert "the model stays as it is" in caplog.text


def _infinite(message: Message, context) -> Message:
    reply = _whole(message, context)
    arrays = decode_tensors(reply.content["arrays"])
    reply.content["arrays"] = encode_tensors({k: v / 0.0 for k, v in arrays.items()})
    return reply


def _whole(message: Message, context) -> Message:
    del context
    arrays = message.content.array_records["arrays"]
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)
