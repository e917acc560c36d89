"""``collapipe``: arguments only; what a command does lives in the package below."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from collapipe_flwr.core.errors import CollaPipeError

app = typer.Typer(
    name="collapipe",
    help="Clusters of weak devices train one transformer as a single Flower client.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
benches = typer.Typer(help="Measure parts of CollaPipe on this machine.", no_args_is_help=True)
app.add_typer(benches, name="bench")


@app.command()
def run(
    project: Annotated[Path, typer.Argument(help="Folder of the Flower app.")] = Path("."),
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            "--run-config", "-c", help="KEY=VALUE or a .toml file; may be given several times."
        ),
    ] = None,
    federation_config: Annotated[
        Path | None, typer.Option(help="TOML with num-supernodes, client-resources-num-cpus, ...")
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Where run directories go.")] = Path("runs"),
) -> None:
    """Run the app with `flwr run . --stream` on a private SuperLink and exit by its outcome.

    Unlike plain `flwr run --stream`, the exit code is 1 when the run did not complete.
    The last line printed is the path of the run directory.
    """
    from collapipe_flwr.federation.launcher import Launch, run_app
    from collapipe_flwr.federation.overrides import check_overrides, read_overrides
    from collapipe_flwr.reporting.console import summary_table
    from collapipe_flwr.reporting.run_directory import read_summary

    overrides = read_overrides(run_config or ())
    check_overrides(project, overrides)
    launch = Launch(
        app=project.resolve(),
        output_dir=output_dir.resolve(),
        run_name=time.strftime("%Y%m%d-%H%M%S"),
        run_config=overrides,
        federation_config=federation_config,
    )
    first_error = run_app(launch)
    summary = read_summary(launch.run_dir)
    if summary is None:
        raise CollaPipeError(first_error or "the run ended early; the reason stands above")
    Console().print(summary_table(summary))
    if summary["status"] != "completed":
        raise CollaPipeError(f"the run failed: {summary['reason']} (see {launch.run_dir})")
    typer.echo(launch.run_dir)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="LABEL=RUN_DIRECTORY, one per run.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw the curves into this file.")] = None,
) -> None:
    """Print learning curves and costs of several runs side by side, as Markdown."""
    from collapipe_flwr.reporting.comparison import draw, markdown, read_curves

    curves = read_curves(runs)
    if plot is not None:
        draw(curves, plot)
    typer.echo(markdown(curves), nl=False)


@app.command()
def edge(
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 takes a free one.")] = (
        "127.0.0.1:50061"
    ),
) -> None:
    """Serve decoders (or heads) to clusters until SIGTERM or Ctrl-C.

    Point a run at it with the run-config key `edge.address`. Plain text: only for loopback and
    networks that you trust.
    """
    import signal
    import threading

    from collapipe_flwr.edge.server import EdgeServer
    from collapipe_flwr.edge.service import EdgeService

    stop = threading.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: stop.set())
    with EdgeServer(listen, EdgeService()) as server:
        typer.echo(f"edge server on {server.address}")
        stop.wait()


@app.command()
def simulate(
    preset: Annotated[
        str | None, typer.Option(help="paper, one-strong or cellular; other options change it.")
    ] = None,
    clusters: Annotated[int | None, typer.Option(help="Number of clusters.")] = None,
    devices: Annotated[int | None, typer.Option(help="Devices of each, without the CU.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Encoder blocks of the model.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the model.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of an example.")] = None,
    examples: Annotated[int | None, typer.Option(help="Examples of each cluster.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of each episode.")] = None,
    seeds: Annotated[
        list[str] | None, typer.Option("--seeds", "--seed", help="0,1,2 or given repeatedly.")
    ] = None,
    policies: Annotated[str | None, typer.Option(help="dssda,fedavg,...")] = None,
    penalty_weight: Annotated[float | None, typer.Option(help="V of DSSDA.")] = None,
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
    schedule: Annotated[str | None, typer.Option(help="gpipe or 1f1b.")] = None,
    memory_margin: Annotated[
        float | None, typer.Option(help="Share of every memory that plans leave free.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for plots (needs matplotlib).")] = None,
) -> None:
    """Let scheduling policies plan rounds in a simulated world; nothing is trained."""
    from collapipe_flwr.experiments.choices import Choices
    from collapipe_flwr.experiments.presets import preset as preset_setting
    from collapipe_flwr.reporting.simulating import Outputs, run_simulation

    chosen = Choices(
        clusters=clusters,
        devices=devices,
        blocks=blocks,
        width=width,
        tokens=tokens,
        examples=examples,
        rounds=rounds,
        seeds=",".join(seeds) if seeds else None,
        policies=policies,
        penalty_weight=penalty_weight,
        energy_budget=energy_budget,
        channel=channel,
        radio=radio,
        kinds=kinds,
        devices_from=devices_from,
        micro_batch_sizes=micro_batch_sizes,
        micro_batches=micro_batches,
        schedule=schedule,
        memory_margin=memory_margin,
    )
    setting = chosen.over(preset_setting(preset))
    run_simulation(setting, Outputs(json_file=json_file, plot_dir=plot))


@benches.command("scheduler")
def bench_scheduler(
    clusters: Annotated[str, typer.Option(help="Numbers of clusters.")] = "10,100,1000,10000",
    instances: Annotated[int, typer.Option(help="Small instances for brute force.")] = 500,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results.")] = None,
) -> None:
    """Time decisions and solvers on one thread, and measure gaps to brute force."""
    for name in ("OMP", "OPENBLAS", "MKL", "RAYON"):  # read when numpy and solvers are loaded
        os.environ[f"{name}_NUM_THREADS"] = "1"

    from collapipe_flwr.experiments.choices import whole_numbers
    from collapipe_flwr.reporting.simulating import run_bench

    run_bench(whole_numbers("clusters", clusters), instances, json_file)


def main() -> None:
    """Entry point: our errors become one sentence and exit code 1."""
    try:
        app()
    except CollaPipeError as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
