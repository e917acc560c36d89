"""A run with adapters: what travels, what it leaves behind, and that it equals plain FedAvg."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import Value
from collapipe_flwr.data.tasks import load_task
from tests.closeness import assert_near
from tests.integration.conftest import RunApp
from tests.rounds import largest_difference
from tests.tiny_tasks import task_values


def _with_adapter(plain: Any, run_dir: Path) -> Any:
    from peft import PeftModel  # slow; other workers do without

    return PeftModel.from_pretrained(plain, str(run_dir / "adapter")).eval()


ALONE: dict[str, Value] = {
    "clusters": 1,
    "world.memory-share": 1.0,
    "scheduler.micro-batch-sizes": "8",
    "scheduler.micro-batches": "1",
}


def _flower_bytes(run_dir: Path) -> int:
    summary = json.loads((run_dir / "summary.json").read_text())
    return int(summary["bytes"]["flower"])


ON_ADAPTERS: dict[str, Value] = {
    "model.overrides": "",
    "lora.rank": 4,
    "lora.target-modules": "q_proj,v_proj",
}


@pytest.mark.slow
def test_fedadam_moves_adapters_as_without_a_cut(run_app: RunApp) -> None:
    base = run_app({**ALONE, "run-name": "base", "num-server-rounds": 1})
    given = {"model.pretrained": str(base / "model"), "data.tokenizer": str(base / "model")}
    lora = {**ALONE, **ON_ADAPTERS, **given, "num-server-rounds": 3}
    runs = [
        run_app({**lora, "run-name": name, "strategy": "fedadam", "runtime": runtime})
        for name, runtime in (("split", "pipeline"), ("whole", "whole"))
    ]
    runs.append(run_app({**lora, "run-name": "plain"}))
    split, whole, plain = (load_file(r / "adapter/adapter_model.safetensors") for r in runs)
    assert set(split) == set(whole)
    assert largest_difference(split, whole) < 1e-5
    assert largest_difference(split, plain) > 1e-4  # not FedAvg's


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_alone_travel_and_learn_what_a_whole_client_learns(run_app: RunApp) -> None:
    base = run_app({**ALONE, "run-name": "base"})
    lora: dict[str, Value] = {
        **ALONE,
        "model.pretrained": str(base / "model"),
        "data.tokenizer": str(base / "model"),
        **ON_ADAPTERS,
    }
    split = run_app({**lora, "run-name": "split"})
    whole = run_app({**lora, "run-name": "whole", "runtime": "whole"})
    found, expected = (load_file(r / "adapter/adapter_model.safetensors") for r in (split, whole))
    assert_near(found, expected)
    assert any(value.abs().max() > 1e-4 for key, value in found.items() if "lora_B" in key)
    assert _flower_bytes(split) < _flower_bytes(base) / 4  # the rest are plans and settings

    tokenizer = AutoTokenizer.from_pretrained(split / "model")
    inputs = tokenizer(["forty two"], return_tensors="pt")
    merged = AutoModelForSeq2SeqLM.from_pretrained(split / "model").eval()
    plain = AutoModelForSeq2SeqLM.from_pretrained(base / "model")
    adapted = _with_adapter(plain, split)
    labels = {"labels": inputs["input_ids"]}
    torch.testing.assert_close(
        merged(**inputs, **labels).logits, adapted(**inputs, **labels).logits, rtol=1e-4, atol=1e-5
    )


def test_adapters_without_a_checkpoint_are_refused(run_app: RunApp) -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank is 4, but model\.pretrained is empty"):
        run_app({"lora.rank": 4})


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_the_metrics_are_those_of_what_peft_loads(
    run_app: RunApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line of the run, beside the published model with the run's adapter folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    alone = {**task_values("masked-lm", tmp_path), **ALONE, "data.train-examples": 0}
    base = str(run_app({**alone, "run-name": "base", "num-server-rounds": 1}) / "model")
    values: dict[str, Value] = {
        **alone,
        "data.task": "classification",
        "model.pretrained": base,
        "data.tokenizer": base,
        "data.test-examples": 9,
        "lora.rank": 4,
        "train.learning-rate": 0.01,
    }
    run_dir = run_app({**values, "run-name": "adapted", "evaluation.federated": True})
    *_, last = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())

    config = parse(values)
    task = load_task(config.seeded_data)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    adapted = _with_adapter(plain, run_dir)
    rows = task.test.to_list()
    batch = task.collate(rows)
    with torch.no_grad():
        output = adapted(**batch)
    guesses = task.read(output.logits.argmax(dim=-1), batch)
    found = task.score(task.count(guesses, task.references(rows, batch)))
    assert float(output.loss) == pytest.approx(last["metrics"]["loss"], rel=1e-5)
    assert found == {"accuracy": last["metrics"]["accuracy"]} == last["clusters_metrics"]
    assert float(output.loss) != pytest.approx(0.693, rel=1e-3)  # it has learnt something


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("strategy", ["fedavg", "fedadam"])
def test_clusters_of_ranks_4_8_and_16_train_one_model(run_app: RunApp, strategy: str) -> None:
    base = run_app({**ALONE, "run-name": "base", "num-server-rounds": 1})
    run_dir = run_app(
        {
            **ALONE,
            **ON_ADAPTERS,
            "run-name": "ranks",
            "clusters": 3,
            "strategy": strategy,
            "num-server-rounds": 2,
            "lora.rank": 16,
            "lora.aggregate": "products",
            "world.lora-ranks": "4,8,16",
            "links.updates": "int8" if strategy == "fedadam" else "fp32",
            "model.pretrained": str(base / "model"),
            "data.tokenizer": str(base / "model"),
        }
    )
    rounds = [*map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())]
    assert all(len(each["clusters"]) == 3 and each["failures"] == [] for each in rounds)
    assert all(0 <= each["adapter_error"] < 0.9 for each in rounds)
    found = load_file(run_dir / "adapter/adapter_model.safetensors")
    ranks = {value.shape["lora_B" in key] for key, value in found.items() if "lora_" in key}
    assert ranks == {16}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_plans_choose_ranks_of_a_grid(run_app: RunApp, caplog: pytest.LogCaptureFixture) -> None:
    base = run_app({**ALONE, "run-name": "base", "num-server-rounds": 1})
    with caplog.at_level("INFO", "flwr.collapipe"):
        run_dir = run_app(
            {
                **ALONE,
                **ON_ADAPTERS,
                "run-name": "grid",
                "clusters": 2,
                "num-server-rounds": 1,
                "world.lora-ranks": "",
                "lora.rank": 8,
                "lora.ranks": "2,4",
                "lora.aggregate": "products",
                "model.pretrained": str(base / "model"),
                "data.tokenizer": str(base / "model"),
            }
        )
    told = [r.getMessage() for r in caplog.records if "trains adapters of rank" in r.getMessage()]
    assert {line.rpartition(" ")[0].split()[1] for line in told} == {"cluster-0", "cluster-1"}
    assert all(line.endswith((" 2", " 4")) for line in told)
    found = load_file(run_dir / "adapter/adapter_model.safetensors")
    assert {v.shape["lora_B" in k] for k, v in found.items() if "lora_" in k} == {8}


def test_ranks_that_no_run_can_have_are_refused(run_app: RunApp) -> None:
    given: dict[str, Value] = {**ALONE, "lora.rank": 4, "model.pretrained": "somewhere"}
    with pytest.raises(ConfigError, match=r"world\.lora-ranks is 4,8 .*lora\.rank=8 and lora\.agg"):
        run_app({**given, "world.lora-ranks": "4,8", "lora.aggregate": "products"})
    with pytest.raises(ConfigError, match=r"world\.lora-ranks is 2 .*lora\.aggregate=products"):
        run_app({**given, "world.lora-ranks": "2"})
    with pytest.raises(ConfigError, match=r"lora\.ranks is 2,8 .*lora\.rank=8 and lora\.aggregate"):
        run_app({**given, "lora.ranks": "2,8"})
    unfit: dict[str, Value] = {
        "train.optimizer-state": "keep",
        "runtime": "whole",
        "lora.rank": 0,
        "links.updates": "top-k",
    }
    for key, value in unfit.items():
        with pytest.raises(ConfigError, match=f"{key} is .* beside lora.aggregate=products"):
            run_app({**given, "lora.aggregate": "products", key: value})
