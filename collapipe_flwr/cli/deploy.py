"""``collapipe deploy``: machines that ssh reaches become a cluster that trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collapipe_flwr.deployment.deploy import Deployed
    from collapipe_flwr.deployment.ssh import Result


def deploy(
    inventory: Annotated[Path, typer.Argument(help="The machines and their roles (TOML).")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look at the machines, and print what would be done.")
    ] = False,
    accept_new: Annotated[
        bool,
        typer.Option("--accept-new", help="Believe host keys of machines that ssh never met."),
    ] = False,
    deadline_s: Annotated[
        float, typer.Option(help="Seconds for each phase on a machine.", min=1)
    ] = 1800.0,
) -> None:
    """Install, join, start services and check, on all machines over ssh.

    What is done already is left alone, so deploy again after a failure, or with more machines.
    Exit code 1 if something needs fixing.
    """
    from rich.console import Console

    from collapipe_flwr.deployment.deploy import Deployment, DeploySettings, next_steps, show
    from collapipe_flwr.deployment.inventory import read_inventory
    from collapipe_flwr.deployment.ssh import Outcome

    wanted, console = read_inventory(inventory), Console()
    settings = DeploySettings(dry=dry_run, accept_new=accept_new, deadline_s=deadline_s)

    def told(result: Result) -> None:
        if result.outcome is not Outcome.KEPT:
            line = f"{result.machine}: {result.outcome.value} {result.step}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    deployed = Deployment(wanted, settings, told).run()
    show(wanted, deployed, console)
    if not dry_run and not deployed.failures:
        next_steps(wanted, deployed, inventory, console)
    raise typer.Exit(1 if _needs_fixing(deployed) else 0)


def _needs_fixing(deployed: Deployed) -> bool:
    return bool(deployed.failures or any(check.faults for check in deployed.checks))
