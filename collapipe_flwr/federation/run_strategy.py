"""The strategy of a run and its edge server, from the run-config."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import Strategy

from collapipe_flwr.config.schema import AppConfig, EdgeConfig
from collapipe_flwr.federation.learner import Learner
from collapipe_flwr.federation.recorder import RunRecorder
from collapipe_flwr.federation.records import LearningSettings, UnsplitTask, unsplit_task_config
from collapipe_flwr.federation.rpc_gateway import RpcEdgeGateway
from collapipe_flwr.federation.run_planner import Planned
from collapipe_flwr.federation.split import SplitModel
from collapipe_flwr.federation.strategy import CollaPipe
from collapipe_flwr.host.server import EdgeServer
from collapipe_flwr.host.service import EdgeService
from collapipe_flwr.transport.client import EdgeClient

log = logging.getLogger("flwr.collapipe")


@contextmanager
def run_strategy(
    inner: Strategy,
    config: AppConfig,
    learner: Learner,
    planned: Planned | None,
    recorder: RunRecorder,
    run_id: str,
) -> Iterator[tuple[Strategy, ConfigRecord]]:
    """The strategy, and what it tells every client; the edge lives as long as it does."""
    if planned is None:
        yield inner, unsplit_task_config(_whole_task(config, learner, run_id))
        return
    with open_edge(config.edge) as client:
        split = _split_model(client, config, learner, run_id)
        strategy = CollaPipe(
            inner, scheduler=planned.rounds, split=split, on_round=recorder.on_round
        )
        yield strategy, ConfigRecord()


@contextmanager
def open_edge(config: EdgeConfig) -> Iterator[EdgeClient]:
    """A client of the edge that the user runs, or of one on loopback for this run.

    The user's may restart between two rounds as well as within one, so it is waited for.
    """
    if config.address:
        with EdgeClient(
            config.address,
            tls=config.tls(),
            certificate_name=config.certificate_name,
            deadline_s=config.timeout_s,
            patience_s=config.timeout_s,
            heartbeat=config.heartbeat,
        ) as client:
            client.status()
            yield client
        return
    with (
        EdgeServer("127.0.0.1:0", EdgeService()) as server,
        EdgeClient(server.address, deadline_s=config.timeout_s) as client,
    ):
        log.info("edge server on %s", server.address)
        yield client


def _split_model(
    client: EdgeClient, config: AppConfig, learner: Learner, run_id: str
) -> SplitModel:
    splitter = learner.splitter
    return SplitModel(
        edge=RpcEdgeGateway(client, keep_optimizer=config.train.optimizer_state == "keep"),
        edge_keys=frozenset(splitter.edge_keys()),
        shared_keys=frozenset(splitter.shared_keys),
        constant_keys=splitter.constant_keys,
        model_spec_json=learner.spec.to_json(),
        vocabulary_json=learner.task.vocabulary.to_json(),
        learning=lambda server_round: _learning(config, server_round, run_id),
        shape=learner.shape,
    )


def _learning(config: AppConfig, server_round: int, run_id: str) -> LearningSettings:
    return LearningSettings(
        optimizer=config.optimizer(server_round),
        schedule=config.scheduler.settings.schedule,
        deadline_s=config.edge.timeout_s,
        seed=config.run.seed,
        execution=config.execution,
        snapshot_every=config.train.snapshot_every,
        heartbeat=config.edge.heartbeat,
        run_id=run_id,
    )


def _whole_task(config: AppConfig, learner: Learner, run_id: str) -> UnsplitTask:
    """The batches of a plan with the largest micro-batch and count, on the unsplit model."""
    grid = config.scheduler.settings
    size, rounds = max(grid.micro_batch_sizes), config.run.num_server_rounds
    return UnsplitTask(
        model_spec_json=learner.spec.to_json(),
        vocabulary_json=learner.task.vocabulary.to_json(),
        batch_size=size * max(grid.micro_batches),
        micro_batch_size=size,
        optimizers=tuple(config.optimizer(r + 1) for r in range(rounds)),
        execution=config.execution,
        run_id=run_id,
    )
