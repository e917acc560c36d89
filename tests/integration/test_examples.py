"""The quickstart example: plain and wrapped end with the same bits, in process and in Flower."""

from __future__ import annotations

import difflib
import importlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedProx,
    Krum,
    Strategy,
)

from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.run.launcher import build_environment, start_superlink
from collapipe_flwr.federation.strategy import CollaPipe

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart-strategy"
SOURCE = EXAMPLE / "quickstart"
NODES = 4
INNER: dict[str, Callable[[], Strategy]] = {
    "fedavg": FedAvg,
    "fedprox": lambda: FedProx(proximal_mu=0.1),
    "fedadam": FedAdam,
    "krum": lambda: Krum(num_malicious_nodes=1),
    "dp": lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.3, 1.0, NODES),
}


@pytest.fixture
def quickstart(monkeypatch) -> Iterator[Callable[[str], object]]:
    """Imports modules of the example as Flower would, and forgets them afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield lambda name: importlib.import_module(f"quickstart.{name}")
    for name in [n for n in sys.modules if n.split(".")[0] == "quickstart"]:
        del sys.modules[name]


def train(quickstart, strategy: Strategy) -> dict[str, np.ndarray]:
    client, task = quickstart("client_app").app, quickstart("task")
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    net = task.Net()
    grid = LocalGrid(
        dict.fromkeys(range(1, NODES + 1), client),
        node_configs={n: {"partition-id": n - 1} for n in range(1, NODES + 1)},
        run_config={"local-epochs": 1, "learning-rate": 0.1},
    )
    result = strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=2)
    assert set(result.evaluate_metrics_clientapp[2]) == {"eval_loss", "eval_acc"}
    return {key: array.numpy() for key, array in result.arrays.items()}


@pytest.mark.parametrize("name", INNER)
def test_plain_and_wrapped_end_with_the_same_bits(quickstart, name):
    plain = train(quickstart, INNER[name]())
    wrapped = train(quickstart, CollaPipe(INNER[name]()))
    assert list(plain) == list(wrapped)
    for key, values in plain.items():
        assert values.dtype == wrapped[key].dtype
        assert values.tobytes() == wrapped[key].tobytes()


def test_wrapping_changes_two_lines_of_code():
    plain = (SOURCE / "server_app.py").read_text().splitlines()[1:]  # after the docstring
    wrapped = (SOURCE / "wrapped_server_app.py").read_text().splitlines()[1:]
    added = [line for line in difflib.ndiff(plain, wrapped) if line.startswith("+ ")]
    assert added == [
        "+ from collapipe_flwr import CollaPipe",
        "+     strategy = CollaPipe(FedAvg())",
    ]
    readme = (EXAMPLE / "README.md").read_text()
    assert all(line[2:] in readme for line in added)


def test_the_clients_know_nothing_of_collapipe():
    for name in ("task.py", "client_app.py", "server_app.py"):
        assert "import" in (text := (SOURCE / name).read_text())
        assert "collapipe_flwr" not in text


def test_the_example_learns(quickstart):
    client, task = quickstart("client_app").app, quickstart("task")
    torch.manual_seed(0)
    grid = LocalGrid(
        {1: client, 2: client},
        node_configs={1: {"partition-id": 0}, 2: {"partition-id": 1}},
        run_config={"local-epochs": 4, "learning-rate": 0.1},
    )
    start = ArrayRecord(task.Net().state_dict())
    result = CollaPipe(FedAvg()).start(grid, start, num_rounds=8)
    first, last = result.evaluate_metrics_clientapp[1], result.evaluate_metrics_clientapp[8]
    assert last["eval_acc"] > max(0.8, first["eval_acc"])


@pytest.mark.slow
def test_flower_itself_runs_both_and_saves_the_same_bits(tmp_path):
    """Two real `flwr run`s on a private SuperLink (about a minute)."""
    models = {}
    for server_app in ("server_app", "wrapped_server_app"):
        project = tmp_path / server_app
        output = tmp_path / f"{server_app}.pt"
        copy_example(project, server_app)
        env = build_environment(tmp_path)
        with start_superlink(project, env):
            flwr = Path(sys.executable).parent / "flwr"
            command = [str(flwr), "run", ".", "--stream", "--run-config", f'output="{output}"']
            subprocess.run(command, cwd=project, env=env, check=True, timeout=240)
        models[server_app] = torch.load(output, weights_only=True)
    plain, wrapped = models.values()
    assert list(plain) == list(wrapped)
    assert all(torch.equal(plain[key], wrapped[key]) for key in plain)


def copy_example(project: Path, server_app: str) -> None:
    (project / "quickstart").mkdir(parents=True)
    for source in SOURCE.glob("*.py"):
        (project / "quickstart" / source.name).write_text(source.read_text())
    text = (EXAMPLE / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(
        text.replace("quickstart.server_app", f"quickstart.{server_app}")
    )
