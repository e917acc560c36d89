"""A PeftModel through clusters of devices: messages and results are those of the plain project."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from collapipe_flwr import Cluster, CollaPipe, LocalGrid, RunError, SplitModel
from tests.closeness import assert_near

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
RULE = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
BATCH, LENGTH, NODES = 4, 6, (1, 2)
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])


def new_model(base: str) -> Any:
    torch.manual_seed(0)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), LORA)


def loader(node: int) -> DataLoader:
    random = torch.Generator().manual_seed(node)
    ids = torch.randint(0, 40, (10, LENGTH), generator=random)
    rows = [{"input_ids": i, "labels": i.masked_fill(torch.arange(6) < 2, -100)} for i in ids]
    return DataLoader(rows, batch_size=BATCH)


def plain_client(base: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = new_model(base)
        set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
        rule = RULE(model.train().parameters())
        for batch in loader(context.node_id):
            model(**batch).loss.backward()
            rule.step()
            rule.zero_grad()
        arrays = ArrayRecord(get_peft_model_state_dict(model))
        content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 10})}
        return Message(RecordDict(content), reply_to=message)

    return app


def client(seen: list[ArrayRecord]) -> ClientApp:
    app = ClientApp()
    cluster = Cluster(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(message.content["arrays"].copy())
        reply = cluster.train(message, context, loader(context.node_id))
        seen.append(reply.content["arrays"])
        return reply

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return cluster.evaluate(message, context, loader(context.node_id))

    return app


def run(model: Any, strategy: Any, app: ClientApp, rounds: int = 2) -> dict[str, torch.Tensor]:
    grid = LocalGrid(
        dict.fromkeys(NODES, app), node_configs={n: {"partition-id": n - 1} for n in NODES}
    )
    start = ArrayRecord(get_peft_model_state_dict(model))
    return strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds)


class Watching(FedAvg):
    """A strategy that notes what it gets to average."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        self.seen += [list(reply.content["arrays"]) for reply in replies]
        return super().aggregate_train(server_round, replies)


def test_adapters_alone_travel_and_end_as_in_plain_flower(base: str) -> None:
    model, watching, seen = new_model(base), Watching(), list[ArrayRecord]()
    split = SplitModel(model, batch_size=BATCH, length=LENGTH)
    strategy = CollaPipe(watching, model=split, optimizer=RULE, scheduler="uniform")
    result = run(model, strategy, client(seen))
    expected = run(model, FedAvg(fraction_evaluate=0.0), plain_client(base))
    saved = get_peft_model_state_dict(model)
    assert len(seen) == len(NODES) * 2 * 2
    assert all(list(arrays) == list(saved) for arrays in (*seen, result.arrays))
    assert watching.seen == [list(saved)] * len(NODES) * 2
    adapters = sum(tensor.nbytes for tensor in saved.values())
    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    bytes_seen = {sum(array.numpy().nbytes for array in arrays.values()) for arrays in seen}
    assert bytes_seen == {adapters} and adapters < whole / 5
    found, wanted = (r.arrays.to_torch_state_dict() for r in (result, expected))
    assert_near(found, wanted)
    assert any(float((wanted[key] - saved[key]).abs().max()) > 1e-3 for key in saved)
    set_peft_model_state_dict(model, found)
    assert_near(get_peft_model_state_dict(model), wanted)


def test_whole_models_are_refused_with_the_call_that_gives_the_adapters(base: str) -> None:
    model = new_model(base)
    split = SplitModel(model, batch_size=BATCH, length=LENGTH)
    strategy = CollaPipe(FedAvg(), model=split, optimizer=RULE, scheduler="uniform")
    grid = LocalGrid(dict.fromkeys(NODES, client([])))
    with pytest.raises(RunError, match=r"ArrayRecord\(get_peft_model_state_dict\(model"):
        strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=1)
