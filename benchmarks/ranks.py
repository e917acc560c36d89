"""What averaging products of adapters changes, beside averaging factors, for equal and own ranks.

    python benchmarks/ranks.py docs/results/ranks.json
    python benchmarks/ranks.py --table docs/results/ranks.json     # what was measured

A small Llama is trained to answer each symbol by another one, as one permutation has it. Then three
clusters adapt it to a second permutation, of which each sees a third, and two examples of ten are
of any third: only what all clusters learn together answers everything. FedAvg, as many rounds and
examples for every way; the loss is that of answers to all symbols.

Ways: ``factors`` averages A and B. ``products`` is `lora.aggregate=products`. ``padded`` is what
others do about ranks: a cluster trains the first r rows and columns of the global factors, and
zeros stand for those that it lacks in the means (HetLoRA; Cho et al., 2024; without its pruning
and its weights).
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from collapipe_flwr import Cluster, CollaPipe, LocalGrid, SplitModel
from collapipe_flwr.federation.records import flower_round

SEEDS = (21, 22, 23, 24, 25)
ALPHA, RATE, ROUNDS, STEPS, BATCH = 16, 2e-3, 6, 15, 16
EQUAL, OWN = (16, 16, 16), (4, 8, 16)
WAYS = {
    "factors": EQUAL,
    "products": EQUAL,
    "padded, own ranks": OWN,
    "products, own ranks": OWN,
}
SYMBOLS, LENGTH, ANY = 48, 6, 0.2  # the share of examples with any symbols
_SEPARATOR = SYMBOLS
_FIRST = 600  # steps of the base
Batch = dict[str, Tensor]
Rule = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.0)


def draw(seed: int, task: int, own: int | None, count: int) -> Iterator[Batch]:
    """Batches of questions and answers; a cluster has a third of the symbols of its ``own``."""
    random = torch.Generator().manual_seed(1000 * seed + 100 * task + (9 if own is None else own))
    answers = torch.randperm(SYMBOLS, generator=torch.Generator().manual_seed(10 * seed + task))
    third = SYMBOLS // len(OWN)
    for _ in range(count):
        ids = torch.randint(0, SYMBOLS, (BATCH, LENGTH), generator=random)
        if own is not None:
            at_home = torch.rand(BATCH, 1, generator=random) >= ANY
            ids = torch.where(at_home, ids % third + own * third, ids)
        middle = torch.full((BATCH, 1), _SEPARATOR)
        tokens = torch.cat([ids, middle, answers[ids]], dim=1)
        labels = tokens.clone()
        labels[:, : LENGTH + 1] = -100
        yield {"input_ids": tokens, "labels": labels}


def make_base(seed: int, folder: str) -> None:
    """Train the whole model on the first permutation, and save it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=SYMBOLS + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * LENGTH + 1,
    )
    model = LlamaForCausalLM(config).train()
    rule = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in draw(seed, 0, None, _FIRST):
        model(**batch).loss.backward()
        rule.step()
        rule.zero_grad()
    model.save_pretrained(folder)


def adapt(folder: str, rank: int) -> Any:
    """The base with adapters on all linear layers."""
    torch.manual_seed(0)
    lora = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules="all-linear")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)


def cut(state: dict[str, Tensor], rank: int, most: int) -> dict[str, Tensor]:
    """The first ``rank`` of ``most`` rows of A and columns of B, scaled to add as much."""
    share = rank / most  # of alpha / rank: that of the global adapters is so much smaller
    return {k: v[:, :rank] * share if "lora_B" in k else v[:rank] for k, v in state.items()}


def pad(state: dict[str, Tensor], rank: int, most: int) -> dict[str, Tensor]:
    """The inverse, with zeros for what a cluster lacks."""
    found = {}
    for key, value in state.items():
        if "lora_B" in key:
            found[key] = torch.cat(
                [value * most / rank, value.new_zeros(len(value), most - rank)], 1
            )
        else:
            found[key] = torch.cat([value, value.new_zeros(most - rank, value.shape[1])])
    return found


def padded_client(folder: str, seed: int, ranks: Sequence[int]) -> ClientApp:
    """A client of plain Flower and peft."""
    app, most = ClientApp(), max(ranks)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        own = context.node_id - 1
        model = adapt(folder, ranks[own])
        state = message.content.array_records["arrays"].to_torch_state_dict()
        set_peft_model_state_dict(model, cut(state, ranks[own], most))
        rule = Rule(p for p in model.train().parameters() if p.requires_grad)
        for batch in _batches(message, seed, own):
            model(**batch).loss.backward()
            rule.step()
            rule.zero_grad()
        arrays = ArrayRecord(pad(get_peft_model_state_dict(model), ranks[own], most))
        metrics = MetricRecord({"num-examples": STEPS * BATCH})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def cluster_client(seed: int) -> ClientApp:
    app = ClientApp()
    cluster = Cluster(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return cluster.train(message, context, _batches(message, seed, context.node_id - 1))

    return app


def _batches(message: Message, seed: int, own: int) -> list[Batch]:
    """A round's batches, the same for all ways."""
    return list(draw(seed, 1, own, flower_round(message.content) * STEPS))[-STEPS:]


def measure(way: str, seed: int, folder: str) -> dict[str, Any]:
    """The loss and the share of right answers after every round."""
    ranks, most = WAYS[way], max(WAYS[way])
    model, test = adapt(folder, most), list(draw(seed, 1, None, 8))
    start, curve, errors = get_peft_model_state_dict(model), list[float](), list[float]()
    accuracy = 0.0

    def judge(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        del server_round
        nonlocal accuracy
        set_peft_model_state_dict(model, arrays.to_torch_state_dict())
        with torch.no_grad():
            found = [model.eval()(**batch) for batch in test]
        curve.append(mean(float(each.loss) for each in found))
        answers = [each.logits[:, LENGTH:-1].argmax(-1) for each in found]
        right = [a == b["labels"][:, LENGTH + 1 :] for a, b in zip(answers, test, strict=True)]
        accuracy = float(torch.cat(right).float().mean())
        return MetricRecord({"loss": curve[-1]})

    inner: Any = FedAvg(fraction_evaluate=0.0)
    if way.startswith("padded"):
        app, strategy = padded_client(folder, seed, ranks), inner
    else:
        split = SplitModel(
            model, batch_size=BATCH, length=2 * LENGTH + 1, aggregate=way.partition(",")[0]
        )
        app, strategy = (
            cluster_client(seed),
            CollaPipe(
                inner,
                model=split,
                optimizer=Rule,
                scheduler="uniform",
                on_round=lambda record: errors.append(record.adapter_error or 0.0),
            ),
        )
    nodes = {n + 1: {"partition-id": n, "lora-rank": rank} for n, rank in enumerate(ranks)}
    grid = LocalGrid(dict.fromkeys(nodes, app), node_configs=nodes)
    strategy.start(
        grid=grid, initial_arrays=ArrayRecord(start), num_rounds=ROUNDS, evaluate_fn=judge
    )
    return {"loss": curve, "accuracy": accuracy, "adapter_error": errors}


def main(target: Path) -> None:
    """Measure all ways with every seed, and write them."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            make_base(seed, folder)
            for way, found in runs.items():
                found.append(measure(way, seed, folder))
                print(seed, way, f"{found[-1]['loss'][-1]:.4f}", flush=True)
    settings = {"alpha": ALPHA, "learning_rate": RATE, "rounds": ROUNDS, "steps": STEPS}
    told = {**settings, "batch": BATCH, "seeds": SEEDS, "ranks": WAYS, "runs": runs}
    target.write_text(json.dumps(told, indent=1) + "\n")


def table(source: Path) -> str:
    """What was measured, as Markdown."""
    told = json.loads(source.read_text())
    head = "| averaged | ranks | loss | right answers | largest error of a round |"
    lines = [head, "|---|---|---:|---:|---:|"]
    for way, runs in told["runs"].items():
        losses, right = ([run[k] for run in runs] for k in ("loss", "accuracy"))
        final = [curve[-1] for curve in losses]
        errors = [error for run in runs for error in run["adapter_error"]]
        ranks = "/".join(map(str, told["ranks"][way]))
        worst = f"{100 * max(errors):.1f} %" if way.startswith("products") else ""
        lines.append(
            f"| {way.partition(',')[0]} | {ranks} | {mean(final):.3f} ± {stdev(final):.3f} | "
            f"{100 * mean(right):.1f} ± {100 * stdev(right):.1f} % | {worst} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(table(Path(sys.argv[2])))
    else:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        main(Path(sys.argv[1]))
