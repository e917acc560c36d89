"""``collapipe bench`` or ``python -m benchmarks``: measurements, one command per part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from collapipe_flwr.cli import run_commands

app = typer.Typer(
    name="bench",
    help="Measure parts of CollaPipe on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("scheduler")
def bench_scheduler(
    clusters: Annotated[str, typer.Option(help="Numbers of clusters.")] = "10,100,1000,10000",
    instances: Annotated[int, typer.Option(help="Small instances for brute force.")] = 500,
    search: Annotated[
        str, typer.Option(help="Sizes and seeds to compare with rivals of the search.")
    ] = "4x6x12=0-19,5x4x12=0-19,8x5x24=0-19,100x10x24=0-1",
    sections: Annotated[
        str, typer.Option(help="What to measure; prices or bounds alone.")
    ] = "decisions,radio,optimality,search",
    worlds: Annotated[str, typer.Option(help="Of sections prices and bounds.")] = "paper,neutral",
    seeds: Annotated[str, typer.Option(help="Of sections prices and bounds.")] = "20260-20279",
    rounds: Annotated[int, typer.Option(help="Of sections prices and bounds.", min=1)] = 50,
    schedule: Annotated[
        str, typer.Option(help="Of sections prices and bounds: gpipe, 1f1b.")
    ] = "gpipe",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
) -> None:
    """Time decisions and solvers on one thread; measure gaps to brute force and to rivals."""
    for name in ("OMP", "OPENBLAS", "MKL", "RAYON"):  # read when numpy and solvers are loaded
        os.environ[f"{name}_NUM_THREADS"] = "1"

    from benchmarks.scheduling.decisions import bench_plan
    from benchmarks.scheduling.prices import run_price_bench
    from benchmarks.scheduling.report import run_bench
    from benchmarks.scheduling.search_gaps import read_sizes
    from collapipe_flwr.simulation.setting import seeds_of, whole_numbers

    if sections in ("prices", "bounds"):
        named = worlds.split(",")
        run_price_bench(sections, named, seeds_of(seeds), rounds, schedule, json_file)
        return
    sizes, names = whole_numbers("clusters", clusters), [s.strip() for s in sections.split(",")]
    run_bench(bench_plan(sizes, instances, read_sizes(search), names), json_file)


@app.command("pipeline")
def bench_pipeline(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
    quick: Annotated[bool, typer.Option(help="A look at small sizes, in minutes.")] = False,
    turns: Annotated[
        int, typer.Option(help="Turns of each side per case; --quick takes 3.", min=3)
    ] = 51,
) -> None:
    """Time the data plane beside torch.distributed.pipelining; measure memory and the wire."""
    from benchmarks.data_plane.duel import Pace
    from benchmarks.data_plane.pipeline import BenchPlan, quick_plan
    from benchmarks.data_plane.report import run_pipeline_bench

    run_pipeline_bench(quick_plan() if quick else BenchPlan(pace=Pace(turns=turns)), json_file)


@app.command("codecs")
def bench_codecs(
    steps: Annotated[int, typer.Option(help="Optimiser steps per codec.", min=10)] = 600,
    seeds: Annotated[int, typer.Option(help="Trainings per codec.", min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
) -> None:
    """Train the built-in task once per link codec: loss, metric and bytes."""
    from benchmarks.data_plane.codecs import CodecTask
    from benchmarks.data_plane.report import run_codec_bench

    run_codec_bench(CodecTask(steps=steps, seeds=tuple(range(7, 7 + seeds))), json_file)


@app.command("memory")
def bench_memory(
    models: Annotated[str, typer.Option(help="Which models.")] = "bert-12x768,llama-3.2-1b",
    modes: Annotated[
        str, typer.Option(help="full, lora, lora-bfloat16, lora-int8, lora-nf4.")
    ] = "full,lora",
    roles: Annotated[
        str, typer.Option(help="Which processes; device alone: one stage of a large model.")
    ] = "whole,control-unit,control-unit-and-edge,device,edge",
    limit_gib: Annotated[float, typer.Option(help="Skip processes that need more.")] = 21.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
) -> None:
    """Peak memory of control unit, devices and edge beside a client with the whole model."""
    from benchmarks.memory.footprint import read_modes, read_roles, read_sizes
    from benchmarks.memory.report import run_memory_bench

    run_memory_bench(read_sizes(models), read_modes(modes), read_roles(roles), limit_gib, json_file)


@app.command("testbed")
def bench_testbed(
    devices: Annotated[
        str, typer.Option(help="Kinds of boards; `,` between them, `;` between clusters.")
    ] = "",
    policies: Annotated[
        str, typer.Option(help="Which policies.")
    ] = "dssda,fedavg,splitfed,uniform,throughput",
    rounds: Annotated[int, typer.Option(help="Rounds of a run.", min=4)] = 5,
    repetitions: Annotated[int, typer.Option(help="Runs of each policy.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Of the first repetition.", min=0)] = 500,
    examples: Annotated[int, typer.Option(help="Of a cluster in a round.", min=16)] = 256,
    target: Annotated[float, typer.Option(help="Accuracy to reach.", min=0.0, max=1.0)] = 0.7,
    options: Annotated[
        str, typer.Option(help="KEY=VALUE of all policies, as for another task or model.")
    ] = "",
    uplink_mbit: Annotated[
        float, typer.Option(help="That all boards send, control units too; 0: each as it does.")
    ] = 0.0,
    loss: Annotated[
        float, typer.Option(help="Share of packets that get lost.", min=0.0, max=0.5)
    ] = 0.0,
    slow_down: Annotated[
        float, typer.Option(help="How many times slower than boards; 0: as this host needs.", min=0)
    ] = 0.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
) -> None:
    """Run policies on real daemons behind shaped links, as slow as boards, and measure rounds."""
    os.environ["OMP_NUM_THREADS"] = "1"  # this host's speed is that of one thread

    from benchmarks.testbed.boards import DEVICES, read_clusters
    from benchmarks.testbed.report import run_testbed
    from benchmarks.testbed.training import Training, read_policies

    training = Training(
        policies=read_policies(policies, options),
        rounds=rounds,
        repetitions=repetitions,
        seed=seed,
        examples=examples,
        target=target,
        options=options,
        loss=loss,
    )
    clusters = read_clusters(devices or DEVICES, 1e6 * uplink_mbit)
    run_testbed(clusters, training, slow_down, json_file)


@app.command("round")
def bench_round(
    models: Annotated[str, typer.Option(help="Which models.")] = "demo,bert-6x256",
    rounds: Annotated[int, typer.Option(help="Timed rounds per side.", min=1)] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
) -> None:
    """Time deployed rounds with and without a resident control unit, beside plain Flower."""
    from benchmarks.rounds.report import run_round_bench

    run_round_bench([name.strip() for name in models.split(",")], rounds, json_file)


@app.command("round-anatomy")
def bench_round_anatomy(
    models: Annotated[str, typer.Option(help="Which models, without --slowed.")] = "demo,board",
    rounds: Annotated[int, typer.Option(help="Counted rounds per case.", min=1)] = 10,
    slowed: Annotated[
        bool, typer.Option(help="Wall-clock seconds on the boards and links of bench testbed.")
    ] = False,
    devices: Annotated[
        str, typer.Option(help="Kinds of boards, with --slowed, as of bench testbed.")
    ] = "",
    examples: Annotated[
        int, typer.Option(help="Of a cluster in a round, with --slowed.", min=16)
    ] = 256,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
) -> None:
    """Split the seconds of devices in a round: products, Python, frames, bubbles and others."""
    os.environ["OMP_NUM_THREADS"] = "1"

    if slowed:
        from benchmarks.rounds.slowed import run_slowed
        from benchmarks.testbed.boards import DEVICES, read_clusters

        run_slowed(read_clusters(devices or DEVICES), rounds, examples, json_file)
        return

    from benchmarks.rounds.anatomy import run_anatomy

    run_anatomy([name.strip() for name in models.split(",")], rounds, json_file)


@app.command("privacy")
def bench_privacy(
    studies: Annotated[
        str, typer.Option(help="Some of banking77, instructions and noise.")
    ] = "banking77,instructions",
    data: Annotated[Path, typer.Option(help="Folder of data sets, see docs/privacy.md.")] = Path(
        "data"
    ),
    smollm2: Annotated[Path, typer.Option(help="Checkpoint by `collapipe convert`.")] = Path(
        "smollm2"
    ),
    at_most: Annotated[
        float, typer.Option(help="Share of tokens read to find a depth for.", min=0.0, max=1.0)
    ] = 0.5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
) -> None:
    """Attack frames and updates of real trainings: what devices, edge and server read."""
    from benchmarks.privacy.report import run_privacy_bench
    from benchmarks.privacy.study import read_studies

    run_privacy_bench(read_studies(studies, data, smollm2), at_most, json_file)


@app.command("frozen-blocks")
def bench_frozen_blocks(
    epochs: Annotated[int, typer.Option(help="Rounds of each side.", min=4)] = 8,
    frozen: Annotated[int, typer.Option(help="Lower blocks of six, not trained.", min=1)] = 4,
    examples: Annotated[int, typer.Option(help="Texts of an epoch.", min=32)] = 256,
    seed: Annotated[int, typer.Option(help="Of texts and their order.", min=0)] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
) -> None:
    """Train with frozen lower blocks, computed at every visit or once: seconds, joules, bytes."""
    import json

    from rich.console import Console

    from benchmarks.frozen_blocks import measure, summarise
    from collapipe_flwr.core.processes import exit_on_signals
    from collapipe_flwr.reporting.output import prepare, write_json

    prepare("--json", json_file)
    with exit_on_signals(), Console(stderr=True).status("epochs") as status:
        found = measure(epochs, frozen, examples, seed, status.update)
    write_json(json_file, found)
    typer.echo(json.dumps(summarise(found), indent=1))


@app.command("demo")
def bench_demo(
    project: Annotated[Path, typer.Argument(help="Folder of the Flower app.")] = Path("."),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
) -> None:
    """Time, disk and memory of the demo, with all its processes; prints the README's row."""
    from dataclasses import asdict

    from rich.console import Console

    from benchmarks.demo import measure_demo, readme_row
    from collapipe_flwr.reporting.output import prepare, write_json

    prepare("--json", json_file)
    with Console(stderr=True).status("the demo"):
        cost = measure_demo(project.resolve())
    write_json(json_file, asdict(cost))
    typer.echo(readme_row(cost))


if __name__ == "__main__":
    run_commands(app)
