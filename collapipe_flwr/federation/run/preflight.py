"""Everything that is known of a run before Flower starts, checked by the run's own code.

The checks are those of the ServerApp and the clusters: `make_learner` reads data, tokenizer and
model, `make_planner` plans the first round. Cheap checks come first, and each raises one sentence
with the key, the value and the fix. Nothing is written.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collapipe_flwr.cluster.profile import describe_cluster, describe_unknown_edges, profile_cluster
from collapipe_flwr.config.cluster_file import ClusterConfig, read_cluster
from collapipe_flwr.config.parsing import declared_config, read_toml, refuse_unknown
from collapipe_flwr.config.schema import AppConfig, known_keys, parse
from collapipe_flwr.core.domain import ClusterProfile, ModelProfile
from collapipe_flwr.core.errors import (
    CheckpointMissing,
    ConfigError,
    DataError,
    prefix_errors,
    require,
)
from collapipe_flwr.core.hub import expand_home, explain_absent_model
from collapipe_flwr.core.links import TlsFiles, split_address
from collapipe_flwr.federation.run.first_look import check_paths
from collapipe_flwr.federation.run.launcher import Launch
from collapipe_flwr.host.metrics import check_address
from collapipe_flwr.reporting.output import format_count
from collapipe_flwr.reporting.sinks import check_sinks
from collapipe_flwr.scheduler.policies import make_scheduler

if TYPE_CHECKING:  # slow to import, and not needed by the first checks
    from collapipe_flwr.cluster.local_data import DataPlace
    from collapipe_flwr.federation.run.learner import Learner

DEFAULT_SUPERNODES = 2  # Flower's own
_CONNECT_S = 3.0
_RESOURCES = ("client-resources-num-cpus", "init-args-num-cpus")
_FEDERATION_KEYS = (
    "num-supernodes",
    *_RESOURCES,
    "client-resources-num-gpus",
    "init-args-num-gpus",
    "init-args-logging-level",
    "init-args-log-to-driver",
    "backend",
    "verbose",
)


def preflight(
    config: AppConfig,
    *,
    run_dir: Path | None = None,
    federation: Path | None = None,
    cluster_files: Sequence[Path] = (),
) -> str:
    """Check a run; raises ConfigError, DataError, ModelError or InfeasibleError.

    Returns a summary line, then a line for each file with skipped rows and for each thing that may
    be wrong. ``federation`` is Flower's file of a simulation. ``cluster_files`` are those of the
    SuperNodes; without any, the clusters are simulated.
    """
    check_extras(config, simulated=not cluster_files)
    check_folders(config, run_dir)
    if "prometheus" in config.reporting.sinks:
        with prefix_errors("reporting.metrics"):
            check_address(config.reporting.metrics)
    clusters = [read_cluster(path) for path in cluster_files]
    check_members(config, clusters)
    if not cluster_files:
        check_federation(config, federation)
    check_paths(config.data, config.model)
    check_names(config, clusters)
    if config.model.pretrained and (why := explain_absent_model(config.model.pretrained)):
        raise CheckpointMissing(
            f"model.pretrained: {why}; give a folder with config.json or a hub name that this "
            "machine can reach"
        )
    return _loaded(config, run_dir, clusters)


def check_names(config: AppConfig, clusters: Sequence[ClusterConfig]) -> None:
    """Raise ConfigError for an unknown policy, device or strategy, or its wrong arguments."""
    with prefix_errors("scheduler.policy"):
        make_scheduler(config.scheduler.policy, config.scheduling)
    for index in range(config.run.clusters):
        _described(config, index, clusters, 1)
    from collapipe_flwr.federation.run.strategies import make_strategy

    make_strategy(config)


def _loaded(config: AppConfig, run_dir: Path | None, clusters: Sequence[ClusterConfig]) -> str:
    """Run the checks that need the data and the model, and describe what they found."""
    from collapipe_flwr.cluster.local_data import DataPlace
    from collapipe_flwr.cluster.privacy import check_private
    from collapipe_flwr.federation.planner import profile_ranks
    from collapipe_flwr.federation.run.learner import make_learner
    from collapipe_flwr.federation.run.run_strategy import learning_settings, make_planner
    from collapipe_flwr.models.checkpoint import check_stored
    from collapipe_flwr.models.profile import profile_model
    from collapipe_flwr.pipeline.compute import resolve

    for key, compute in (("train", config.train.compute), ("edge", config.edge.compute)):
        resolve(compute, f"{key}.compute")  # nodes and the server's edge run on this machine

    count = config.run.clusters
    places = [DataPlace(index=index, count=count) for index in range(count)]
    check_stored(config.model.pretrained)
    learner = make_learner(config)
    check_examples(config, learner)
    learning = learning_settings(config, "", 1)
    if config.noise.active:
        check_private(learner.splitter, learning)
    model = profile_model(learner.splitter, learner.shape, learning.count_kept_bytes)
    check_disk(config, run_dir, model)
    profiles = tuple(
        _described(config, place.index, clusters, _examples(config, learner, place))
        for place in places
    )
    if config.run.runtime == "pipeline":
        nodes = dict(enumerate(profiles, 1))
        names = {n: p.cluster_id for n, p in nodes.items()}
        whole = learner.splitter.whole_batches
        of_rank = profile_ranks(learner.model, learning.count_kept_bytes)
        make_planner(config, model, nodes, names, whole_batches=whole, of_rank=of_rank)
    task, spec = learner.task, learner.splitter.spec
    found = f"{spec.model_type} of {len(model.blocks)} blocks for {spec.task}"
    sizes = f"{_share_text(config, learner)} and {len(task.test)} test examples"
    devices = sum(len(profile.devices) for profile in profiles)
    where = f"{format_count(len(profiles), 'cluster')} of {devices} devices in all"
    assumed = (line for cluster in clusters for line in describe_unknown_edges(cluster))
    summary = f"{found}, {sizes}, {where}"
    costs = privacy_costs(config, learner, places) if config.noise.active else ()
    return "\n".join((summary, *task.skipped.values(), *task.warnings, *assumed, *costs))


def check_launch(launch: Launch) -> str:
    """Check a run before it starts; returns a one-line summary.

    Of an app with run-config keys of its own, only their names and the output directory are
    checked.
    """
    declared = declared_config(launch.app)
    if set(declared) != known_keys():
        _check_writable("--output-dir", launch.output_dir)
        return f"{launch.app} has run-config keys of its own: only their names were checked"
    return preflight(
        parse({**declared, **launch.settings}),
        run_dir=launch.run_dir,
        federation=launch.federation_config,
        cluster_files=launch.clusters,
    )


def check_extras(config: AppConfig, *, simulated: bool) -> None:
    """Raise ConfigError for a missing package, with the command that installs it."""
    require("datasets", "data")
    if simulated:
        require("ray", "simulation")
    if config.data.task == "translation":
        require("sacrebleu", "metrics")
    if config.data.task == "image-classification":
        require("PIL", "data")
    if config.lora.rank:
        require("peft", "lora")
    if config.noise.active:
        require("dp_accounting", "privacy")
    check_sinks(config.reporting.sinks)


def check_folders(config: AppConfig, run_dir: Path | None) -> None:
    """Raise ConfigError for a folder that cannot be written or resumed."""
    output = Path(config.run.output_dir) if run_dir is None else run_dir.parent
    _check_writable("output-dir", output)  # before anything in it is looked for
    if config.run.resume:
        from collapipe_flwr.federation.run.recorder import check_resumable

        check_resumable(config, Path(config.run.resume).resolve())
    if config.train.state_dir:
        _check_writable("train.state-dir", expand_home(config.train.state_dir))


def _check_writable(key: str, folder: Path) -> None:
    existing = _existing(folder)
    if not existing.is_dir():
        raise ConfigError(f'{key} "{folder}": {existing} is no folder; choose another')
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f'{key} "{folder}": {existing} cannot be written; choose another, or change its rights'
        )


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists and may be seen."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def check_disk(config: AppConfig, run_dir: Path | None, model: ModelProfile) -> None:
    """Raise ConfigError if checkpoints and the trained model do not fit on the disk."""
    from collapipe_flwr.federation.checkpoint import KEPT_CHECKPOINTS

    size = sum(p.parameter_bytes for p in (model.embedding, *model.blocks, model.decoder))
    kept = KEPT_CHECKPOINTS + 1 if config.run.checkpoint_every else 0  # one is being written
    needed = size * (kept + 1)
    folder = Path(config.run.output_dir) if run_dir is None else run_dir
    free = shutil.disk_usage(_existing(folder)).free
    if free < needed:
        raise ConfigError(
            f'output-dir "{folder}" has {free / 1e6:.1f} MB free, but the model and its '
            f"checkpoints take {needed / 1e6:.1f} MB: make room, choose another folder, or set "
            "checkpoint-every=0"
        )


def check_members(config: AppConfig, clusters: Sequence[ClusterConfig]) -> None:
    """Raise ConfigError for an unusable edge or certificate, or for clashing clusters."""
    if (tls := config.edge.tls()) is not None:
        _check_files("edge.tls-ca, edge.tls-cert, edge.tls-key", tls)
    if config.edge.address and not clusters:
        _check_edge("edge.address", config.edge.address)
    if clusters and len(clusters) != config.run.clusters:
        raise ConfigError(
            f"clusters is {config.run.clusters}, but {len(clusters)} cluster files were given: "
            f"set clusters={len(clusters)}, or name one file for each"
        )
    names = [cluster.id for cluster in clusters]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f'two cluster files have the id "{twice}": give each its own')
    for cluster in clusters:
        names = [edge.name for edge in cluster.used_edges]
        addresses = [edge.address for edge in cluster.used_edges]
        at_home = config.privacy.labels_at_home or cluster.control_unit.name in names
        if all(addresses) and not at_home:
            _check_edge(f"cluster {cluster.id}: [edge]", *addresses)
        files = cluster.tls_files(cluster.control_unit.name)
        if files is not None:
            _check_files(f"cluster {cluster.id}: [tls] of {cluster.control_unit.name}", files)


def _check_files(what: str, files: TlsFiles) -> None:
    for path in (files.ca, files.certificate, files.key):
        if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
            raise ConfigError(
                f'{what}: "{path}" is no file that can be read; correct the path, or write the '
                "files by `collapipe certs`"
            )


def _check_edge(what: str, address: str, *others: str) -> None:
    """Raise ConfigError where none of these edges answers."""
    with prefix_errors(what):
        place = split_address(address)
    try:
        socket.create_connection(place, _CONNECT_S).close()
    except OSError as error:
        if others:
            return _check_edge(what, *others)
        raise ConfigError(
            f"{what} {address}: no edge at {address} answers ({error}); start it there by "
            f"`collapipe edge --listen {address}`, or leave the address empty"
        ) from error


def check_federation(config: AppConfig, path: Path | None) -> None:
    """Raise ConfigError where Flower would start too few nodes, or Ray could run none."""
    values: dict[str, Any] = {} if path is None else read_toml(path, f"--federation-config {path}")
    refuse_unknown(values, _FEDERATION_KEYS, f"--federation-config {path}: key")
    nodes = values.get("num-supernodes", DEFAULT_SUPERNODES)
    for key in ("num-supernodes", *_RESOURCES):
        if type(values.get(key, 1)) is not int or values.get(key, 1) < 1:
            raise ConfigError(
                f"--federation-config {path}: {key} must be a whole number >= 1, got "
                f"{values[key]!r}"
            )
    if nodes < config.run.clusters:
        raise ConfigError(
            f"clusters is {config.run.clusters}, but Flower would start {nodes} nodes: set "
            f"num-supernodes = {config.run.clusters} in the file of --federation-config"
        )
    have = values.get("init-args-num-cpus", os.cpu_count() or 1)
    wanted = values.get("client-resources-num-cpus", min(2, have))
    if wanted > have:
        raise ConfigError(
            f"--federation-config {path}: client-resources-num-cpus is {wanted}, but Ray has "
            f"{have} CPUs, so no cluster could ever start: set it to {have} or less"
        )


def _described(
    config: AppConfig, index: int, clusters: Sequence[ClusterConfig], examples: int
) -> ClusterProfile:
    if not clusters:
        return describe_cluster(config.world, index, examples)
    file = clusters[index]
    with prefix_errors(f"cluster file of {file.id}"):
        return profile_cluster(file, examples)


def check_examples(config: AppConfig, learner: Learner) -> None:
    """Collate a test example, and split the training set into the clusters' shares.

    Raises DataError if the test set cannot be used or a cluster would have no training data.
    """
    task = learner.task
    task.collate(task.make_examples(task.test).select([0]).to_list())
    task.partition(0, config.run.clusters)
    if config.data.stream:
        from collapipe_flwr.data.stream import Stream

        for index in range(config.run.clusters):
            folder = expand_home(config.data.stream) / str(index)
            Stream(folder, task.read_file, task.make_examples)


def privacy_costs(
    config: AppConfig, learner: Learner, places: Sequence[DataPlace]
) -> tuple[str, ...]:
    """Say what the run costs in privacy; raises PrivacySpent if it allows no round.

    Clusters whose data only they have say so themselves, round by round.
    """
    from collapipe_flwr.federation.privacy_account import Charge, check_budget, count_epsilon

    task, batch = learner.task, config.largest_batch
    sizes = [len(task.make_examples(task.partition(*place.share))) for place in places]
    fewest = min(sizes)
    if batch > fewest:
        raise DataError(
            f"a cluster has {fewest} examples, but a step may draw {batch}: lower "
            "scheduler.micro-batch-sizes or scheduler.micro-batches"
        )
    noise, rounds = config.noise, config.run.num_server_rounds
    batch = fewest if noise.on_activations else batch  # visits of all, instead of draws
    steps = -(-(config.train.examples_per_round or fewest) // batch)
    once = Charge(
        examples=fewest, batch=batch, noise_multiplier=noise.noise_multiplier, steps=steps
    )
    check_budget(noise, count_epsilon((once,), noise.delta), "a cluster")
    epsilon = count_epsilon((once,) * rounds, noise.delta)
    return (
        f"{rounds} rounds spend at most epsilon {epsilon:.4g} at delta {noise.delta:g} of the "
        f"examples of the smallest cluster, which has {fewest}",
    )


def _share_text(config: AppConfig, learner: Learner) -> str:
    """Describe the training examples, and a cluster's per round if fewer than its share."""
    whole, given = len(learner.task.train), config.train.examples_per_round
    share = whole // config.run.clusters
    part = f" ({given} of about {share} per cluster and round)" if 0 < given < share else ""
    return f"{whole} training{part}"


def _examples(config: AppConfig, learner: Learner, place: DataPlace) -> int:
    """Count the examples in a cluster's round."""
    task, given = learner.task, config.train.examples_per_round
    return given or len(task.make_examples(task.partition(*place.share)))
