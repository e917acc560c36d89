"""Coded updates: every strategy sees them decoded, and what a codec lost comes a round later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
)
from torch import Tensor

from collapipe_flwr import Cluster
from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.client.cluster import mods_of
from collapipe_flwr.federation.client.node_state import UPDATE_ERRORS
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.records import ARRAYS, EXAMPLES, METRICS, flower_round
from collapipe_flwr.federation.updates import decode_update, encode_update, is_coded
from tests.federation.split_clusters import CONSTANT, FixedPlanner, trainer, wrapped

# Of the norm of a change, at most.
LOSSY = {"fp16": 1e-3, "bf16": 4e-3, "int8": 1e-2, "int4": 0.13, "top-k": 0.8}
Model = dict[str, Tensor]
ALONE = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
Train = Callable[[Message, Context], Message]


def start() -> Model:
    """Arrays of several dtypes; the bfloat16 is coded in 4 bits alone."""
    return {
        "embed.weight": torch.ones(37, 11),
        CONSTANT: torch.tensor([0.1] * 20 + [float("-inf")]),
        "blocks.0.weight": torch.ones(64, 5, dtype=torch.bfloat16),
        "blocks.0.scale": torch.ones(1),
        "decoder.weight": torch.ones(3, 130, dtype=torch.float64),
        "decoder.steps": torch.tensor(4),
    }


def change(server_round: int, cluster: int = 1) -> Model:
    """What a cluster adds in a round."""
    generator = torch.Generator().manual_seed(100 * cluster + server_round)
    size = 0.1 / server_round
    return {
        key: size * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for key, tensor in start().items()
        if tensor.is_floating_point() and key != CONSTANT
    }


def train(message: Message, context: Context) -> Message:
    moved = decode_tensors(message.content[ARRAYS])
    for key, step in change(flower_round(message.content), context.node_id).items():
        moved[key] += step
    moved["decoder.steps"] += 1
    metrics = MetricRecord({"loss": 1.0, EXAMPLES: 10})
    content = RecordDict({ARRAYS: encode_tensors(moved), METRICS: metrics})
    return Message(content, reply_to=message)


def client(train: Train = train, *mods) -> ClientApp:
    app = ClientApp(mods=list(mods))
    Cluster(app)
    app.train()(train)
    return app


def run(updates: str, apps: Mapping[int, Train], rounds: int = 3, inner=None, **options):
    """The final model and the records of a run with these nodes."""
    records: list = []
    planner = FixedPlanner(*(f"c{node}" for node in apps))
    strategy = wrapped(planner, records, inner or averaging(), start(), updates)
    grid = LocalGrid(apps, **options)
    found = strategy.start(grid, encode_tensors(start()), num_rounds=rounds).arrays
    return decode_tensors(found), records


def averaging() -> FedAvg:
    """Flower's average, of one cluster, too."""
    return FedAvg(**ALONE)


def norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


@pytest.mark.parametrize("codec", LOSSY)
def test_a_decoded_change_is_the_true_one_up_to_the_codec(codec: str) -> None:
    sent, trained = encode_tensors(start()), start()
    for key, step in change(1).items():
        trained[key] += step
    reply = encode_tensors(trained)
    coded = {key: tensor for key, tensor in start().items() if is_coded(sent[key], codec)}
    errors = encode_update(reply, coded, {}, codec)
    assert set(errors) == coded.keys() - {CONSTANT}
    size = sum(len(reply[key].data) for key in errors)
    found = decode_tensors(decode_update(reply, sent, codec))
    assert list(found) == list(trained)
    for key, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (trained[key].dtype, trained[key].shape)
        if key in errors:
            lost = trained[key].double() - tensor.double()
            assert torch.allclose(lost, errors[key].double(), atol=1e-6)
            rounding = norm(start()[key]) * torch.finfo(tensor.dtype).eps
            assert norm(lost) <= LOSSY[codec] * norm(change(1)[key]) + rounding
        else:
            assert torch.equal(tensor, trained[key])
    assert norm(errors["embed.weight"]) > 0
    assert ("blocks.0.scale" in errors) == (codec == "bf16")
    assert size <= 0.6 * sum(trained[key].nbytes for key in errors)


def test_the_default_replies_with_the_bytes_that_the_app_made() -> None:
    kept: list[ArrayRecord] = []

    def keeping(message: Message, context: Context) -> Message:
        reply = train(message, context)
        kept.append(reply.content[ARRAYS])
        return reply

    app, seen = client(keeping), []

    def node(message: Message, context: Context) -> Message:
        reply = app(message, context)
        seen.append(reply.content[ARRAYS])
        return reply

    run("fp32", {1: node}, rounds=1)
    assert [seen[0][k].data for k in kept[0]] == [kept[0][k].data for k in kept[0]]


@pytest.mark.parametrize("codec", ["int8", "int4", "top-k"])
def test_decoded_changes_add_up_to_the_true_ones_less_the_last_error(codec: str) -> None:
    received: list[Model] = []

    class Watching(FedAvg):
        def aggregate_train(self, server_round, replies):
            received.extend(decode_tensors(reply.content[ARRAYS]) for reply in replies)
            return super().aggregate_train(server_round, replies)

    rounds, inner = 6, Watching(**ALONE)
    found, records = run(codec, {1: client()}, rounds, inner)
    assert not any(record.failures for record in records)
    assert set(received[0]) == set(start()) - {CONSTANT}
    key, truth = "embed.weight", sum(change(r)["embed.weight"] for r in range(1, rounds + 1))
    lost = norm(found[key] - start()[key] - truth)
    last = sum(LOSSY[codec] ** n * norm(change(rounds - n + 1)[key]) for n in range(1, rounds + 1))
    assert 0 < lost <= last + 1e-4
    assert torch.equal(found["blocks.0.scale"], received[-1]["blocks.0.scale"])
    assert int(found["decoder.steps"]) == 4 + rounds


def fates(updates: str, folder: Path | None, *how: str) -> tuple[Model, Model, Model]:
    """One cluster whose rounds end as told: the model, the true changes in it, the last error."""
    records: list = []
    strategy = wrapped(FixedPlanner("c1"), records, averaging(), start(), updates)
    config = {1: {} if folder is None else {"state-dir": str(folder)}}
    arrays, truth = encode_tensors(start()), dict.fromkeys(change(1), torch.zeros(()))
    grid, error = LocalGrid({1: client()}, node_configs=config), {}
    with strategy.running():
        for server_round, fate in enumerate(how, start=1):
            if fate == "restart":
                grid = LocalGrid({1: client()}, node_configs=config)
            config_record = ConfigRecord({"server-round": server_round})
            asked = strategy.configure_train(server_round, arrays, config_record, grid)
            replies = grid.send_and_receive(asked)
            if fate == "refused":
                replies[0].content[METRICS]["loss"] = float("nan")
            if fate == "lost":
                replies = []
            try:
                after, _ = strategy.aggregate_train(server_round, replies)
            except RunError:
                continue
            assert after is not None
            arrays = after
            truth = {key: truth[key] + step for key, step in change(server_round).items()}
    last = strategy.resumable["accepted"].progress("c1")
    kept = grid._contexts[1].state if folder is None else None
    if kept is not None:
        name = f"{UPDATE_ERRORS.name}.round-{last.last_round:06d}-{last.attempt:08x}"
        error = decode_tensors(kept[name])
    return decode_tensors(arrays), truth, error


@pytest.mark.parametrize("codec", ["int4", "top-k"])
def test_a_lost_or_refused_reply_counts_never_and_a_repeated_one_once(codec: str) -> None:
    found, truth, error = fates(codec, None, "done", "refused", "done", "lost", "lost", "done")
    assert set(error) == {"embed.weight", "blocks.0.weight", "decoder.weight"}
    for key in ("embed.weight", "decoder.weight"):
        lost = start()[key] + truth[key] - found[key]
        assert torch.allclose(lost.double(), error[key].double(), atol=2e-6) and norm(lost) > 0


@pytest.mark.parametrize("codec", ["int4", "top-k"])
def test_a_restarted_node_goes_on_with_the_error_of_its_last_reply(
    codec: str, tmp_path: Path
) -> None:
    whole, _, _ = fates(codec, tmp_path / "1", "done", "done", "done")
    again, _, _ = fates(codec, tmp_path / "2", "done", "restart", "restart")
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    without, truth, _ = fates(codec, None, "done", "restart", "restart")
    key = "embed.weight"
    assert norm(start()[key] + truth[key] - without[key]) > norm(
        start()[key] + truth[key] - whole[key]
    )


@pytest.mark.parametrize("size", [50, 100, 101, 255, 256, 257, 70_000])
@pytest.mark.parametrize("levels", [1, 3, 10**6])
def test_top_k_sends_the_largest_elements_and_of_equal_ones_the_first(
    size: int, levels: int
) -> None:
    generator = torch.Generator().manual_seed(size + levels)
    change = torch.randint(1 - levels, levels, (size,), generator=generator).float()
    sent, reply = encode_tensors({"a": torch.zeros(size)}), encode_tensors({"a": change})
    (error,) = encode_update(reply, decode_tensors(sent), {}, "top-k").values()
    found = decode_tensors(decode_update(reply, sent, "top-k"))["a"]
    kept = sorted(range(size), key=lambda n: (-abs(float(change[n])), n))[: -(-size // 4)]
    others = [n for n in range(size) if n not in set(kept)]
    assert not found[others].any()
    assert norm(found[kept] - change[kept]) <= 0.2 * norm(change[kept])
    assert torch.allclose(found + error, change, atol=1e-6 * levels)
    assert len(reply["a"].data) == -(-size // 8) + 34 * -(-len(kept) // 64)


@pytest.mark.parametrize("codec", ["int8", "int4", "top-k"])
@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_an_array_that_is_not_finite_travels_exactly(codec: str, odd: float) -> None:
    trained = {"a": torch.linspace(-1, 1, 300), "b": torch.linspace(-1, 1, 300)}
    trained["a"][7] = odd
    sent, reply = encode_tensors(dict.fromkeys("ab", torch.zeros(300))), encode_tensors(trained)
    assert set(encode_update(reply, decode_tensors(sent), {}, codec)) == {"b"}
    found = decode_tensors(decode_update(reply, sent, codec))
    assert torch.equal(found["a"].nan_to_num(5.0), trained["a"].nan_to_num(5.0))


def test_errors_of_another_model_count_for_nothing() -> None:
    sent = {"a": torch.ones(200)}
    codes = []
    for errors in ({}, {"a": torch.ones(100)}, {"b": torch.ones(200)}):
        reply = encode_tensors({"a": torch.linspace(0, 2, 200)})
        encode_update(reply, sent, errors, "int8")
        codes.append(reply["a"].data)
    assert codes[0] == codes[1] == codes[2]


def test_mods_see_whole_plain_updates_and_the_server_what_they_made_of_them() -> None:
    seen: list[tuple[Model, Model]] = []

    def halve(message: Message, context: Context, call_next: Train) -> Message:
        sent = decode_tensors(message.content[ARRAYS])
        reply = call_next(message, context)
        made = decode_tensors(reply.content[ARRAYS])
        seen.append((sent, made))
        half = {k: (sent[k] + t) / 2 if k == "embed.weight" else t for k, t in made.items()}
        reply.content[ARRAYS] = encode_tensors(half)
        return reply

    app = client(train, halve)
    assert mods_of(app) == [halve]
    found, records = run("int8", {1: app}, 1)
    assert not records[0].failures
    sent, made = seen[0]
    key = "embed.weight"
    assert torch.equal(sent[key], start()[key])
    assert torch.equal(made[key], start()[key] + change(1)[key])
    lost = norm(found[key] - start()[key] - change(1)[key] / 2)
    assert 0 < lost <= LOSSY["int8"] * norm(change(1)[key]) / 2


def test_the_bytes_of_a_round_are_those_of_the_codes() -> None:
    big = {"embed.weight": torch.randn(1000, 64), "decoder.weight": torch.randn(64, 64)}
    sizes = {}
    for codec in ("fp32", "int8", "int4", "top-k"):
        records: list = []
        strategy = wrapped(FixedPlanner("c1"), records, averaging(), big, codec)
        grid = LocalGrid({1: client(trainer(0.1, 10))})
        strategy.start(grid, encode_tensors(big), num_rounds=1)
        sizes[codec] = records[0].flower_bytes_received
    assert sizes["int8"] == pytest.approx(sizes["fp32"] * 0.258, rel=0.02)
    assert sizes["int4"] == pytest.approx(sizes["fp32"] * 0.133, rel=0.03)
    assert sizes["top-k"] < sizes["fp32"] * 0.07


HOSTILE: dict[str, Callable[[ArrayRecord], None]] = {
    "short": lambda r: forge(r, "embed.weight", data=r["embed.weight"].data[:-1]),
    "long": lambda r: forge(r, "embed.weight", data=r["embed.weight"].data + b"\0"),
    "empty": lambda r: forge(r, "embed.weight", data=b""),
    "shape": lambda r: forge(r, "embed.weight", shape=(11, 37)),
    "huge": lambda r: forge(r, "embed.weight", shape=(2**40, 2**20)),
    "negative": lambda r: forge(r, "embed.weight", shape=(-37, -11)),
    "dtype": lambda r: forge(r, "embed.weight", dtype="float64"),
    "unknown": lambda r: r.__setitem__("\x1b[2J", r["embed.weight"]),
    "integer": lambda r: forge(r, "decoder.steps", stype=r["embed.weight"].stype),
    "small": lambda r: forge(r, "blocks.0.scale", stype=r["embed.weight"].stype),
    "not finite": lambda r: forge(r, "embed.weight", data=b"\xff" * len(r["embed.weight"].data)),
}


def replace_code(record: ArrayRecord, start: int, *parts: int) -> None:
    """Write other bytes into the code of 407 elements: 51 bytes of bits, 2 tiles of values."""
    code = bytearray(record["embed.weight"].data)
    assert len(code) == 51 + 2 * (2 + 32)
    code[start : start + len(parts)] = bytes(parts)
    forge(record, "embed.weight", data=bytes(code))


HOSTILE_PLACES: dict[str, Callable[[ArrayRecord], None]] = {
    "all": lambda r: replace_code(r, 0, *[255] * 50, 254),
    "none": lambda r: replace_code(r, 0, *[0] * 51),
    "one more": lambda r: replace_code(r, 0, *[255] * 12, 254, *[0] * 38),
    "one fewer": lambda r: replace_code(r, 0, *[255] * 12, 248, *[0] * 38),
    "beyond the array": lambda r: replace_code(r, 0, *[255] * 12, 248, *[0] * 37, 1),
    "no number": lambda r: replace_code(r, 51, 0xC0, 0x7F),
    "infinite": lambda r: replace_code(r, 51, 0x80, 0x7F),
}


def forge(record: ArrayRecord, key: str, **parts) -> None:
    array = record[key]
    fields = {name: getattr(array, name) for name in ("dtype", "shape", "stype", "data")}
    record[key] = Array(**{**fields, **parts})


@pytest.mark.parametrize(
    ("codec", "harm"),
    [(codec, harm) for codec in ("int8", "top-k") for harm in HOSTILE.values()]
    + [("top-k", harm) for harm in HOSTILE_PLACES.values()],
    ids=[*HOSTILE, *(f"top-k {name}" for name in (*HOSTILE, *HOSTILE_PLACES))],
)
def test_a_forged_code_fails_its_cluster_alone(
    codec: str, harm: Callable[[ArrayRecord], None]
) -> None:
    app = client()

    def lying(message: Message, context: Context) -> Message:
        reply = app(message, context)
        harm(reply.content[ARRAYS])
        return reply

    def absent(*_: object) -> Message:
        raise ConfigError("it is not there")

    found, records = run(codec, {1: client(), 2: client(), 3: lying}, 2)
    wanted, _ = run(codec, {1: client(), 2: client(), 3: absent}, 2)
    assert all(torch.equal(found[key], wanted[key]) for key in found)
    for record in records:
        assert record.failures.keys() == {"c3"}
        sentence = record.failures["c3"]
        assert "cluster c3" in sentence and sentence.isprintable() and len(sentence) < 1000


def test_codes_that_were_not_asked_for_are_refused() -> None:
    def eager(message: Message, context: Context) -> Message:
        reply = train(message, context)
        encode_update(reply.content[ARRAYS], start(), {}, "int8")
        return reply

    _, records = run("fp32", {1: client(), 2: eager}, 1)
    assert records[0].failures.keys() == {"c2"}


def test_an_app_without_a_place_around_its_mods_is_told_what_to_do() -> None:
    app = ClientApp()
    holder: list[Cluster] = []
    app.train()(lambda message, context: holder[0].train(message, context, []))
    holder.append(Cluster(app))
    with pytest.raises(RunError, match=r"make the Cluster right after it"):
        run("int8", {1: app}, 1)


@pytest.mark.parametrize("around", [False, True])
def test_what_codes_would_deceive_is_refused(around: bool) -> None:
    strategy = wrapped(FixedPlanner("c1"), [], averaging(), start(), "int8")
    grid, first = LocalGrid({1: client()}), encode_tensors(start())
    if around:
        outer = DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1.0, 1)
        with pytest.raises(RunError, match="put that inside"):
            outer.start(grid, first, num_rounds=1)
    else:
        inner = DifferentialPrivacyClientSideFixedClipping(averaging(), 0.0, 1.0, 1)
        with pytest.raises(RunError, match="clip on the server's side"):
            wrapped(FixedPlanner("c1"), [], inner, start(), "int8").start(grid, first, 1)


@pytest.mark.parametrize("kind", [FedMedian, FedTrimmedAvg])
def test_top_k_is_refused_beside_what_takes_every_number_on_its_own(kind: type[FedAvg]) -> None:
    strategy = wrapped(FixedPlanner("c1"), [], kind(**ALONE), start(), "top-k")
    with pytest.raises(RunError, match="choose int8 or int4"):
        strategy.start(LocalGrid({1: client()}), encode_tensors(start()), num_rounds=1)


def test_a_server_that_clips_clips_decoded_updates() -> None:
    big = {"embed.weight": torch.ones(40, 10)}

    def far(message: Message, context: Context) -> Message:
        del context
        arrays = encode_tensors(
            {"embed.weight": torch.ones(40, 10) + change(1)["embed.weight"][0, 0]}
        )
        metrics = MetricRecord({"loss": 1.0, EXAMPLES: 10})
        return Message(RecordDict({ARRAYS: arrays, METRICS: metrics}), reply_to=message)

    inner = DifferentialPrivacyServerSideFixedClipping(
        averaging(),
        noise_multiplier=0.0,
        clipping_norm=0.5,
        num_sampled_clients=1,
    )
    strategy = wrapped(FixedPlanner("c1"), [], inner, big, "int4")
    found = strategy.start(LocalGrid({1: client(far)}), encode_tensors(big), num_rounds=1).arrays
    assert norm(decode_tensors(found)["embed.weight"] - 1) == pytest.approx(0.5, rel=1e-5)


def fit(updates: str, rounds: int = 40, rate: float = 0.8) -> float:
    """The distance from the optimum at which two clusters of least squares end."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(2, 400, 40, generator=generator)
    wanted = torch.randn(40, generator=generator)
    noise = torch.randn(2, 400, generator=generator)
    outputs = inputs @ wanted + noise
    both = torch.linalg.lstsq(inputs.reshape(-1, 40), outputs.reshape(-1, 1)).solution.flatten()

    def descend(message: Message, context: Context, scale: float) -> Message:
        weight = decode_tensors(message.content[ARRAYS])["embed.weight"]
        x, y = inputs[context.node_id - 1], outputs[context.node_id - 1]
        weight = weight - scale * x.T @ (x @ weight - y) / len(x)
        metrics = MetricRecord({"loss": 1.0, EXAMPLES: 10})
        content = RecordDict({ARRAYS: encode_tensors({"embed.weight": weight}), METRICS: metrics})
        return Message(content, reply_to=message)

    first = {"embed.weight": torch.zeros(40)}
    apps = {node: client(partial(descend, scale=rate)) for node in (1, 2)}
    strategy = wrapped(FixedPlanner("c1", "c2"), [], averaging(), first, updates)
    found = strategy.start(LocalGrid(apps), encode_tensors(first), num_rounds=rounds).arrays
    return norm(decode_tensors(found)["embed.weight"] - both)


def test_training_converges_as_with_exact_updates() -> None:
    exact, size = fit("fp32"), 40**0.5
    assert exact < 1e-3 * size
    for codec in ("int8", "int4"):
        assert fit(codec) < exact + 2e-3 * size * (10 if codec == "int4" else 1)


def test_top_k_converges_as_exact_updates_do_with_steps_of_its_share() -> None:
    """What is not sent is trained again in the next round: rates must be of the share's size."""
    exact, size = fit("fp32", 100, 0.25), 40**0.5
    assert exact < 1e-3 * size
    assert fit("top-k", 100, 0.25) < exact + 2e-2 * size
