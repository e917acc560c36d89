"""Command lines of other programs in documents are accepted by them; README's program trains."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import click
import pytest
import torch
import typer
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from collapipe_flwr.federation.local_grid import LocalGrid
from tests.docs import pages
from tests.docs.pages import ROOT

_TARGET = re.compile(r"make ([a-z-]+)$")


class _Accepted(Exception):
    """The command line was read to its end."""


def program(name: str) -> Any:
    """What the console script of an installed distribution calls."""
    (script,) = entry_points(group="console_scripts", name=name)
    return script.load()


def test_make_has_every_target_that_is_named() -> None:
    shown = {argument for _, found in pages.commands("make") for argument in found}
    inline = {match[1] for said in pages.inline() if (match := _TARGET.match(said.text))}
    targets = {word for word in shown | inline if not re.match(r"-|\w+=", word)}
    assert {"demo", "test", "docs"} <= targets
    command = ["make", "--dry-run", *sorted(targets)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["flower-superlink", "flower-supernode"])
def test_flower_s_programs_accept_every_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    read = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *arguments: Any) -> argparse.Namespace:
        read(parser, *arguments)
        raise _Accepted

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    found = pages.commands(name)
    assert len(found) > 1
    for said, arguments in found:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises((_Accepted, SystemExit)) as ended:
            program(name)()
        assert ended.type is _Accepted, f"{said.page}: {arguments}: {capsys.readouterr().err}"


@pytest.mark.filterwarnings("ignore:The 'is_flag' and 'flag_value':DeprecationWarning")  # of flwr
def test_flwr_accepts_every_command_line() -> None:
    tree = typer.main.get_command(program("flwr"))
    assert isinstance(tree, click.Group)
    run = [found for found in pages.commands("flwr") if found[1][0] == "run"]
    assert len(run) > 8
    for said, (command, *arguments) in run:
        try:
            tree.commands[command].make_context(command, arguments)
        except click.UsageError as error:
            pytest.fail(f"{said.page}: flwr {command} {arguments}: {error.message}")


def test_the_program_in_the_readme_trains_as_it_stands() -> None:
    """What it asks of a user's project is a model, an app, loaders and a metric."""
    (block,) = (b for b in pages.blocks("python") if b.page == ROOT / "README.md")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=9, intermediate_size=24, **sizes))
    tokens = torch.randint(9, (8, 128))
    batch = {"input_ids": tokens, "attention_mask": tokens > 0, "labels": tokens[:, 0] % 2}
    app = ClientApp()

    def accuracy(logits: Tensor, labels: Tensor) -> float:
        return float((logits.argmax(-1) == labels).float().mean())

    names: dict[str, Any] = {
        "__name__": "client_app",
        "FedAvg": FedAvg,
        "torch": torch,
        "model": model,
        "app": app,
        "trainloader": [batch],
        "testloader": [batch],
        "accuracy": accuracy,
    }
    exec(compile(ast.parse(block.text), str(block.page), "exec"), names)
    start = ArrayRecord(model.state_dict())
    grid = LocalGrid({1: app, 2: app})
    result = names["strategy"].start(grid, start, num_rounds=1)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] > 0
    changed = result.arrays.to_torch_state_dict()
    assert all((changed[key] != old).any() for key, old in model.named_parameters())
