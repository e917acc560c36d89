"""Every task by run-config alone: data in, a trained model and its metrics out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import CollaPipeError, ConfigError
from collapipe_flwr.core.keys import Value
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.language import CausalLM
from tests.integration.conftest import RunApp, events_of
from tests.thorough import few
from tests.tiny_tasks import (
    TASKS,
    own_cache,  # noqa: F401
    task_values,
)

METRICS = {
    "classification": {"accuracy"},
    "token-classification": {"f1", "accuracy"},
    "image-classification": {"accuracy"},
    "masked-lm": {"perplexity", "accuracy"},
    "causal-lm": {"perplexity", "accuracy"},
    "instruct": {"perplexity", "accuracy", "exact_match", "rouge1", "rouge2", "rougeL"},
    "translation": {"chrf", "bleu", "exact_match"},
    "summarisation": {"rouge1", "rouge2", "rougeL"},
}
QUICK: dict[str, Value] = {
    "data.train-examples": 0,
    "data.bucketing": "tokens",
    "train.examples-per-round": 6,
    "scheduler.micro-batch-sizes": "2",
    "scheduler.micro-batches": "2",
    "world.memory-share": 1.0,
}


@pytest.mark.parametrize("task", TASKS)
def test_a_run_of_every_task(run_app: RunApp, tmp_path: Path, task: str) -> None:
    run_dir = run_app({**task_values(task, tmp_path), **QUICK, "num-server-rounds": 1})
    found = events_of(run_dir)
    assert set(found[-1]["metrics"]) == {"loss", *METRICS[task]}
    assert found[-1]["loss"] > 0
    config = AutoConfig.from_pretrained(run_dir / "model")
    if task == "image-classification":
        assert config.image_size == 8
        processor = AutoImageProcessor.from_pretrained(run_dir / "model", backend="pil")
        assert dict(processor.size) == {"height": 8, "width": 8}
    else:
        assert len(AutoTokenizer.from_pretrained(run_dir / "model")) == config.vocab_size


@pytest.mark.parametrize("runtime", few(["pipeline", "whole"], 0))
def test_data_without_a_label_trains_nothing_and_has_no_loss(
    run_app: RunApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    plain = CausalLM.collate

    def collate(self: CausalLM, examples: Sequence[Example]) -> dict[str, Tensor]:
        batch = plain(self, examples)
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORED_LABEL)}

    monkeypatch.setattr(CausalLM, "collate", collate)
    values = {**task_values("causal-lm", tmp_path), **QUICK, "evaluation.federated": True}
    first, second = events_of(run_app({**values, "runtime": runtime}))
    assert first["loss"] == first["metrics"]["loss"] == 0.0
    # Replies that weigh nothing are left out of averages; a plain strategy averages them.
    assert first["clusters_loss"] == (None if runtime == "pipeline" else 0.0)
    assert not first["failures"] and not second["failures"]


def test_pictures_of_another_size_than_the_model(run_app: RunApp, tmp_path: Path) -> None:
    values = {**task_values("image-classification", tmp_path), **QUICK}
    values["model.overrides"] = f"{values['model.overrides']} image_size=16"
    with pytest.raises(CollaPipeError, match=r"set data\.image-size=16"):
        run_app(values)


def test_a_checkpoint_reads_its_own_tokens_or_refuses(run_app: RunApp, tmp_path: Path) -> None:
    values = {**task_values("classification", tmp_path), **QUICK, "num-server-rounds": 1}
    before = run_app(values) / "model"
    again = {**values, "model.pretrained": str(before), "run-name": "again"}
    with pytest.raises(ConfigError, match=r'data\.tokenizer is "train", but .* data\.tokenizer=/'):
        run_app(again)
    run_app({**again, "data.tokenizer": str(before)})


def test_a_head_that_the_checkpoint_lacks_is_told_once(
    run_app: RunApp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {**task_values("masked-lm", tmp_path), **QUICK, "num-server-rounds": 1}
    before = str(run_app(values) / "model")
    assert "drawn by chance" not in capsys.readouterr().out
    again = {**values, "model.pretrained": before, "data.tokenizer": before, "run-name": "again"}
    run_app({**again, "data.task": "classification"})
    told = capsys.readouterr()
    assert told.out.count(f"drawn by chance, because {before} has none that fit: 4 tensors") == 1
    assert "classifier.bias, classifier.weight" in told.out
    assert "LOAD REPORT" not in told.out + told.err
    run_app({**again, "run-name": "same head"})
    assert "drawn by chance" not in capsys.readouterr().out
