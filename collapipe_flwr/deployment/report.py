"""What a deployment came to: a table, a sentence per failure, and how to train now."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from collapipe_flwr.core.durable import write_text
from collapipe_flwr.deployment import roles
from collapipe_flwr.deployment.deploy import Deployed
from collapipe_flwr.deployment.inventory import EDGE, SERVER, Inventory, Machine
from collapipe_flwr.deployment.steps import Outcome
from collapipe_flwr.reporting.output import number_table
from collapipe_flwr.reporting.tables import show_measurements


def show(inventory: Inventory, deployed: Deployed, console: Console) -> None:
    """Print the table of the check, that of the deployment, and one sentence per failure."""
    for check in deployed.checks:
        show_measurements(check, console)
    table = number_table(
        f"deployment of {', '.join(inventory.clusters)}", ("machine", "host", "came to"), ()
    )
    for machine in inventory.machines:
        table.add_row(machine.name, machine.host, came_to(deployed, machine))
    console.print(table)
    for failure in deployed.failures:
        sentence = f"{failure.machine}: {failure.step}: {failure.why}"
        console.print(sentence, style="red", highlight=False, markup=False, soft_wrap=True)
    outcomes = {result.outcome for result in deployed.results}
    if outcomes <= {Outcome.KEPT}:
        console.print("nothing was changed: all of it was done already", style="green")


def came_to(deployed: Deployed, machine: Machine) -> str:
    """A few words about one machine."""
    if failed := deployed.of(machine, Outcome.FAILED):
        return f"[red]failed at {failed[0].step}[/red]"
    did = deployed.of(machine, Outcome.DID)
    would = deployed.of(machine, Outcome.WOULD)
    if would:
        return f"{len(would)} steps to do"
    return f"[green]{len(did)} steps done[/green]" if did else "[green]nothing to do[/green]"


def next_steps(inventory: Inventory, deployed: Deployed, path: Path, console: Console) -> None:
    """Leave what a run needs beside the inventory, and print how to start one from here."""
    folder = path.parent / f"{inventory.name}-run"
    folder.mkdir(exist_ok=True)
    for name, text in (("ca.pem", deployed.ca_pem), ("boards.toml", run_config(inventory))):
        file = folder / name
        if not file.exists() or file.read_text() != text:
            write_text(file, text)
    superlink = roles.address_of(inventory.one(SERVER))
    console.print(
        f"to train, in the sources: flwr run . {inventory.name} --stream --run-config "
        f"{folder / 'boards.toml'}\nwith this in ~/.flwr/config.toml:\n"
        f'[superlink.{inventory.name}]\naddress = "{superlink}"\n'
        f'root-certificates = "{(folder / "ca.pem").resolve()}"',
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def run_config(inventory: Inventory) -> str:
    """The keys that runs on this cluster have in common; files are those of the server."""
    certs = f"{roles.folder_of(inventory.one(SERVER))}/certs"
    values = {
        "clusters": len(inventory.clusters),
        "edge.address": f'"{roles.address_of(inventory.one(EDGE))}"',
        "edge.certificate-name": '"edge"',
        "edge.tls-ca": f'"{certs}/ca.pem"',
        "edge.tls-cert": f'"{certs}/server.pem"',
        "edge.tls-key": f'"{certs}/server.key"',
        "world.channel": '"static"',
        "output-dir": '"/var/lib/collapipe/runs"',
    }
    return "".join(f"{name} = {value}\n" for name, value in values.items())
