"""Own models on real daemons, which import their code by name."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.config.cluster_file import parse_cluster
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.imports import allow
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.models.splitter import Splitter
from tests.closeness import assert_near, near
from tests.cluster.daemon_processes import ROOT, Daemon, running
from tests.laws.test_daemons_equal_whole import Cluster
from tests.models import own_models
from tests.models import test_own_models as heads
from tests.models import test_split_model as modules
from tests.rounds import Cut

FILE = """
id = "A"
control-unit = { name = "cu" }
device = [{ name = "d0", address = "d0:1" }, { name = "d1", address = "d1:1" }]
edge = { address = "edge:1" }
"""
IMPORT = ("--import", "tests.models.own_models")
CUT = Cut(stops=(2, 4), micro_batches=(6,))


@pytest.fixture(autouse=True)
def importable() -> None:
    """This process is the control unit, which imports the code of its models as well."""
    allow("tests.models.own_models")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "a.toml").write_text(FILE)
    values = tomllib.loads(FILE)
    options = ("--cluster", str(folder / "a.toml"))
    daemons = [Daemon("device", "--name", f"d{i}", *options, *IMPORT) for i in range(2)]
    daemons.append(Daemon("edge", *options, *IMPORT))
    with running(*daemons) as (*devices, edge):
        for table, daemon in zip(values["device"], devices, strict=True):
            table["address"] = daemon.address
        values["edge"] = {"address": edge.address}
        yield Cluster(config=parse_cluster(values, folder), daemons=(*devices, edge))


def order(weights: dict[str, torch.Tensor]) -> TrainingOrder:
    learning = LearningSettings(optimizer=heads.CALM, deadline_s=20.0)
    return TrainingOrder(plan=CUT.plan(), weights=weights, learning=learning)


def test_a_torch_module_learns_on_daemons(cluster: Cluster) -> None:
    torch.manual_seed(3)
    model = own_models.BatchNormed()
    split_model = SplitModel(model, example=modules.features(0))
    weights = {key: tensor.clone() for key, tensor in split_model.weights().items()}
    steps = [modules.features(seed) for seed in range(3)]
    result = cluster.train(split_model.splitter, order(weights), [[s] for s in steps])
    losses = heads.by_hand(model, modules.hand_loss, steps, adamw=True)
    assert result.losses == near(tuple(losses))
    split = split_model.splitter.whole_state(dict(result.weights))
    floats = {k: t for k, t in model.state_dict().items() if t.is_floating_point()}
    assert_near({key: split[key] for key in floats}, floats)
    assert int(split["blocks.3.norm.num_batches_tracked"]) == 3


def test_an_own_head_with_its_loss_learns_on_daemons(cluster: Cluster) -> None:
    spec, kind, loss_of = heads.CASES["own head, named loss"]
    model = kind(own_models.bert_config())
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    steps = [heads.batch(seed) for seed in range(2)]
    result = cluster.train(Splitter(spec), order(weights), [[step] for step in steps])
    assert result.losses == near(tuple(heads.by_hand(model, loss_of, steps, adamw=True)))
    assert_near(dict(result.weights), dict(model.state_dict()))


def test_daemons_import_nothing_else(cluster: Cluster) -> None:
    path = f"{heads.__name__}:two_heads_loss"
    spec = heads.replace(heads.CASES["own forward"][0], loss=path)
    heads.imports.allow(heads.__name__)
    splitter = Splitter(spec)
    with pytest.raises(LinkError, match=f"start it with --import {heads.__name__}"):
        cluster.train(splitter, order(splitter.initial_weights(seed=0)), [[heads.batch(0)]])


def test_a_daemon_says_which_module_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "collapipe_flwr.cli", "device", "--listen", "127.0.0.1:0"]
    ended = subprocess.run(
        [*command, "--import", "nowhere.to_be_found"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = " ".join((ended.stdout + ended.stderr).split())
    assert ended.returncode != 0 and "Traceback" not in said
    assert "--import nowhere.to_be_found: the module cannot be imported" in said
