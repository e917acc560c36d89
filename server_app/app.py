"""The ServerApp: run-config -> data, model, world, scheduler -> strategy -> run directory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from collapipe_flwr.core.config import AppConfig, EdgeConfig, count_list, parse
from collapipe_flwr.core.errors import CollaPipeError, RunError, unexpected_as_run_error
from collapipe_flwr.edge.server import EdgeServer
from collapipe_flwr.edge.service import EdgeService
from collapipe_flwr.federation.arrays import encode_tensors
from collapipe_flwr.federation.deadline import DeadlineGrid, RoundClock
from collapipe_flwr.federation.discovery import discover_clusters
from collapipe_flwr.federation.members import Members
from collapipe_flwr.federation.records import LearningSettings, UnsplitTask, unsplit_task_config
from collapipe_flwr.federation.resuming import Checkpointed
from collapipe_flwr.federation.rpc_gateway import RpcEdgeGateway
from collapipe_flwr.federation.split import SplitModel
from collapipe_flwr.federation.strategy import CollaPipe
from collapipe_flwr.models import save_adapter, save_whole
from collapipe_flwr.reporting.console import RoundPrinter
from collapipe_flwr.reporting.events import RunStory
from collapipe_flwr.reporting.run_directory import RunDirectory
from collapipe_flwr.rpc.edge_client import EdgeClient
from server_app.evaluate import Evaluator
from server_app.folder import RunFolder, open_run
from server_app.recorder import RunRecorder
from server_app.setup import (
    Learner,
    Planned,
    drawn_sentence,
    execution_of,
    inner_strategy,
    make_learner,
    make_planner,
    optimizer_settings,
)

log = logging.getLogger("flwr.collapipe")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run to the end; a failure is one sentence in the log and in the run's summary."""
    try:
        with unexpected_as_run_error():
            run(grid, parse(context.run_config))
    except CollaPipeError as error:
        log.error("%s", error)
        raise


def run(grid: Grid, config: AppConfig) -> None:
    """Everything is checked before the run directory is made."""
    torch.set_num_threads(config.train.threads)  # the edge sums as the clusters do
    learner = make_learner(config)
    evaluator = Evaluator(learner.splitter, learner.task, config.evaluation.batch_size)
    clusters = discover_clusters(
        grid, expected=config.run.clusters, timeout_s=config.run.node_timeout_s
    )
    names = {node: found.cluster_id for node, found in clusters.items()}
    members = _members(grid, names, config.run.round_slack)
    planned = (
        make_planner(config, learner, clusters, members.clusters)
        if config.run.runtime == "pipeline"
        else None
    )
    folder = open_run(config)
    recorder = RunRecorder(
        folder.directory,
        RoundPrinter(config.run.num_server_rounds),
        evaluator,
        story=RunStory(
            metric_name=learner.task.metric_name,
            energy_budget_j={} if planned is None else planned.energy_budget_j,
        ),
        every=config.evaluation.every,
        past=folder.past,
        paced=config.links.pace == "plan",
        lost=lambda: members.lost,
    )
    try:
        with unexpected_as_run_error():
            _train(members, config, learner, planned, recorder, folder)
            _save_model(folder.directory, learner, recorder)
    except BaseException as error:
        recorder.finish("failed", str(error) or type(error).__name__)
        raise
    recorder.finish("completed")


def _members(grid: Grid, clusters: Mapping[int, str], slack: float) -> Members:
    """The clusters of the run, waited for no longer than rounds should take, if that is asked."""
    return DeadlineGrid(grid, clusters, RoundClock(slack)) if slack else Members(grid, clusters)


def _train(
    members: Members,
    config: AppConfig,
    learner: Learner,
    planned: Planned | None,
    recorder: RunRecorder,
    folder: RunFolder,
) -> None:
    weights, drawn = learner.splitter.first_weights(config.run.seed)
    if drawn:
        recorder.say(drawn_sentence(config.model.pretrained, drawn))

    def on_training(loss: float) -> None:
        recorder.on_training(loss, members.take_train_bytes())

    inner = inner_strategy(config, learner.task, on_training, recorder.on_clusters)
    made = _strategy(inner, config, learner, planned, recorder, folder.directory.run_id)
    with made as (strategy, train_config):
        if folder.checkpoints is not None:
            strategy = Checkpointed(strategy, folder.checkpoints, members.resumable)
        strategy.start(
            members,
            encode_tensors(weights),
            num_rounds=config.run.num_server_rounds,
            timeout=config.run.round_timeout_s,
            train_config=train_config,
            evaluate_config=train_config,
            evaluate_fn=recorder.evaluate,
        )


@contextmanager
def _strategy(
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
    with _edge(config.edge) as client:
        split = SplitModel(
            edge=RpcEdgeGateway(client, keep_optimizer=config.train.optimizer_state == "keep"),
            edge_keys=frozenset(learner.splitter.edge_keys()),
            shared_keys=frozenset(learner.splitter.shared_keys),
            constant_keys=learner.splitter.constant_keys,
            model_spec_json=learner.spec.to_json(),
            vocabulary_json=learner.task.vocabulary.to_json(),
            learning=lambda server_round: LearningSettings(
                optimizer=optimizer_settings(config, server_round),
                schedule=config.scheduler.schedule,
                deadline_s=config.edge.timeout_s,
                seed=config.run.seed,
                execution=execution_of(config),
                snapshot_every=config.train.snapshot_every,
                heartbeat=config.edge.heartbeat,
                run_id=run_id,
            ),
            shape=learner.shape,
        )
        yield (
            CollaPipe(inner, scheduler=planned.rounds, split=split, on_round=recorder.on_round),
            ConfigRecord(),
        )


@contextmanager
def _edge(config: EdgeConfig) -> Iterator[EdgeClient]:
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


def _whole_task(config: AppConfig, learner: Learner, run_id: str) -> UnsplitTask:
    """The batches of a plan with the largest micro-batch and count, on the unsplit model."""
    size = max(count_list(config.scheduler.micro_batch_sizes))
    rounds = config.run.num_server_rounds
    return UnsplitTask(
        model_spec_json=learner.spec.to_json(),
        vocabulary_json=learner.task.vocabulary.to_json(),
        batch_size=size * max(count_list(config.scheduler.micro_batches)),
        micro_batch_size=size,
        optimizers=tuple(optimizer_settings(config, r + 1) for r in range(rounds)),
        execution=execution_of(config),
        run_id=run_id,
    )


def _save_model(directory: RunDirectory, learner: Learner, recorder: RunRecorder) -> None:
    if recorder.weights is None:
        raise RunError("no round was completed, so there is no trained model to save")
    save_whole(learner.spec, recorder.weights, directory.model_path)
    if learner.spec.lora is not None:
        save_adapter(learner.spec, recorder.weights, directory.adapter_path)
    learner.task.save_inputs(directory.model_path)
