"""Whatever one member sends, it fails in that round, and the others go on with the same bits."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st

from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.errors import LinkError, ProtocolError
from collapipe_flwr.core.json_codec import to_json
from collapipe_flwr.core.measurements import ClusterMeasurement
from collapipe_flwr.federation import border
from collapipe_flwr.federation.arrays import encode_tensors
from collapipe_flwr.federation.late import RoundDeadline
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.planner import KnownClusters
from collapipe_flwr.federation.records import (
    ARRAYS,
    EXAMPLES,
    METRICS,
    Sent,
    write_profile,
    write_telemetry,
)
from collapipe_flwr.federation.round import RoundPlan
from collapipe_flwr.federation.strategy import CollaPipe
from tests.federation.split_clusters import FixedPlanner, cluster_plan, model, trainer, wrapped
from tests.federation.test_array_format import MALFORMED, NUMPY
from tests.federation.test_outcomes import NAME, machines, told
from tests.federation.test_planner import NODES, closed, rounds, weights
from tests.thorough import examples

TELEMETRY, PROFILE = "collapipe.telemetry", "collapipe.profile"
NODES_OF_RUN = (1, 2, 3)
LIAR = 3
Lie = Callable[[RecordDict], object]

FEW, MANY = (settings(max_examples=count, derandomize=True) for count in (8, 400))

# ---------------------------------------------------------------- what one member may send

NO_NUMBERS = [math.nan, math.inf, -math.inf, -1.0, 1e300, 10**400, -(2**70), True, None, "1", [1.0]]
NO_NAMES = ["", "a\nb", "\x1b[31m", "\u202egnp", "\ud800", "n" * 5000, "\0", 7, None]
NO_COUNTS = [-1, 2**64, 2.5, math.nan, True, None, "1", [], {}]
TELLING = {
    "wall_s": NO_NUMBERS,
    "examples": NO_COUNTS,
    "fresh_examples": NO_COUNTS,
    "cluster_id": [*NO_NAMES, "c1"],
    "losses": [[1e300], [-math.inf], [True], 1.0, "1"],
    "reports": [[{"name": name}] for name in NO_NAMES] + [[{"name": "a"}, {"name": "a"}]],
    "edge": [{"name": "edge", "steps": -1}, []],
    "moved": [{"sent_bytes": -1}, {"sent_bytes": 2**60}],
    "incidents": [["x" * 10_000], ["\x1b]0;title\x07"], "text", [1]],
    "absent": [[name] for name in NO_NAMES],
    "quarantined": [{"d1": "\x1b[2J"}, {"d\n1": "why"}, {"\ud800": "why"}, ["d1"]],
    "no such key": [1],
}
REPORT = {
    **dict.fromkeys(("forward_s", "backward_s", "optimizer_s", "wait_s"), NO_NUMBERS),
    **dict.fromkeys(("steps", "micro_batches", "peak_tensor_bytes"), NO_COUNTS),
    "energy_j": [x for x in NO_NUMBERS if x is not None],
    "small_square_norm": [1e300, -1e300, True, None],
    "big_squares": [-1.0, math.nan, math.inf, True, None],
    "sent_down": [{"bytes": -1}, {"sending_s": math.nan}, {"notes": [[0, 0, 0.0, 0]] * 600}],
    "spans": [[{"work": "play", "step": 1, "micro_batch": 1, "start_s": 0.0, "stop_s": 1.0}]],
}
DEVICE = {
    "device_id": NO_NAMES,
    "kind": NO_NAMES[1:],
    **dict.fromkeys(("speed_flop_per_s", "energy_per_flop_j"), NO_NUMBERS),
    **dict.fromkeys(("tx_power_max_w", "overhead_s"), NO_NUMBERS),
    "memory_bytes": NO_COUNTS,
    "energy_budget_j": [math.nan, -1.0, True, None],
    "d2d_bandwidth_hz": [0.0, *(x for x in NO_NUMBERS if x is not None)],
}
CLUSTER = {
    "cluster_id": [*NO_NAMES, "..", "a/b", "Dächer", "😀", "a b"],
    "examples": [*NO_COUNTS, 0],
    "devices": [[], {}, None],
    "d2d_bandwidth_hz": [0.0, *NO_NUMBERS],
    "server_rate_bit_per_s": [0.0, *NO_NUMBERS],
    "link_codec": ["zip", 1],
    "update_codec": ["zip", "", 1],
    "link_rates": [[{"ends": ["a", "b"], "bit_per_s": x}] for x in (0.0, math.nan, 1e300)],
    "overhead_s": NO_NUMBERS,
}


def changes(table: dict[str, list]) -> st.SearchStrategy[dict[str, object]]:
    """One key, with one of the values that it cannot have."""
    pairs = [{key: value} for key, values in table.items() for value in values]
    return st.sampled_from(pairs)


def telling(change: dict[str, object]) -> Lie:
    """Change the telemetry of a reply."""

    def lie(content: RecordDict) -> None:
        found = json.loads(content[TELEMETRY]["json"])
        content[TELEMETRY]["json"] = json.dumps({**found, **change})

    return lie


def saying(text: object) -> Lie:
    def lie(content: RecordDict) -> None:
        content[TELEMETRY] = ConfigRecord({"json": text})

    return lie


def reporting(change: dict[str, object]) -> Lie:
    return telling({"reports": [{"name": "c3/cu"}, {"name": "c3/d1", **change}]})


def describing(of_device: dict[str, object], of_cluster: dict[str, object]) -> Lie:
    return telling({"profile": profile_json(of_device, of_cluster, "c3")})


def profile_json(of_device, of_cluster, name: str) -> dict[str, object]:
    found = json.loads(to_json(replace(one_cluster(), cluster_id=name)))
    found["devices"][0] |= of_device
    return {**found, **of_cluster}


def replanning(change: dict[str, object]) -> Lie:
    return telling({"replanned": {**json.loads(to_json(cluster_plan("c3"))), **change}})


def measuring(change: dict[str, object]) -> Lie:
    def lie(content: RecordDict) -> None:
        content[METRICS] = MetricRecord({**content[METRICS], **change})

    return lie


def without(record: str, key: str = "") -> Lie:
    def lie(content: RecordDict) -> None:
        content.pop(record) if not key else content[record].pop(key)

    return lie


def adding(name: str, record) -> Lie:
    return lambda content: content.__setitem__(name, record)


def sending(key: str, array: Array) -> Lie:
    return lambda content: content[ARRAYS].__setitem__(key, array)


PLANS = {
    "segments": [[], [{"device_id": "c3/d1", "first_block": 1, "stop_block": 2}]],
    "micro_batches": [1, 10**9, 0, -1],
    "micro_batch_size": [1, 2**62],
    "local_steps": [0, 6],
    "warmup_depth": [[], [1], [0, 0, 0]],
    "tx_power_w": [{}, {"c9/d1": 0.1}, {"c3/d1": math.nan}, {"c3/d1": 1e300}],
    "gradient_power_w": [{}, {"c3/d1": -1.0}],
    "memory_bytes": [{}, {"c3/d1": -1}],
    "latency_s": [math.nan, math.inf, -1.0],
    "bandwidth_hz": [0.0, math.nan, math.inf],
    "hops": [[{}], [{"codec": "zip"}] * 2, [{"forward_bit_per_s": math.nan}] * 2],
}
ASKED = Sent(node_id=11, cluster_id=NAME, message=None, content_bytes=0)
ODD = Array("float32", (1,), NUMPY, MALFORMED["36 TiB"])
SCRIPT = "\x1b[2J\n\u202e"
LIES: dict[str, st.SearchStrategy[Lie]] = {
    "telemetry": changes(TELLING).map(telling),
    "text": st.sampled_from(["", "{", "[" * 100_000, "null", b"{}", 5, '{"a":1,"a":2}', "7" * 5000])
    .filter(lambda text: text is not None)
    .map(saying),
    "report": changes(REPORT).map(reporting),
    "device": changes(DEVICE).map(lambda change: describing(change, {})),
    "profile": changes(CLUSTER).map(lambda change: describing({}, change)),
    "plan": changes(PLANS).map(replanning),
    "metrics": st.sampled_from(
        [
            *(measuring({"loss": x}) for x in (math.nan, math.inf, 1e300, 10**40, [], [1.0])),
            *(measuring({EXAMPLES: x}) for x in (math.nan, math.inf, -1, 0, 10**13, 10**400, [1])),
            *(measuring({key: 1.0}) for key in ("other", SCRIPT, "k" * 2000)),
            without(METRICS),
            without(METRICS, "loss"),
            without(METRICS, EXAMPLES),
            adding("more", MetricRecord({"loss": 1.0})),
            adding(METRICS, ArrayRecord()),
        ]
    ),
    "arrays": st.sampled_from(
        [
            *(
                sending("embed.weight", Array("float32", (3, 2), NUMPY, data))
                for data in MALFORMED.values()
            ),
            sending("embed.weight", encode_tensors({"": torch.full((3, 2), math.nan)})[""]),
            sending("embed.weight", encode_tensors({"": torch.ones(2, 3)})[""]),
            sending("embed.weight", encode_tensors({"": torch.ones(3, 2).long()})[""]),
            sending("another", ODD),
            sending(SCRIPT, ODD),
            without(ARRAYS),
            without(ARRAYS, "embed.weight"),
            adding("more", ArrayRecord({"embed.weight": ODD})),
            adding(ARRAYS, MetricRecord({"embed.weight": 1.0})),
        ]
    ),
}

# ---------------------------------------------------------------- a run with one such member


def lying(train, lie: Lie):
    def answer(message: Message, context) -> Message:
        reply = train(message, context)
        lie(reply.content)
        return reply

    return answer


def absent(*_: object) -> Message:
    raise LinkError("it is not there")


def split_run(answer) -> tuple[dict[str, bytes], list]:
    """Two rounds of three clusters of one split model, the third of which is ``answer``."""
    records = []
    honest = {n: trainer(0.1 * n, 10 * n) for n in NODES_OF_RUN if n != LIAR}
    grid = LocalGrid({**honest, LIAR: answer})
    strategy = wrapped(FixedPlanner("c1", "c2", "c3"), records)
    arrays = strategy.start(grid, encode_tensors(model()), num_rounds=2).arrays
    return {key: array.data for key, array in arrays.items()}, records


@cache
def bits_without_it() -> dict[str, bytes]:
    return split_run(absent)[0]


def assert_the_others_go_on(lie: Lie) -> None:
    found, records = split_run(lying(trainer(0.3, 30), lie))
    assert found == bits_without_it()
    for record in records:
        assert record.failures.keys() == {"c3"}
        sentence = record.failures["c3"]
        assert "cluster c3" in sentence and sentence.isprintable() and len(sentence) < 1000
        assert set(record.telemetry) == {"c1", "c2"}


@FEW
@pytest.mark.parametrize("kind", LIES)
@given(st.data())
def test_the_others_go_on_with_the_bits_of_a_run_without_it(kind: str, data: st.DataObject) -> None:
    assert_the_others_go_on(data.draw(LIES[kind]))


@pytest.mark.slow
@MANY
@pytest.mark.parametrize("kind", LIES)
@given(st.data())
def test_so_they_do_beside_every_liar(kind: str, data: st.DataObject) -> None:
    assert_the_others_go_on(data.draw(LIES[kind]))


@pytest.mark.parametrize("whole", [LIES["metrics"], LIES["arrays"]])
@given(st.data())
@FEW
def test_so_it_is_with_clients_that_train_whole_models(whole, data: st.DataObject) -> None:
    lie = data.draw(whole)

    def client(step: float):
        def train(message: Message, _: object) -> Message:
            sent = message.content[ARRAYS]
            moved = encode_tensors({k: torch.tensor(a.numpy()) + step for k, a in sent.items()})
            metrics = MetricRecord({"loss": step, EXAMPLES: int(10 * step)})
            return Message(RecordDict({ARRAYS: moved, METRICS: metrics}), reply_to=message)

        return train

    def run(third) -> tuple[dict[str, bytes], list]:
        records: list = []
        strategy = CollaPipe(FedAvg(fraction_evaluate=0.0), on_round=records.append)
        grid = LocalGrid({1: client(1.0), 2: client(2.0), 3: third})
        start = encode_tensors({"embed.weight": torch.ones(3, 2)})
        final = strategy.start(grid, start, num_rounds=2).arrays
        return {key: array.data for key, array in final.items()}, records

    found, records = run(lying(client(3.0), lie))
    if records[0].failures:  # a weight of 0, and integers, are no nonsense here
        assert records[0].failures.keys() == {"node-3"}
        assert found == run(absent)[0]


@FEW
@given(st.text(max_size=50) | st.just("\x1b[31m" * 50_000) | st.just("'>" + " " * 50_000))
def test_the_words_of_an_error_are_one_printable_line(words: str) -> None:
    def failing(message: Message, _: object) -> Message:
        return Message(Error(7, words), reply_to=message)

    found, records = split_run(failing)
    assert found == bits_without_it()
    assert records[0].failures["c3"].isprintable() and len(records[0].failures["c3"]) <= 400


@pytest.mark.parametrize("split", [True, False])
def test_an_evaluation_that_cannot_be_averaged_is_left_out(split: bool, caplog) -> None:
    def tester(loss: object, **more: object):
        def answer(message: Message, context) -> Message:
            if message.metadata.message_type == "train":
                if not split:
                    content = RecordDict(
                        {ARRAYS: message.content[ARRAYS], METRICS: MetricRecord({EXAMPLES: 1})}
                    )
                    return Message(content, reply_to=message)
                return trained[message.metadata.dst_node_id](message, context)
            metrics = MetricRecord({"eval_loss": loss, EXAMPLES: 10, **more})
            return Message(RecordDict({METRICS: metrics}), reply_to=message)

        return answer

    start = encode_tensors(model())
    trained = {n: trainer(0.1, 10) for n in NODES_OF_RUN}
    lies = [tester(math.nan), tester([1.0]), tester(1.0, other=1.0), tester(5.0, **{EXAMPLES: -1})]
    for lie in lies:
        grid = LocalGrid({1: tester(1.0), 2: tester(2.0), LIAR: lie})
        if split:
            strategy = wrapped(FixedPlanner("c1", "c2", "c3"), [], FedAvg())
        else:
            strategy = CollaPipe(FedAvg())
            start = encode_tensors({"w": torch.ones(2)})
        result = strategy.start(grid, start, num_rounds=1)
        assert result.evaluate_metrics_clientapp[1]["eval_loss"] == 1.5
        assert "is unusable" in caplog.text
        caplog.clear()


def test_of_two_clusters_that_disagree_the_first_counts_and_the_round_goes_on() -> None:
    records = []
    other = lying(trainer(0.2, 20), measuring({"other": 1.0}))
    grid = LocalGrid({1: trainer(0.1, 10), 2: other})
    strategy = wrapped(FixedPlanner("c1", "c2"), records)
    strategy.start(grid, encode_tensors(model()), num_rounds=1)
    assert records[0].failures.keys() == {"c2"}
    assert "unlike the others" in records[0].failures["c2"]


def test_of_two_replies_of_one_cluster_the_first_counts() -> None:
    class Doubling(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            return [*replies, *replies[-1:]]

    records = []
    grid = Doubling({1: trainer(1.0, 10), 2: trainer(3.0, 10)})
    strategy = wrapped(FixedPlanner("c1", "c2"), records)
    final = strategy.start(grid, encode_tensors(model()), num_rounds=1).arrays
    assert final["embed.weight"].numpy()[0, 0] == 3.0
    assert not records[0].failures


@pytest.mark.parametrize("claimed", [1e13, -1.0, math.nan, math.inf])
def test_whatever_weighs_replies_no_claim_is_without_bound(claimed: float) -> None:
    def client(step: float, weight: float):
        def train(message: Message, _: object) -> Message:
            moved = encode_tensors({"w": torch.ones(2) + step})
            metrics = MetricRecord({"tokens": weight})
            return Message(RecordDict({ARRAYS: moved, METRICS: metrics}), reply_to=message)

        return train

    records: list = []
    inner = FedAvg(fraction_evaluate=0.0, weighted_by_key="tokens")
    strategy = CollaPipe(inner, on_round=records.append)
    grid = LocalGrid({1: client(1.0, 40.0), 2: client(3.0, claimed)})
    final = strategy.start(grid, encode_tensors({"w": torch.ones(2)}), num_rounds=1).arrays
    assert final["w"].numpy().tolist() == [2.0, 2.0]
    assert "tokens" in records[0].failures["node-2"]


def test_nobody_tells_how_long_another_cluster_took() -> None:
    clock = RoundDeadline(slack=2.0)
    liar = lying(trainer(0.1, 10), telling({"cluster_id": "c1", "wall_s": 1e9}))
    grid = LocalGrid({1: trainer(0.1, 10), 2: liar})
    strategy = wrapped(FixedPlanner("c1", "c2"), [])
    sent = strategy.configure_train(1, encode_tensors(model()), ConfigRecord(), grid)
    clock.exchange(grid, list(sent), timeout=None)
    strategy.close()
    assert json.loads(clock.dump().text)["ratios"] == {"c1": [0.1]}


# ---------------------------------------------------------------- descriptions


@cache
def one_cluster() -> ClusterProfile:
    return rounds().world.clusters[0]


@examples(20, 80, derandomize=True)
@given(
    changes(DEVICE).map(lambda change: (change, {}))
    | changes(CLUSTER).map(lambda change: ({}, change))
)
def test_a_description_that_cannot_be_is_one_sentence(change) -> None:
    content = write_profile(one_cluster())
    content[PROFILE]["json"] = json.dumps(profile_json(*change, NAME))
    with pytest.raises(ProtocolError) as refused:
        border.described(content)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 600


# ---------------------------------------------------------------- planning with what is possible

EXTREMES = [0, 1, 0.5, 1e-9, 1.0, 2.5, 1e3, 1e6, 1e9, 1e18, 1e24, 1e30, 2**31, 2**40, 2**53, []]


def leaves(value: object, path: tuple = ()) -> list[tuple]:
    """The places of all numbers and lists in JSON."""
    if isinstance(value, dict):
        return [p for key, each in value.items() for p in leaves(each, (*path, key))]
    if isinstance(value, list):
        return [path, *(p for i, each in enumerate(value) for p in leaves(each, (*path, i)))]
    return [] if isinstance(value, str | bool) else [path]


def changed(value: object, path: tuple, new: object) -> object:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


def _with_edges(planner: KnownClusters) -> ClusterProfile:
    """The first cluster, which names two edges now."""
    edges = [replace(planner.world.edge, id=name, name=name) for name in ("near", "far")]
    return replace(planner.world.clusters[0], edge=edges[0], other_edges=(edges[1],))


def machine_reply(planner: KnownClusters) -> tuple[RoundPlan, RecordDict]:
    planned = planner.plan(1, list(NODES))
    plan = planned.cluster_plan(11)
    measured = replace(told(plan, planner), profile=_with_edges(planner), edge=None, replanned=plan)
    return planned, write_telemetry(RecordDict({}), measured)


def possible(content: RecordDict, planned: RoundPlan, rng: random.Random) -> ClusterMeasurement:
    """Telemetry with extremes in some places, all of which the border lets in."""
    record = content[TELEMETRY]
    _, taken = border.trained(content, ASKED, planned.cluster_plan(11), EXAMPLES)
    for path in rng.sample(paths := leaves(json.loads(record["json"])), k=min(8, len(paths))):
        before = record["json"]
        with suppress(IndexError, KeyError, TypeError):  # another change took the place away
            record["json"] = json.dumps(changed(json.loads(before), path, rng.choice(EXTREMES)))
        try:
            _, taken = border.trained(content, ASKED, planned.cluster_plan(11), EXAMPLES)
        except ProtocolError:
            record["json"] = before
    assert taken is not None
    return taken


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 100))]
)
def test_rounds_are_planned_with_every_number_that_the_border_lets_in(seed: int) -> None:
    planner = machines()
    planned, content = machine_reply(planner)
    measured = possible(content, planned, random.Random(seed))
    done = closed(planned, *NODES.values(), after=weights(1.0))
    done.telemetry = {NAME: replace(measured, edge=told(planned.cluster_plan(11), machines()).edge)}
    outcome = planner.settle(done)
    assert all(math.isfinite(cluster.latency_s) for cluster in outcome.clusters)
    after = planner.plan(2, list(NODES))
    assert after.cluster_plan(12) is not None, "the other cluster has its plan"
    planner.load(planner.dump())
