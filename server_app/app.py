"""The ServerApp: run-config -> data, model, world, scheduler -> strategy -> run directory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from collapipe_flwr import CollaPipe
from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.config.schema import AppConfig, flatten, parse
from collapipe_flwr.core.errors import (
    CollaPipeError,
    DevicesMissing,
    LinkError,
    PrivacySpent,
    RunError,
    wrap_unexpected,
)
from collapipe_flwr.core.imports import list_versions
from collapipe_flwr.federation.arrays import encode_tensors
from collapipe_flwr.federation.late import RoundDeadline
from collapipe_flwr.federation.members import ClusterGrid, discover_clusters
from collapipe_flwr.federation.planner import KnownClusters, Unplanned, profile_ranks
from collapipe_flwr.federation.records import UnsplitTask, task_config
from collapipe_flwr.federation.resuming import Checkpointed
from collapipe_flwr.federation.run.learner import Evaluator, Learner, drawn_sentence, make_learner
from collapipe_flwr.federation.run.recorder import RunFolder, RunRecorder, open_run, prepared_folder
from collapipe_flwr.federation.run.run_strategy import (
    inner_strategy,
    learning_settings,
    make_clock,
    make_planner,
)
from collapipe_flwr.federation.run.sinks import Sinks
from collapipe_flwr.federation.run.strategies import make_strategy
from collapipe_flwr.federation.wrapped_grid import polling
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.saving import save_adapter, save_whole
from collapipe_flwr.pipeline.compute import resolve
from collapipe_flwr.reporting.console import ProgressPrinter
from collapipe_flwr.reporting.log_lines import print_line
from collapipe_flwr.reporting.progress import ProgressFile
from collapipe_flwr.reporting.run_data import RunStory
from collapipe_flwr.reporting.run_directory import RunDirectory
from collapipe_flwr.reporting.sinks import check_sinks

log = logging.getLogger("flwr.collapipe")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run to the end; an error is one line in the log and in the run's summary."""
    try:
        with wrap_unexpected():
            run(polling(grid), parse(context.run_config))
    except CollaPipeError as error:
        log.error("%s", error)
        raise


def run(grid: Grid, config: AppConfig) -> None:
    """Check everything, then create the run directory and train."""
    printer, rounds = ProgressPrinter(config.run.num_server_rounds), config.run.num_server_rounds
    progress = ProgressFile(prepared_folder(config), rounds=rounds, say=printer.say)
    with progress.watch():
        _run(grid, config, progress, printer)


def _run(grid: Grid, config: AppConfig, progress: ProgressFile, printer: ProgressPrinter) -> None:
    progress.enter("reading the data and the model")
    torch.set_num_threads(config.train.threads)  # same summation order as in the clusters
    make_strategy(config)  # refuses wrong arguments
    clock = make_clock(config)
    check_sinks(config.reporting.sinks)
    learner = make_learner(config)
    place = resolve(config.train.compute, "train.compute")
    evaluator = Evaluator(learner.splitter, learner.task, config.evaluation.batch_size, place)
    progress.enter("waiting for the clusters")
    members, planner = _find_clusters(grid, config, learner, clock)
    with ExitStack() as lock:
        folder = open_run(config, lock)
        if config.reporting.log_lines:
            folder.directory.tell = print_line
            print_line("config", flatten(config))
        progress.folder = folder.directory.path
        if planner is not None:
            progress.simulated = not any(c.real_links for c in planner.world.clusters)
        recorder = _make_recorder(config, folder, evaluator, planner, members, printer, progress)
        try:
            with _add_how_to_resume(folder), wrap_unexpected():
                early = ""
                try:
                    _train(members, config, learner, planner, recorder, folder)
                except PrivacySpent as error:
                    early = f"the run ends here: {error}"
                progress.enter("saving the model")
                _save_model(folder.directory, learner, recorder)
                recorder.finish(early=early)
        except (SystemExit, KeyboardInterrupt):  # Flower's handler of a signal ends by sys.exit(0)
            recorder.stop()
            raise
        except BaseException as error:
            recorder.fail(str(error) or type(error).__name__)
            raise


@contextmanager
def _add_how_to_resume(folder: RunFolder) -> Iterator[None]:
    """Append how to resume the run to its error message, if rounds are kept."""
    try:
        yield
    except (DevicesMissing, LinkError, RunError) as error:
        if folder.checkpoints is None:
            raise
        done, path = folder.checkpoints.newest_round(), folder.directory.path
        kept = f"rounds 1 to {done} are kept" if done else "nothing is kept yet"
        raise type(error)(
            f"{error}; {kept}: go on with `collapipe run --resume {path}` and the options that it "
            f'was started with, or with resume = "{path}" in the run-config'
        ) from error


def _find_clusters(
    grid: Grid, config: AppConfig, learner: Learner, clock: RoundDeadline | None
) -> tuple[ClusterGrid, KnownClusters | None]:
    """Wait for the clusters of the run, and make the planner of a split model."""
    clusters = discover_clusters(
        grid, expected=config.run.clusters, timeout_s=config.run.node_timeout_s
    )
    names = {node: found.cluster_id for node, found in clusters.items()}
    members = ClusterGrid(grid, names, clock, patience_s=config.run.node_timeout_s)
    if config.run.runtime != "pipeline":
        return members, None
    kept_bytes = learning_settings(config, "", 1).count_kept_bytes
    model = profile_model(learner.splitter, learner.shape, kept_bytes)
    planner = make_planner(
        config,
        model,
        clusters,
        members.clusters,
        whole_batches=learner.splitter.whole_batches,
        leaves_out=True,
        of_rank=profile_ranks(learner.model, kept_bytes),
    )
    return members, planner


def _make_recorder(
    config: AppConfig,
    folder: RunFolder,
    evaluator: Evaluator,
    planner: KnownClusters | None,
    members: ClusterGrid,
    printer: ProgressPrinter,
    progress: ProgressFile,
) -> RunRecorder:
    profiles = () if planner is None else planner.world.clusters
    devices = [device for profile in profiles for device in profile.members]
    recorder = RunRecorder(
        folder.directory,
        printer,
        evaluator,
        story=RunStory(
            metric_name=evaluator.task.metric_name,
            energy_budget_j={device.device_id: device.energy_budget_j for device in devices},
            share_asked=config.scheduler.settings.max_model_share,
            memory_limit_bytes={device.device_id: device.memory_bytes for device in devices},
            versions=list_versions(),
            rounds_asked=config.run.num_server_rounds,
        ),
        every=config.evaluation.every,
        past=folder.past,
        paced=config.links.paced,
        lost=lambda: members.lost,
        sinks=Sinks(
            config.reporting.sinks,
            folder.directory.path,
            settings=flatten(config),
            metrics_address=config.reporting.metrics,
        ),
        progress=progress,
    )
    recorder.testing = evaluator.progress
    return recorder


def _train(
    members: ClusterGrid,
    config: AppConfig,
    learner: Learner,
    planner: KnownClusters | None,
    recorder: RunRecorder,
    folder: RunFolder,
) -> None:
    for sentence in learner.task.skipped.values():
        recorder.say(sentence)
    weights, drawn = learner.splitter.first_weights(config.run.seed)
    if drawn:
        recorder.say(drawn_sentence(config.model.pretrained, drawn))
    run_id, unsplit = folder.directory.run_id, None

    def learning(server_round: int) -> LearningSettings:
        recorder.check_budget(config.noise)
        return learning_settings(config, run_id, server_round)

    inner = inner_strategy(config, learner.task, recorder.on_clusters)
    if planner is None:
        spec_json, whole = learner.splitter.spec.to_json(), Unplanned(members.clusters)
        unsplit = UnsplitTask(model_spec_json=spec_json, run_id=run_id)
        ours = CollaPipe(
            inner,
            scheduler=whole,
            on_round=recorder.on_round,
            on_total_failure="raise",
            retries=config.run.round_retries,
        )
    else:
        ours = CollaPipe(
            inner,
            model=learner.model,
            scheduler=planner,
            learning=learning,
            edge=config.edge,
            on_round=recorder.on_round,
            on_total_failure="raise",
            retries=config.run.round_retries,
            late=config.run.round_late,
        )
        recorder.training = ours.cluster_progress
    strategy: Strategy = ours
    if folder.checkpoints is not None:
        strategy = Checkpointed(ours, folder.checkpoints, members.resumable)
    config_record = task_config(learner.task.vocabulary.to_json(), unsplit)
    strategy.start(
        members,
        encode_tensors(weights),
        num_rounds=config.run.num_server_rounds,
        timeout=config.run.round_timeout_s,
        train_config=config_record,
        evaluate_config=config_record,
        evaluate_fn=recorder.evaluate,
    )


def _save_model(directory: RunDirectory, learner: Learner, recorder: RunRecorder) -> None:
    if recorder.weights is None:
        raise RunError("no round was completed, so there is no trained model to save")
    save_inputs = learner.task.save_inputs
    spec = learner.splitter.spec
    save_whole(spec, recorder.weights, directory.model_path, save_inputs=save_inputs)
    if spec.lora is not None:
        save_adapter(spec, recorder.weights, directory.adapter_path)
