"""``collapipe simulate``: scheduling policies in a simulated world."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def simulate(
    preset: Annotated[
        str | None, typer.Option(help="paper, one-strong or cellular; other options override it.")
    ] = None,
    clusters: Annotated[int | None, typer.Option(help="Number of clusters.")] = None,
    devices: Annotated[
        int | None, typer.Option(help="Devices per cluster, besides the control unit.")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="Encoder blocks of the model.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the model.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per example.")] = None,
    examples: Annotated[int | None, typer.Option(help="Examples per cluster.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds per episode.")] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option("--seeds", "--seed", help="0,1,2 or 100-119; may be repeated."),
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="Policies to compare: dssda,fedavg,...")
    ] = None,
    penalty_weight: Annotated[
        float | None, typer.Option(help="V of DSSDA: latency against energy queues.")
    ] = None,
    energy_budget: Annotated[
        str | None,
        typer.Option(
            help="1.8x an equal share of work, 30% of training alone, 500 joules, or none."
        ),
    ] = None,
    channel: Annotated[
        str | None, typer.Option(help="static, block-fading, mobility or trace:FILE.")
    ] = None,
    radio: Annotated[str | None, typer.Option(help="wifi or 5g.")] = None,
    kinds: Annotated[str | None, typer.Option(help="Device kinds to draw from.")] = None,
    devices_from: Annotated[
        Path | None, typer.Option(help="JSON or TOML file of clusters and device kinds.")
    ] = None,
    micro_batch_sizes: Annotated[str | None, typer.Option(help="Sizes to choose from.")] = None,
    micro_batches: Annotated[str | None, typer.Option(help="Counts to choose from.")] = None,
    codecs: Annotated[
        str | None, typer.Option(help="fp32,bf16,int8: DSSDA chooses hop by hop; else fp16.")
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe or 1f1b.")] = None,
    memory_margin: Annotated[
        float | None, typer.Option(help="Share of each device's memory that plans leave free.")
    ] = None,
    max_model_share: Annotated[
        float | None, typer.Option(help="Largest share of the model's memory on one device.")
    ] = None,
    best_batches: Annotated[
        bool | None,
        typer.Option(
            "--best-batches/--middle-batches",
            help="Fixed rules take the best micro-batches, or the middle of the grid.",
        ),
    ] = None,
    half_duplex: Annotated[
        bool | None, typer.Option("--half-duplex", help="Links carry one direction at a time.")
    ] = None,
    edge_shared: Annotated[
        bool | None,
        typer.Option("--edge-shared", help="Clusters share the edge's computing power."),
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option("--recompute", help="Recompute activations instead of keeping them."),
    ] = None,
    replicas: Annotated[
        bool | None,
        typer.Option(
            "--replicas",
            help="DSSDA lets devices share a stage; what is possible is without replicas.",
        ),
    ] = None,
    profile_error: Annotated[
        float | None, typer.Option(help="Largest relative error of the profiles schedulers see.")
    ] = None,
    profile_error_kind: Annotated[
        str | None, typer.Option(help="noise: new every round; bias: fixed per device.")
    ] = None,
    profile_delay: Annotated[
        int | None, typer.Option(help="Age in rounds of the snapshots schedulers see.")
    ] = None,
    truth_error: Annotated[
        float | None,
        typer.Option(help="Standard deviation of ln(true / believed) speed and power of devices."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write results to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for plots (needs matplotlib).")] = None,
) -> None:
    """Let scheduling policies plan rounds in a simulated world; nothing is trained."""
    options = dict(locals())  # by name, as they were given
    from collapipe_flwr.reporting.simulation import run_simulation
    from collapipe_flwr.simulation.setting import overridden
    from collapipe_flwr.simulation.setting import preset as preset_setting

    options["seeds"] = ",".join(seeds) if seeds else None
    setting = overridden(preset_setting(preset), **options)
    run_simulation(setting, json_file=json_file, plot_dir=plot)
