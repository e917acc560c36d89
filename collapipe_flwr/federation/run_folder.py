"""The folder of a run: a new one, or that of an earlier process to go on with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from collapipe_flwr.config.schema import AppConfig, flatten, parse
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.checkpoint import Checkpoints
from collapipe_flwr.reporting.run_directory import Past, RunDirectory, read_config, read_past

# What a resumed run may change: none of these alters a round that is done or its data.
_ROUNDS = "num-server-rounds"  # free where the learning rate does not depend on it
_FREE = (
    _ROUNDS,
    "output-dir",
    "run-name",
    "resume",
    "checkpoint-every",
    "round-slack",
    "train.state-dir",
)
_FREE_ENDS = (
    "timeout-s",
    "edge.heartbeat-s",
    "edge.heartbeat-misses",
    "edge.address",
    "evaluation.every",
    "evaluation.batch-size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where a run writes, where its checkpoints go (None: nowhere), and what it has behind it."""

    directory: RunDirectory
    checkpoints: Checkpoints | None
    past: Past = field(default_factory=Past)


def open_run(config: AppConfig) -> RunFolder:
    """Make or reopen the folder; raises ConfigError when the run-config is not that run's."""
    if config.run.resume:
        return _reopen(config, Path(config.run.resume).resolve())
    name = config.run.run_name or time.strftime("%Y%m%d-%H%M%S")
    directory = RunDirectory(Path(config.run.output_dir).resolve() / name)
    directory.write_config(flatten(config))
    return RunFolder(directory=directory, checkpoints=_checkpoints(config, directory))


def _reopen(config: AppConfig, path: Path) -> RunFolder:
    directory = RunDirectory.reopen(path)
    check_same_run(config, path)
    checkpoints = _checkpoints(config, directory)
    if checkpoints is None:
        raise ConfigError("resume: only runs with checkpoints can go on: checkpoint-every is 0")
    return RunFolder(
        directory=directory,
        checkpoints=checkpoints,
        past=read_past(path, checkpoints.newest_round()),
    )


def _checkpoints(config: AppConfig, directory: RunDirectory) -> Checkpoints | None:
    if not config.run.checkpoint_every:
        return None
    return Checkpoints(
        folder=directory.checkpoint_path,
        resume=bool(config.run.resume),
        every=config.run.checkpoint_every,
    )


def check_same_run(config: AppConfig, path: Path) -> None:
    """Raise ConfigError for the first key that the rounds so far depend on and that differs."""
    saved = read_config(path) or {}
    first = saved.get(_ROUNDS, config.run.num_server_rounds)
    if config.train.decay != "none" and first != config.run.num_server_rounds:
        raise ConfigError(
            f"{_ROUNDS} is {config.run.num_server_rounds}, but the run in {path} began with "
            f"{first}, over which train.decay={config.train.decay} lowers its learning rate: "
            f"resume with {_ROUNDS}={first}, or start a new run from its model"
        )
    now = flatten(config)
    then = flatten(parse({key: saved[key] for key in now if key in saved}))  # in today's spelling
    for key, value in now.items():
        if key in _FREE or key.endswith(_FREE_ENDS) or key not in saved:
            continue
        if then[key] != value:
            raise ConfigError(
                f"{key} is {value!r}, but the run in {path} began with {then[key]!r}: "
                "leave it as it was, or start a new run"
            )
