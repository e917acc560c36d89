"""``collapipe``: arguments only; what a command does lives in the package.

Commands import what they need when they run, so that a small board pays for nothing else.
"""

from __future__ import annotations

import typer

from collapipe_flwr.cli.bench import bench
from collapipe_flwr.cli.cluster import certs, clusters
from collapipe_flwr.cli.generate import generate
from collapipe_flwr.cli.hosting import control_unit, device, edge
from collapipe_flwr.cli.profile import profile
from collapipe_flwr.cli.run import compare, run
from collapipe_flwr.cli.simulate import simulate
from collapipe_flwr.core.errors import CollaPipeError

app = typer.Typer(
    name="collapipe",
    help="Clusters of weak devices train one transformer as a single Flower client.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (run, compare, edge, control_unit, generate, device, certs, profile, simulate):
    app.command()(command)
# Arguments, `--help` among them, are for the app in benchmarks/.
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)(bench)
app.add_typer(clusters, name="cluster")


def run_commands(commands: typer.Typer) -> None:
    """Run ``commands``; a CollaPipeError becomes one sentence on stderr and exit code 1."""
    try:
        commands()
    except CollaPipeError as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(1) from error


def main() -> None:
    """Entry point of ``collapipe``."""
    run_commands(app)
