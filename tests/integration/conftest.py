"""A small run of the two apps in this process: everything real but Flower's own transport."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from client_app.app import app as client_app
from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.domain import Plan, Snapshot
from collapipe_flwr.core.json_codec import to_json
from collapipe_flwr.core.keys import Value
from collapipe_flwr.data import seq2seq
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.scheduler.dssda import Dssda
from collapipe_flwr.scheduler.protocol import SchedulerState
from server_app.app import run
from tests.computed_once import folder_of_run
from tests.skeletons import (  # noqa: F401
    models_are_profiled_once,
    profile_once,
    skeletons_are_copied,
)

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TINY_MODEL = (
    "d_model=16 encoder_layers=4 decoder_layers=1 encoder_attention_heads=2 "
    "decoder_attention_heads=2 encoder_ffn_dim=24 decoder_ffn_dim=24 "
    "max_position_embeddings=64 dropout=0.0"
)
TINY: dict[str, Value] = {
    "num-server-rounds": 2,
    "model.overrides": TINY_MODEL,
    "data.train-examples": 120,
    "data.test-examples": 12,
    "data.max-target-length": 8,
    "train.examples-per-round": 24,
    "scheduler.micro-batch-sizes": "4",
    "scheduler.micro-batches": "2,3",
    "scheduler.policy": "uniform",  # which decides in no time
    "world.memory-share": 0.00006,
    "world.devices": "raspberry-pi-4,jetson-nano,phone",
    "run-name": "run",
}
RunApp = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _the_server_profiles_each_model_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server_app.app.profile_model", profile_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _each_plan_is_searched_once() -> Iterator[None]:
    """A plan follows from settings, state and snapshot alone, and many runs here begin alike."""
    known: dict[tuple[Dssda, str, str], tuple[Plan, SchedulerState]] = {}
    search = Dssda.step

    def step(self: Dssda, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        key = (self, to_json(state), to_json(snapshot))
        if key not in known:
            known[key] = search(self, state, snapshot)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dssda, "step", step)
        yield


@pytest.fixture(scope="session", autouse=True)
def _the_same_examples_are_made_once() -> Iterator[None]:
    """Server and clusters of every run here make the same few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seq2seq, "generate_number_words", cache(seq2seq.generate_number_words))
        yield


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_flushed() -> Iterator[None]:
    """Files need not outlive this machine; tests of power cuts and killed runs are elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def runs_in(folder: Path) -> RunApp:
    """Runs the apps with these overrides of the small run; returns the run directory."""

    def start(overrides: dict[str, Value] | None = None, nodes: int | None = None) -> Path:
        values = {**TINY, "output-dir": str(folder / "runs"), **(overrides or {})}
        config = parse(values)
        count = config.run.clusters if nodes is None else nodes
        places = {i + 1: {"partition-id": i, "num-partitions": count} for i in range(count)}
        grid = LocalGrid(dict.fromkeys(places, client_app), node_configs=places, run_config=values)
        run(grid, config)
        return Path(config.run.output_dir) / config.run.run_name

    return start


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> RunApp:
    """Undisturbed runs that nobody changes: once for all tests and workers that ask for the same.

    A run is named ``run``, and its directory may only be read.
    """
    root = folder_of_run(tmp_path_factory) / "shared-runs"
    root.mkdir(exist_ok=True)

    def find(overrides: dict[str, Value] | None = None, nodes: int | None = None) -> Path:
        asked = json.dumps([overrides or {}, nodes], sort_keys=True)
        folder = root / hashlib.sha256(asked.encode()).hexdigest()[:16]
        with FileLock(f"{folder}.lock"):
            if not (folder / "runs" / "run" / "model").exists():
                runs_in(folder)(overrides, nodes)
        return folder / "runs" / "run"

    return find


@pytest.fixture
def run_app(tmp_path: Path) -> RunApp:
    """Runs in a folder of the test's own."""
    return runs_in(tmp_path)
