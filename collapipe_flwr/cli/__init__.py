"""``collapipe``: arguments only; what a command does lives in the package.

Commands import what they need when they run, so that a small board pays for nothing else.
"""

from __future__ import annotations

import errno
import math
import os
import sys
from typing import Annotated, Any

import typer
from typer import Option

from collapipe_flwr.cli.cluster import clusters
from collapipe_flwr.cli.estimates import bench, profile, simulate
from collapipe_flwr.cli.generate import chat, generate, serve
from collapipe_flwr.cli.hosting import control_unit, device, edge, supernode
from collapipe_flwr.cli.joining import certs, deploy, join
from collapipe_flwr.cli.report import compare, report, watch
from collapipe_flwr.cli.run import check_config, convert, run, stop
from collapipe_flwr.core.errors import CollaPipeError, ConfigError
from collapipe_flwr.core.imports import list_versions

app = typer.Typer(
    name="collapipe",
    help="Clusters of weak devices train one transformer as a single Flower client.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
COMMANDS = (
    *(run, stop, check_config, watch, report, compare, edge, control_unit),
    *(convert, generate, chat, serve, device, join, certs, deploy, profile, simulate),
)
for command in COMMANDS:
    app.command()(command)
# Arguments, `--help` among them, are for Flower's program and for the app in benchmarks/.
for passes_on in (supernode, bench):
    app.command(
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )(passes_on)
app.add_typer(clusters, name="cluster")


_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAYS_OUT = {  # of errors that may meet any file
    **dict.fromkeys(_FULL, "make room"),
    errno.EACCES: "change its rights, or name another",
    errno.EPERM: "change its rights, or name another",
    errno.EROFS: "name a place that can be written",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "name another path",
}


def run_commands(commands: typer.Typer) -> None:
    """Run ``commands``; a CollaPipeError becomes one sentence on stderr and its exit code.

    So does a full disk, or a file that may not be used. No option of theirs is infinite or not a
    number.
    """
    try:
        command = typer.main.get_command(commands)
        _adapt(command)
        command()
    except KeyboardInterrupt:  # before the command has begun
        raise SystemExit(130) from None
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop"):  # of pathlib's, up to Python 3.12
            raise
        typer.secho(f"Error: {error}; name another path", fg=typer.colors.RED, err=True)
        raise SystemExit(2) from error
    except CollaPipeError as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(error.exit_code) from error
    except OSError as error:
        if error.errno not in _WAYS_OUT:
            raise
        where = f"{error.filename}: " if error.filename else ""
        typer.secho(f"Error: {where}{error.strerror}; {_WAYS_OUT[error.errno]}", err=True)
        if error.errno in _FULL:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what waits to be printed at exit
        raise SystemExit(1) from error


def _adapt(command: Any) -> None:
    """Let numbers of a command's options, and of those below it, be finite.

    A misspelt command gets one suggestion where click and typer each have theirs.
    """
    exceptions = sys.modules[typer.BadParameter.__module__]  # click's, whoever brings it
    command.suggest_commands = not hasattr(exceptions, "NoSuchCommand")
    for parameter in command.params:
        if parameter.type.name.startswith("float"):
            parameter.callback = _require_finite
    for below in getattr(command, "commands", {}).values():
        _adapt(below)


def _require_finite(context: Any, parameter: Any, value: float | None) -> float | None:
    del context
    if value is not None and not math.isfinite(value):
        raise ConfigError(f"{parameter.opts[0]} must be a finite number, got {value}")
    return value


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(", ".join(f"{name} {version}" for name, version in list_versions().items()))
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        Option("--version", help="Show versions and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Clusters of weak devices train one transformer as a single Flower client."""
    del version


def main() -> None:
    """Run the command line; the entry point of ``collapipe``."""
    run_commands(app)
