"""How commands end: an error of ours is one sentence and exit code 1."""

from __future__ import annotations

import typer

from collapipe_flwr.core.errors import CollaPipeError


def run_commands(commands: typer.Typer) -> None:
    """Run ``commands``; a CollaPipeError becomes one sentence on stderr and exit code 1."""
    try:
        commands()
    except CollaPipeError as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(1) from error
