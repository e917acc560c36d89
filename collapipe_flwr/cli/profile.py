"""``collapipe profile``: what a model costs and whether it fits, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collapipe_flwr.core.errors import ConfigError

if TYPE_CHECKING:
    from collapipe_flwr.core.domain import ClusterProfile


def profile(
    model: Annotated[str, typer.Argument(help="Folder, hub name, or model type such as bert.")],
    task: Annotated[str, typer.Option(help="What it learns; default: what it is made for.")] = "",
    overrides: Annotated[
        str, typer.Option(help='As model.overrides: "n_layer=6 n_embd=128".')
    ] = "",
    length: Annotated[int, typer.Option(help="Tokens of an example.", min=1)] = 64,
    target_length: Annotated[int, typer.Option(help="Tokens of its target.", min=1)] = 64,
    edge_blocks: Annotated[int, typer.Option(help="Upper blocks at the edge.", min=0)] = 0,
    ties: Annotated[
        str, typer.Option(help="As model.ties: untie keeps two tables where one was tied, or rows.")
    ] = "untie",
    lora_rank: Annotated[int, typer.Option(help="Adapters of this rank; 0: train all.", min=0)] = 0,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file (TOML).")] = None,
    devices: Annotated[str, typer.Option(help="Or presets: raspberry-pi-4,jetson-nano,...")] = "",
    control_unit: Annotated[str, typer.Option(help="Preset, with --devices.")] = "raspberry-pi-5",
    examples: Annotated[int, typer.Option(help="Examples of a round.", min=1)] = 256,
    micro_batch_sizes: Annotated[str, typer.Option(help="Sizes to choose from.")] = "1,2,4,8,16",
    micro_batches: Annotated[str, typer.Option(help="Counts to choose from.")] = "1,2,4,8",
    batch: Annotated[int, typer.Option(help="Examples of the timed block.", min=1)] = 8,
    seconds: Annotated[float, typer.Option(help="To time a block here; 0: not.", min=0)] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures.")] = None,
) -> None:
    """Costs of every block, this machine's speed, and the plan that a cluster would get.

    Exit code 1 if a cluster was named and the model does not fit it.
    """
    from rich.console import Console

    from collapipe_flwr.cluster.forecast import ModelWish, build_model, forecast
    from collapipe_flwr.core.parsing import assignments, read_assignments
    from collapipe_flwr.experiments.choices import whole_numbers
    from collapipe_flwr.models import BatchShape
    from collapipe_flwr.reporting.json_file import prepare, write_json
    from collapipe_flwr.reporting.model_table import as_json, show_forecast
    from collapipe_flwr.scheduler.protocol import SchedulerConfig

    if not assignments().holds(overrides):
        raise ConfigError(f"--overrides {assignments().says}, got {overrides!r}")
    if json_file is not None:
        prepare("--json", json_file)
    wish = ModelWish(
        model=model,
        task=task,
        overrides=read_assignments(overrides),
        shape=BatchShape(source_length=length, target_length=target_length),
        edge_blocks=edge_blocks,
        lora_rank=lora_rank,
        ties=ties,
    )
    settings = SchedulerConfig(
        micro_batch_sizes=whole_numbers("micro-batch-sizes", micro_batch_sizes),
        micro_batches=whole_numbers("micro-batches", micro_batches),
    )
    place = _cluster(cluster, devices, control_unit, examples)
    found = forecast(
        build_model(wish),
        wish.shape,
        place,
        settings,
        examples_at_once=batch,
        seconds=seconds,
    )
    show_forecast(found, Console())
    if json_file is not None:
        write_json(json_file, as_json(found))
    raise typer.Exit(1 if place is not None and found.plan is None else 0)


def _cluster(
    file: Path | None, devices: str, control_unit: str, examples: int
) -> ClusterProfile | None:
    from collapipe_flwr.cluster.forecast import cluster_of_presets
    from collapipe_flwr.cluster.profile import profile_of
    from collapipe_flwr.core.cluster_file import read_cluster

    if file is not None and devices:
        raise ConfigError("give --cluster or --devices, not both")
    if file is not None:
        return profile_of(read_cluster(file), examples)
    kinds = [kind.strip() for kind in devices.split(",") if kind.strip()]
    return cluster_of_presets(kinds, control_unit, examples) if kinds else None
