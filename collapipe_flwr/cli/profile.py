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
    task: Annotated[
        str, typer.Option(help="Task. Default: that of the model's architecture.")
    ] = "",
    overrides: Annotated[
        str, typer.Option(help='As model.overrides: "n_layer=6 n_embd=128".')
    ] = "",
    length: Annotated[int, typer.Option(help="Tokens per example.", min=1)] = 64,
    target_length: Annotated[int, typer.Option(help="Tokens per target.", min=1)] = 64,
    edge_blocks: Annotated[int, typer.Option(help="Upper blocks at the edge.", min=0)] = 0,
    ties: Annotated[
        str, typer.Option(help="As model.ties: untie counts a tied table twice, rows once.")
    ] = "untie",
    lora_rank: Annotated[
        int, typer.Option(help="Rank of LoRA adapters; 0: train all weights.", min=0)
    ] = 0,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file (TOML).")] = None,
    devices: Annotated[
        str, typer.Option(help="Device presets: raspberry-pi-4,jetson-nano,...")
    ] = "",
    control_unit: Annotated[
        str, typer.Option(help="Preset of the control unit, with --devices.")
    ] = "raspberry-pi-5",
    examples: Annotated[int, typer.Option(help="Examples per round.", min=1)] = 256,
    micro_batch_sizes: Annotated[
        str, typer.Option(help="Micro-batch sizes to choose from.")
    ] = "1,2,4,8,16",
    micro_batches: Annotated[
        str, typer.Option(help="Numbers of micro-batches to choose from.")
    ] = "1,2,4,8",
    schedule: Annotated[str, typer.Option(help="As scheduler.schedule: gpipe or 1f1b.")] = "gpipe",
    max_model_share: Annotated[
        float, typer.Option(help="As scheduler.max-model-share; 1: no cap on a device's share.")
    ] = 1.0,
    batch: Annotated[int, typer.Option(help="Examples per batch of the timed block.", min=1)] = 8,
    seconds: Annotated[
        float, typer.Option(help="Seconds to time a block; 0: do not.", min=0)
    ] = 1.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Print the costs of every block, this machine's speed, and the plan for a cluster.

    Exit code 1 if a cluster was named and the model does not fit it.
    """
    from rich.console import Console

    from collapipe_flwr.cluster.forecast import ModelChoice, build_model, forecast
    from collapipe_flwr.core.keys import assignments, read_assignments
    from collapipe_flwr.models import BatchShape
    from collapipe_flwr.reporting.cost_tables import as_json, show_forecast
    from collapipe_flwr.reporting.output import prepare, write_json
    from collapipe_flwr.scheduler.protocol import SchedulerConfig
    from collapipe_flwr.simulation.setting import whole_numbers

    if not assignments().holds(overrides):
        raise ConfigError(f"--overrides {assignments().says}, got {overrides!r}")
    prepare("--json", json_file)
    request = ModelChoice(
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
        schedule=schedule,
        max_model_share=max_model_share,
    )
    place = _cluster(cluster, devices, control_unit, examples)
    found = forecast(
        build_model(request),
        request.shape,
        place,
        settings,
        examples_at_once=batch,
        seconds=seconds,
    )
    show_forecast(found, Console())
    write_json(json_file, as_json(found))
    raise typer.Exit(1 if place is not None and found.plan is None else 0)


def _cluster(
    file: Path | None, devices: str, control_unit: str, examples: int
) -> ClusterProfile | None:
    from collapipe_flwr.cluster.profile import cluster_of_presets, profile_of
    from collapipe_flwr.config.cluster_file import read_cluster

    if file is not None and devices:
        raise ConfigError("give --cluster or --devices, not both")
    if file is not None:
        return profile_of(read_cluster(file), examples)
    kinds = [kind.strip() for kind in devices.split(",") if kind.strip()]
    return cluster_of_presets(kinds, control_unit, examples) if kinds else None
