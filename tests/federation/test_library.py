"""A user's own model and loader through clusters of devices, against plain training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod, message_size_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg, FedProx
from torch.utils.data import DataLoader, IterableDataset
from transformers import BertConfig, BertForSequenceClassification

from collapipe_flwr import (
    Cluster,
    CollaPipe,
    ConfigError,
    DataError,
    LearningSettings,
    LocalGrid,
    RunError,
    ScheduleError,
    SplitModel,
)
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.loader import LoaderBatches
from collapipe_flwr.core.domain import PlannedExecution
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.client.cluster import mods_of
from collapipe_flwr.federation.client.pipeline_round import MOST_PREDICTED, _cut_steps
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.round import RoundRecord
from collapipe_flwr.federation.split import PersonalArrays
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.transport.methods import FrameLimits

CLASSES, BATCH, LENGTH, EXAMPLES = 3, 8, 6, 20
NODES = (1, 2)
RULE = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CONFIG = BertConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=CLASSES,
)
Weights = dict[str, torch.Tensor]
collapipe = partial(CollaPipe, scheduler="uniform")  # for what any plan shows


def new_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(CONFIG)


def loader(node: int, batch_size: int = BATCH) -> DataLoader:
    generator = torch.Generator().manual_seed(node)
    ids = torch.randint(0, 40, (EXAMPLES, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    rows = [
        {"input_ids": i, "attention_mask": m, "labels": i[0] % CLASSES}
        for i, m in zip(ids, mask, strict=True)
    ]
    return DataLoader(rows, batch_size=batch_size)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, key: str) -> None:
    """Equal but for sums that are added up in another order."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6, msg=lambda m: f"{key}: {m}")


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float((logits.argmax(-1) == labels).float().mean())


def client(
    mods: list | None = None, batch_size: int = BATCH, epochs: int = 1, **described
) -> ClientApp:
    app = ClientApp(mods=mods)
    cluster = Cluster(app, **described)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return cluster.train(message, context, loader(context.node_id, batch_size), epochs=epochs)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return cluster.evaluate(message, context, loader(context.node_id + 10), metrics=accuracy)

    return app


def plain_client(mods: list | None = None, optimizer=RULE) -> ClientApp:
    """What a Flower project does without CollaPipe."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = new_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loss = train_plainly(model, context.node_id, optimizer)
        metrics = MetricRecord({"train_loss": loss, "num-examples": EXAMPLES})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def train_plainly(model: torch.nn.Module, node: int, optimizer=RULE) -> float:
    model.train()
    rule, losses = optimizer(model.parameters()), []
    for batch in loader(node):
        loss = model(**batch).loss
        loss.backward()
        rule.step()
        rule.zero_grad()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def grid(app: Callable[[], ClientApp] | ClientApp, nodes=NODES) -> LocalGrid:
    make = app if isinstance(app, ClientApp) else None
    places = {n: {"partition-id": i} for i, n in enumerate(nodes)}
    return LocalGrid({n: make or app() for n in nodes}, node_configs=places)


def run(strategy, app, rounds: int = 2, **options) -> tuple[Weights, object]:
    start = ArrayRecord(new_model().state_dict())
    result = strategy.start(grid=grid(app), initial_arrays=start, num_rounds=rounds, **options)
    return result.arrays.to_torch_state_dict(), result


@pytest.fixture(scope="module", autouse=True)
def a_profile_is_made_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collapipe_flwr.federation.planner.profile_model", cache(profile_model))
        yield


@cache
def split(**options) -> SplitModel:
    return SplitModel(new_model(), batch_size=BATCH, length=LENGTH, **options)


def test_the_result_is_that_of_plain_flower() -> None:
    found, result = run(CollaPipe(FedAvg(), model=split(), optimizer=RULE), client())
    expected, plain = run(FedAvg(fraction_evaluate=0.0), plain_client())
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert_close(found[key], tensor, key)
    losses = [dict(r.train_metrics_clientapp[2])["train_loss"] for r in (result, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_clusters_seconds_count_from_its_order_to_its_reply(monkeypatch) -> None:
    read, missing, slow_s = Cluster._weights, ThreadFleet.find_missing, 0.4

    def slowly_read(cluster: Cluster, arrays: ArrayRecord) -> Weights:
        time.sleep(slow_s)
        return read(cluster, arrays)

    def slowly_missing(fleet: ThreadFleet, device_ids: list[str]) -> frozenset[str]:
        time.sleep(slow_s)
        return missing(fleet, device_ids)

    records: list[RoundRecord] = []
    strategy = collapipe(FedAvg(), model=split(), optimizer=RULE, on_round=records.append)
    monkeypatch.setattr(Cluster, "_weights", slowly_read)
    monkeypatch.setattr(ThreadFleet, "find_missing", slowly_missing)
    run(strategy, client(), rounds=1)
    assert all(told.wall_s > 2 * slow_s for told in records[0].telemetry.values())


def test_metrics_are_those_of_all_examples_at_once() -> None:
    found, result = run(collapipe(FedAvg(), model=split(), optimizer=RULE), client(), rounds=1)
    model = new_model()
    model.load_state_dict(found)
    model.train(False)
    scores, losses = [], []
    for node in NODES:
        with torch.no_grad():
            batches = [(model(**batch), batch) for batch in loader(node + 10)]
        logits = torch.cat([output.logits for output, _ in batches])
        scores.append(accuracy(logits, torch.cat([batch["labels"] for _, batch in batches])))
        losses.append(sum(float(o.loss) * len(b["labels"]) for o, b in batches) / EXAMPLES)
    told = dict(result.evaluate_metrics_clientapp[1])
    assert told["accuracy"] == pytest.approx(sum(scores) / 2)
    assert told["eval_loss"] == pytest.approx(sum(losses) / 2, abs=1e-6)


def test_an_optimizer_that_is_kept_goes_on_in_the_next_round() -> None:
    learning = LearningSettings(keep_optimizer=True)
    alone = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy = collapipe(alone, model=split(), optimizer=RULE, learning=learning)
    start = ArrayRecord(new_model().state_dict())
    result = strategy.start(grid=grid(client(), NODES[:1]), initial_arrays=start, num_rounds=3)
    expected = new_model()
    rule = RULE(expected.parameters())
    for _ in range(3):
        train_plainly(expected, NODES[0], lambda _: rule)
    for key, tensor in result.arrays.to_torch_state_dict().items():
        assert_close(tensor, expected.state_dict()[key], key)


def test_a_batch_of_another_size_than_planned_is_refused() -> None:
    strategy = collapipe(FedAvg(), model=split(), on_total_failure="raise")
    with pytest.raises(RunError, match=r"batch of 5 examples.*planned for batches of 8"):
        run(strategy, client(batch_size=5), rounds=1)


def test_texts_that_are_longer_than_planned_are_refused() -> None:
    short = SplitModel(new_model(), batch_size=BATCH, length=LENGTH - 1)
    strategy = CollaPipe(FedAvg(), model=short, on_total_failure="raise")
    with pytest.raises(RunError, match=r"'input_ids' of shape \(6,\).*planned for \(5,\): give"):
        run(strategy, client(), rounds=1)


def test_examples_of_a_plain_module_that_are_larger_than_planned_are_refused() -> None:
    fits, long = ((torch.zeros(2, length, 3), torch.zeros(2).long()) for length in (4, 5))
    planned = {"inputs": (4, 3)}
    assert len(list(LoaderBatches(loader=[fits], planned=planned).cut_steps(2, 1))) == 1
    with pytest.raises(DataError, match=r"'inputs' of shape \(5, 3\).*planned for \(4, 3\)"):
        list(LoaderBatches(loader=[long], planned=planned).cut_steps(2, 1))


class Stream(IterableDataset):
    """Examples whose number nobody knows."""

    def __iter__(self) -> Iterator[object]:
        return iter(loader(1).dataset)


def test_a_stream_of_examples_is_a_loader() -> None:
    batches = LoaderBatches(loader=DataLoader(Stream(), batch_size=BATCH), epochs=2)
    assert batches.count_batches(BATCH) == 0
    assert [len(step) for step in batches.cut_steps(BATCH, 2)] == [4, 4, 2] * 2
    assert batches.examples == EXAMPLES


def test_a_message_is_consumed_once_and_a_second_use_says_so() -> None:
    app, refusals = ClientApp(), []
    cluster = Cluster(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply = cluster.train(message, context, loader(context.node_id))
        with pytest.raises(RunError) as caught:
            cluster.evaluate(message, context, loader(context.node_id))
        refusals.append(str(caught.value))
        return reply

    run(collapipe(FedAvg(fraction_evaluate=0.0), model=split(), optimizer=RULE), app, rounds=1)
    assert len(refusals) == len(NODES)
    assert all("consumed by an earlier call" in refusal for refusal in refusals)


class PerWorker(IterableDataset):
    """Every worker yields five examples of its own."""

    def __iter__(self) -> Iterator[object]:
        return iter([(torch.zeros(3), 0)] * 5)


def test_smaller_batches_between_workers_are_refused_with_what_to_change() -> None:
    steps = LoaderBatches(loader=DataLoader(PerWorker(), batch_size=4, num_workers=2)).cut_steps(
        4, 2
    )
    with pytest.raises(DataError, match=r"a batch of 1 .*IterableDataset.* drop_last=True or num_"):
        list(steps)
    dropping = DataLoader(PerWorker(), batch_size=4, num_workers=2, drop_last=True)
    assert len(list(LoaderBatches(loader=dropping).cut_steps(4, 2))) == 2


def test_a_large_test_batch_is_tested_in_parts_whose_predictions_fit_into_a_frame() -> None:
    parts = list(_cut_steps([[{"x": torch.tensor(n)} for n in range(70)], [{}] * 3], 64))
    assert [len(part) for part in parts] == [32, 32, 6, 3]
    assert [int(one["x"]) for part in parts[:3] for one in part] == list(range(70))
    assert FrameLimits().tensors > MOST_PREDICTED
    assert [len(part) for part in _cut_steps([[{}] * 5], planned=2)] == [2, 2, 1]


def test_a_data_set_is_no_loader() -> None:
    batches = LoaderBatches(loader=[(torch.zeros(3), torch.tensor(1))])
    with pytest.raises(DataError, match=r"'labels' of a batch is a single number.* a DataLoader"):
        list(batches.cut_steps(BATCH, 2))


@pytest.mark.parametrize(("loader", "epoch"), [([], 1), (iter(loader(1)), 2)])
def test_an_epoch_without_a_batch_is_refused(loader, epoch: int) -> None:
    batches = LoaderBatches(loader=loader, epochs=2)
    with pytest.raises(DataError, match=f"no batch in epoch {epoch}"):
        list(batches.cut_steps(BATCH, BATCH))


def test_personal_arrays_survive_a_checkpoint() -> None:
    model = encode_tensors({"head": torch.ones(2, dtype=torch.bfloat16), "body": torch.ones(2)})
    kept, resumed = PersonalArrays(), PersonalArrays()
    kept.keep("shed", model, {"head"})
    resumed.load(kept.dump())
    first = encode_tensors({"head": torch.zeros(2, dtype=torch.bfloat16), "body": torch.zeros(2)})
    found = decode_tensors(resumed.insert("shed", first))
    assert torch.equal(found["head"], torch.ones(2, dtype=torch.bfloat16))
    assert torch.equal(found["body"], torch.zeros(2))


def test_plans_choose_only_the_cut() -> None:
    records = []
    run(collapipe(FedAvg(), model=split(), on_round=records.append), client(), rounds=1)
    cuts = {c.micro_batch_size * c.micro_batches for r in records for c in r.plan.clusters}
    assert cuts == {BATCH}
    assert all(len(r.plan.clusters) == len(NODES) for r in records)
    first, *lines = str(records[0]).splitlines()
    assert first.startswith("round 1: train_loss ")
    assert [line.split(":")[0] for line in lines] == ["  cluster-0", "  cluster-1"]


def test_a_server_without_a_model_to_split_is_told() -> None:
    with pytest.raises(RunError, match=r"needs a model to split"):
        run(CollaPipe(FedAvg(), on_total_failure="raise"), client(), rounds=1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"model": torch.nn.Linear(1, 1)},
            r"must be a SplitModel, got Linear: .*SplitModel\(model",
        ),
        ({"optimizer": RULE}, "optimizer has no effect without a model to split"),
        ({"edge": "127.0.0.1:50062"}, "edge has no effect"),
        ({"model": split(), "learning": 3}, "learning must be LearningSettings, .* got 3"),
        ({"model": split(), "edge": 5}, "edge must be an address, .* got 5"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        CollaPipe(FedAvg(), **options)


@pytest.mark.parametrize(
    ("lost", "wrong"),
    [("bert.pooler.dense.bias", "lacks bert.pooler.dense.bias"), ("", "holds more")],
)
def test_a_global_model_that_is_another_one_is_refused(lost: str, wrong: str) -> None:
    state = {**new_model().state_dict(), "more": torch.zeros(1)}
    state.pop(lost, None)
    strategy = collapipe(FedAvg(), model=split())
    with pytest.raises(RunError, match=f"{wrong}, unlike the model to split"):
        strategy.start(grid=grid(client()), initial_arrays=ArrayRecord(state))


def test_described_memories_count() -> None:
    strategy = CollaPipe(FedAvg(), model=split())
    with pytest.raises(ScheduleError, match=r"no plan fits its memories .*add a device"):
        run(strategy, client(memory_share=1e-6), rounds=1)


def test_described_devices_hold_the_blocks() -> None:
    records = []
    strategy = collapipe(FedAvg(), model=split(), on_round=records.append)
    run(strategy, client(devices="phone;jetson-nano"), rounds=1)
    held = {c.cluster_id: [s.device_id for s in c.segments] for c in records[0].plan.clusters}
    assert held == {"cluster-0": ["cluster-0/1-phone"], "cluster-1": ["cluster-1/1-jetson-nano"]}


def test_a_clipping_mod_bounds_the_whole_update() -> None:
    norm, before = 0.1, new_model().state_dict()
    inner = DifferentialPrivacyClientSideFixedClipping(
        FedAvg(fraction_evaluate=0.0),
        noise_multiplier=0.0,
        clipping_norm=norm,
        num_sampled_clients=2,
    )
    found, _ = run(
        collapipe(inner, model=split(), optimizer=RULE), client([fixedclipping_mod]), rounds=1
    )
    moved = sum(float((found[k] - v).float().square().sum()) for k, v in before.items()) ** 0.5
    assert 0.01 < moved <= norm * (1 + 1e-5)
    expected, _ = run(deepcopy(inner), plain_client([fixedclipping_mod]), rounds=1)
    for key, tensor in expected.items():
        assert_close(found[key], tensor, key)


def test_mods_of_a_train_function_with_a_name_count() -> None:
    app = client()
    assert mods_of(app) == []

    @app.train("mine", mods=[fixedclipping_mod, message_size_mod])
    def train(message: Message, context: Context) -> Message:
        raise NotImplementedError

    assert mods_of(app) == [fixedclipping_mod]


def test_a_personal_head_is_trained_and_never_mixed() -> None:
    strategy = collapipe(
        FedAvg(fraction_evaluate=0.0), model=split(personal=("classifier",)), optimizer=RULE
    )
    found, _ = run(strategy, client(), rounds=2)
    first = new_model().state_dict()
    assert torch.equal(found["classifier.weight"], first["classifier.weight"])
    expected = _with_personal_heads(rounds=2)
    for key, tensor in expected.items():
        if not key.startswith("classifier"):
            assert_close(found[key], tensor, key)


def _with_personal_heads(rounds: int) -> Weights:
    shared = new_model().state_dict()
    heads: dict[int, Weights] = {node: {} for node in NODES}
    for _ in range(rounds):
        ends = []
        for node in NODES:
            model = new_model()
            model.load_state_dict({**shared, **heads[node]})
            train_plainly(model, node)
            ends.append({k: t.clone() for k, t in model.state_dict().items()})
            heads[node] = {k: t for k, t in ends[-1].items() if k.startswith("classifier")}
        shared = {k: (ends[0][k] + ends[1][k]) / 2 for k in ends[0]}
    return shared


def test_clusters_that_did_not_train_evaluate() -> None:
    inner = FedAvg(fraction_train=0.5, fraction_evaluate=1.0, min_train_nodes=1)
    _, result = run(collapipe(inner, model=split(), optimizer=RULE), client(), rounds=2)
    assert set(result.evaluate_metrics_clientapp) == {1, 2}


def test_the_learning_rate_of_the_train_config_is_followed() -> None:
    config = ConfigRecord({"lr": 0.1})
    found, _ = run(
        collapipe(
            FedAvg(fraction_evaluate=0.0),
            model=split(),
            optimizer=partial(torch.optim.SGD, lr=1.0, momentum=0.9),
        ),
        client(),
        rounds=1,
        train_config=config,
    )
    expected, _ = run(FedAvg(fraction_evaluate=0.0), plain_client(), rounds=1)
    for key, tensor in expected.items():
        assert_close(found[key], tensor, key)


def test_the_proximal_term_of_fedprox_is_exact() -> None:
    prox = partial(FedProx, proximal_mu=5.0, fraction_evaluate=0.0)
    found, _ = run(collapipe(prox(), model=split(), optimizer=RULE), client(), rounds=1)
    without, _ = run(
        collapipe(FedAvg(fraction_evaluate=0.0), model=split(), optimizer=RULE), client(), rounds=1
    )
    ends = []
    for node in NODES:
        model = new_model()
        first = [p.detach().clone() for p in model.parameters()]
        rule = RULE(model.parameters())
        for batch in loader(node):
            pairs = zip(model.parameters(), first, strict=True)
            term = sum(((p - q) ** 2).sum() for p, q in pairs)
            (model(**batch).loss + 2.5 * term).backward()
            rule.step()
            rule.zero_grad()
        ends.append(model.state_dict())
    for key in found:
        assert_close(found[key], (ends[0][key] + ends[1][key]) / 2, key)
    assert any(not torch.allclose(found[k], without[k], atol=1e-4) for k in found)


def test_an_evaluation_without_weight_does_not_spoil_the_average() -> None:
    def weightless(message: Message, context: Context, call_next: Callable) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == "evaluate":
            reply.content["metrics"]["num-examples"] = float("nan")
        return reply

    apps = {1: client(), 2: client(mods=[weightless])}
    places = {node: {"partition-id": node} for node in apps}
    result = collapipe(FedAvg(), model=split(), optimizer=RULE).start(
        grid=LocalGrid(apps, node_configs=places),
        initial_arrays=ArrayRecord(new_model().state_dict()),
        num_rounds=1,
    )
    assert 0 < result.evaluate_metrics_clientapp[1]["eval_loss"] < 10


def test_a_client_without_a_cluster_is_named(caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    strategy = collapipe(FedAvg(), model=split())
    with pytest.raises(RunError, match=r"none of 2 nodes describes a cluster"):
        run(strategy, plain_client(), rounds=1)
    assert "make a collapipe_flwr.Cluster from the ClientApp" in caplog.text


class Taking(FedAvg):
    """Trains on one node, 2 in the ``odd`` round and else 1, and evaluates on 2."""

    def __init__(self, odd: int) -> None:
        super().__init__(fraction_evaluate=0.5, min_train_nodes=1)
        self.odd = odd

    def configure_train(self, server_round, arrays, config, grid) -> list[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        wanted = 2 if server_round == self.odd else 1
        return [message for message in messages if message.metadata.dst_node_id == wanted]

    def configure_evaluate(self, server_round, arrays, config, grid) -> list[Message]:
        messages = list(super().configure_evaluate(server_round, arrays, config, grid))
        return [message for message in messages if message.metadata.dst_node_id == 2]


@pytest.mark.parametrize("odd", [1, 2])
def test_a_round_whose_only_node_describes_no_cluster_has_failed(odd: int) -> None:
    here = LocalGrid({1: client(), 2: plain_client()}, node_configs={1: {"partition-id": 0}})
    records: list[RoundRecord] = []
    start = ArrayRecord(new_model().state_dict())
    strategy = collapipe(Taking(odd), model=split(), optimizer=RULE, on_round=records.append)
    strategy.start(here, start, num_rounds=2)
    assert [len(record.telemetry) for record in records] == ([0, 1] if odd == 1 else [1, 0])
    assert records[odd - 1].failures == {
        "node-2": "it does not describe its cluster: look into its log"
    }
    raising = collapipe(Taking(odd), model=split(), optimizer=RULE, on_total_failure="raise")
    with pytest.raises(
        RunError, match=f"round {odd}: all 1 clusters failed, first node-2: it does"
    ):
        raising.start(here, start, num_rounds=2)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_plan_says_how_it_is_executed(recompute: bool) -> None:
    planning = Planning(settings=SchedulerConfig(schedule="gpipe"))
    learning = LearningSettings(execution=Execution(recompute=recompute))
    asked = PlannedExecution(schedule="gpipe", recompute=recompute)
    for scheduler in (planning, make_scheduler("dssda", planning.settings)):
        records: list[RoundRecord] = []
        wrapped = partial(CollaPipe, FedAvg(), model=split(), optimizer=RULE, learning=learning)
        run(wrapped(scheduler=scheduler, on_round=records.append), client(), rounds=1)
        (record,) = records
        assert record.plan is not None
        assert {cluster.execution for cluster in record.plan.clusters} == {asked}
