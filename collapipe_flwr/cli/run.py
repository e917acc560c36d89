"""``collapipe run`` and ``check-config``, and ``convert``, which makes models for them."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from collapipe_flwr.core.errors import mark_wrong_input
from collapipe_flwr.core.processes import exit_on_signals

Project = Annotated[Path, Argument(help="Folder of the Flower app.")]
RunConfig = Annotated[
    list[str] | None,
    Option(
        "--run-config",
        "-c",
        help="KEY=VALUE, several of them in one string, or a .toml file; may be repeated.",
    ),
]
FederationConfig = Annotated[
    Path | None,
    Option(help="TOML file with num-supernodes, client-resources-num-cpus, ..."),
]
OutputDir = Annotated[Path, Option(help="Folder for run directories.")]
Clusters = Annotated[
    list[Path] | None,
    Option(
        "--cluster",
        help="Train on the boards of this cluster file, from here and without Flower's simulation; "
        "one for each cluster.",
    ),
]
Resume = Annotated[Path | None, Option(help="Run directory to resume from its newest checkpoint.")]


def run(
    project: Project = Path("."),
    run_config: RunConfig = None,
    federation_config: FederationConfig = None,
    output_dir: OutputDir = Path("runs"),
    resume: Resume = None,
    cluster: Clusters = None,
    quiet: Annotated[
        bool, Option("--quiet", "-q", help="Print the run directory and errors only.")
    ] = False,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Print the whole log, tracebacks included.")
    ] = False,
) -> None:
    """Check the run, then run the app with `flwr run . --stream` on a private SuperLink.

    Exit code 2: something about the run is wrong, and nothing was started. Exit code 1: the run
    did not complete. The last line printed is the path of the run directory; `run.log` in it has
    all that Flower, Ray and the apps print.
    """
    from collapipe_flwr.federation.run.running import Attempt, launch_of
    from collapipe_flwr.reporting.screen import Screen

    screen = Screen(quiet=quiet, verbose=verbose)
    with mark_wrong_input():
        launch = launch_of(project, run_config, federation_config, output_dir, resume, cluster)
    attempt = Attempt(launch, screen)
    with exit_on_signals(attempt.stopping):
        attempt.check()
        summary = attempt.carry_out()
    screen.show_summary(summary)
    typer.echo(attempt.run_dir)


def stop(
    run_dir: Annotated[Path, Argument(help="Run directory.")],
    patience_s: Annotated[float, Option(help="Seconds to wait before it is killed.", min=0)] = 20.0,
) -> None:
    """Stop a run that still runs on this machine, however it was started.

    It ends as by Ctrl-C, and can be resumed. Exit code 0 also if it does not run.
    """
    from collapipe_flwr.reporting import stopping
    from collapipe_flwr.reporting.run_directory import read_summary

    with mark_wrong_input():
        process = stopping.find_stoppable(run_dir)
    if process is None:
        typer.echo(f"nothing to stop: no process of {run_dir} runs")
    else:
        say = partial(typer.echo, err=True)
        stopping.stop(run_dir, process, say, patience_s=patience_s)
    status = (read_summary(run_dir) or {}).get("status", "interrupted")
    typer.echo(f"{run_dir}: {status}")


def check_config(
    project: Project = Path("."),
    run_config: RunConfig = None,
    federation_config: FederationConfig = None,
    output_dir: OutputDir = Path("runs"),
    resume: Resume = None,
    cluster: Clusters = None,
    launch: Annotated[str, Option(hidden=True, help="All of this as JSON.")] = "",
) -> None:
    """Check what `collapipe run` would do, without starting anything.

    Run-config, data, model, output folder and the first plan. Exit code 2 and one sentence if
    something is wrong.
    """
    from collapipe_flwr.config.parsing import declared_config
    from collapipe_flwr.federation.run.first_look import look
    from collapipe_flwr.federation.run.launcher import Launch
    from collapipe_flwr.federation.run.running import launch_of

    given = project, run_config, federation_config, output_dir, resume, cluster
    gc.disable()  # a fifth of the time of what follows, which ends this process
    with mark_wrong_input():
        found = Launch.of_json(launch) if launch else launch_of(*given)
        if not launch:
            typer.echo("checking run-config, data, model and plan", err=True)
        os.chdir(found.app)  # as the run does: paths in the run-config are relative to the app
        values = {**declared_config(found.app), **found.settings}
        look(values)
        from collapipe_flwr.federation.run.preflight import check_launch
        from collapipe_flwr.host.daemon import hide_unused_libraries

        if not values.get("privacy.clip-norm"):  # whose account needs them
            hide_unused_libraries()  # a tenth of the rest; a check computes no metric
        typer.echo(check_launch(found))


def convert(
    file: Annotated[Path, Argument(help="GGUF file of an instruct or other language model.")],
    folder: Annotated[Path, Argument(help="New folder, for model.pretrained.")],
) -> None:
    """Convert a GGUF file to a checkpoint: tensors in bfloat16, tokenizer and chat template."""
    typer.echo(f"reading {file}", err=True)  # libraries take seconds to load
    from collapipe_flwr.models.gguf import convert_gguf

    weights = convert_gguf(file, folder)
    typer.echo(f"{folder}: {weights / 1e6:,.1f} million weights")
