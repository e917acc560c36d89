"""Deploys to all machines of an inventory side by side, up to a checked cluster, and reports it."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from collapipe_flwr.cluster.profile import Measurements
from collapipe_flwr.core.durable import write_text
from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.core.json_codec import from_json
from collapipe_flwr.deployment import roles, ssh
from collapipe_flwr.deployment.inventory import (
    CONTROL_UNIT,
    DEVICE,
    EDGE,
    SERVER,
    Inventory,
    Machine,
    MachineRole,
)
from collapipe_flwr.deployment.ssh import Outcome, Result, SshStep, read_results, write_script
from collapipe_flwr.reporting.output import number_table
from collapipe_flwr.reporting.tables import show_measurements

T = TypeVar("T")
_AT_ONCE = 32
# Of runs; who trains may choose others.
_DEFAULTS = {"world.channel": '"static"', "output-dir": '"/var/lib/collapipe/runs"'}


@dataclass(kw_only=True)
class Deployment:
    """Deploys an inventory, and holds the results of all steps, and of the check of each cluster.

    A ``dry`` one looks at the machines and changes nothing. ``deadline_s`` is for each phase on a
    machine; ``accept_new``: see `ssh.run`. ``on_result`` is called with each step when it ends.
    """

    inventory: Inventory
    dry: bool = False
    accept_new: bool = False
    deadline_s: float = 1800.0
    on_result: Callable[[Result], object] = lambda _: None
    results: list[Result] = field(default_factory=list)
    checks: list[Measurements] = field(default_factory=list)
    ca_pem: str = ""
    unlisted: list[tuple[str, str]] = field(default_factory=list)  # cluster, member

    @property
    def failures(self) -> list[Result]:
        """One for each machine that failed."""
        return [result for result in self.results if result.outcome is Outcome.FAILED]

    def results_of(self, machine: Machine, outcome: Outcome) -> list[Result]:
        """Return the results of a machine with this outcome."""
        return [r for r in self.results if r.machine == machine.name and r.outcome is outcome]

    def run(self) -> None:
        """Run all phases; a machine that fails is left out of the next ones."""
        inventory, unit = self.inventory, self.inventory.registrar
        self._run_phase(inventory.machines, lambda m: list(roles.prepare_machine(inventory, m)))
        self._run_phase([unit], lambda _: list(roles.make_clusters(inventory)))
        if self._has_failed(unit):
            why = f"waits for the control unit on {unit.host}: deploy again"
            for machine in self._list_healthy():
                self._fail(machine, "cluster", why)
            return
        self._join()
        self._run_phase(inventory.machines, lambda m: list(roles.serve_roles(inventory, m)))
        if not self.dry and not self._has_failed(unit):
            self._check()

    def _join(self) -> None:
        """Admit the machines that have not joined yet, each by a token of its role."""
        newcomers = self._find_newcomers()
        if self.dry:
            for machine, role in newcomers:
                name = roles.join_cluster(role).name
                self._note(Result(machine=machine.name, step=name, outcome=Outcome.WOULD))
            return
        alike = Counter((role.cluster, role.kind) for _, role in newcomers)
        first = {(role.cluster, role.kind): role for _, role in reversed(newcomers)}
        tokens = {which: self._draw_token(first[which], alike[which]) for which in sorted(alike)}

        def steps(machine: Machine, *, dialling: bool) -> list[SshStep]:
            mine = [(r, tokens[r.cluster, r.kind]) for m, r in newcomers if m is machine]
            mine = [(role, token) for role, token in mine if role.dial is dialling]
            return [roles.join_cluster(role, token) for role, token in mine if token]

        for dialling in (False, True):  # a device dials a control unit that has joined
            which = partial(steps, dialling=dialling)
            self._run_phase([m for m in self.inventory.machines if which(m)], which)

    def _find_newcomers(self) -> list[tuple[Machine, MachineRole]]:
        """Find roles without the files of a member, on the machines that have not failed."""

        def find_missing(machine: Machine) -> list[tuple[Machine, MachineRole]]:
            others = [role for role in machine.roles if not self.inventory.keeps_ca(role)]
            steps = [roles.join_cluster(role) for role in others]
            found = self._run_steps(machine, steps, dry=True)
            would = {result.step for result in found if result.outcome is Outcome.WOULD}
            for result in found:
                if result.outcome is not Outcome.WOULD:
                    self._note(result)
            return [(machine, r) for r, s in zip(others, steps, strict=True) if s.name in would]

        return [
            pair
            for found in self._run_everywhere(self._list_healthy(), find_missing)
            for pair in found
        ]

    def _draw_token(self, role: MachineRole, members: int) -> str | None:
        """Draw a token for so many members in a role of its cluster; None if that fails."""
        unit = self.inventory.registrar
        with self._note_errors(unit, f"token for {role.kind} of {role.cluster}"):
            words = self._run(unit, roles.write_token_script(self.inventory, role, members)).split()
            return words[words.index("join") + 1] if "join" in words[:-1] else None
        return None

    def _check(self) -> None:
        inventory, unit = self.inventory, self.inventory.registrar
        with self._note_errors(unit, "check"):
            self._run(unit, roles.write_settle_script(inventory))
            folder = roles.folder_of(inventory.one(CONTROL_UNIT))
            self.ca_pem = self._run(unit, f"cat {folder}/certs/ca.pem")
            changed = any(result.outcome is Outcome.DID for result in self.results)
            for machine, role in inventory.control_units:
                if not self._has_failed(machine):
                    with self._note_errors(machine, "check"):
                        self._check_one(machine, role, keep=changed)

    def _check_one(self, unit: Machine, role: MachineRole, *, keep: bool) -> None:
        """Check a cluster; raises LinkError."""
        text = self._run(unit, roles.write_check_script(self.inventory, role, keep=keep))
        check = from_json(Measurements, text, "what the check measured")
        self.checks.append(check)
        there = {member.name for member in check.members}
        listed = {its.name for machine in self.inventory.machines for its in machine.roles}
        self.unlisted += [(role.cluster, name) for name in sorted(there - listed)]
        for machine in self._list_healthy():
            mine = machine.role(DEVICE)
            if mine is not None and mine.cluster == role.cluster and mine.name not in there:
                self._fail(
                    machine,
                    "check",
                    f"{mine.name} was removed from {role.cluster}: take it out of the "
                    f"inventory, or delete {roles.folder_of(mine)} there and deploy again",
                )

    def _run_phase(
        self, machines: Iterable[Machine], steps: Callable[[Machine], Sequence[SshStep]]
    ) -> None:
        def one(machine: Machine) -> None:
            for result in self._run_steps(machine, steps(machine), dry=self.dry):
                self._note(result)

        self._run_everywhere([m for m in machines if not self._has_failed(m)], one)

    def _run_steps(self, machine: Machine, steps: Sequence[SshStep], *, dry: bool) -> list[Result]:
        """Run steps on a machine; returns a failed result if ssh fails."""
        if not steps:
            return []
        try:
            text = self._run(machine, write_script(steps, dry=dry))
            return read_results(text, machine.name, steps)
        except LinkError as error:
            why = str(error)
            return [Result(machine=machine.name, step="ssh", outcome=Outcome.FAILED, why=why)]

    def _run_everywhere(self, machines: Iterable[Machine], do: Callable[[Machine], T]) -> list[T]:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="deploy") as pool:
            return list(pool.map(do, machines))

    def _run(self, machine: Machine, script: str) -> str:
        """Run a script on a machine; returns its output. Raises LinkError."""
        config, deadline_s = self.inventory.ssh_config, self.deadline_s
        return ssh.run(
            machine, script, deadline_s=deadline_s, config=config, accept_new=self.accept_new
        )

    def _list_healthy(self) -> list[Machine]:
        return [machine for machine in self.inventory.machines if not self._has_failed(machine)]

    def _has_failed(self, machine: Machine) -> bool:
        return bool(self.results_of(machine, Outcome.FAILED))

    @contextmanager
    def _note_errors(self, machine: Machine, step: str) -> Iterator[None]:
        """Note a LinkError of the body as a failed step of the machine."""
        try:
            yield
        except LinkError as error:
            self._fail(machine, step, str(error))

    def _fail(self, machine: Machine, step: str, why: str) -> None:
        self._note(Result(machine=machine.name, step=step, outcome=Outcome.FAILED, why=why))

    def _note(self, result: Result) -> None:
        self.results.append(result)
        self.on_result(result)


def show(deployed: Deployment, console: Console) -> None:
    """Print the tables of the checks and of the deployment, and one sentence per failure."""
    for check in deployed.checks:
        show_measurements(check, console)
    table = number_table(
        f"deployment of {', '.join(deployed.inventory.clusters)}",
        ("machine", "host", "result"),
        (),
    )
    for machine in deployed.inventory.machines:
        table.add_row(machine.name, machine.host, summarise(deployed, machine))
    console.print(table)
    for failure in deployed.failures:
        sentence = f"{failure.machine}: {failure.step}: {failure.why}"
        console.print(sentence, style="red", soft_wrap=True)
    where = deployed.inventory.registrar.host
    several = len(deployed.inventory.clusters) > 1
    for cluster, name in deployed.unlisted:
        which = f" --cluster {cluster}" if several else ""
        console.print(
            f"{name} is a member of {cluster}, and not in the inventory: if it is to leave, on "
            f"{where}: sudo collapipe cluster remove {name}{which}",
            style="yellow",
            soft_wrap=True,
        )
    outcomes = {result.outcome for result in deployed.results}
    if outcomes <= {Outcome.KEPT}:
        console.print("nothing to do: everything was done already", style="green")


def summarise(deployed: Deployment, machine: Machine) -> Text:
    """Summarise the results of one machine in a few words."""
    if failed := deployed.results_of(machine, Outcome.FAILED):
        return Text(f"failed at {failed[0].step}", style="red")
    did = deployed.results_of(machine, Outcome.DID)
    would = deployed.results_of(machine, Outcome.WOULD)
    if would:
        return Text(f"{len(would)} steps to do")
    return Text(f"{len(did)} steps done" if did else "nothing to do", style="green")


def show_next_steps(deployed: Deployment, path: Path, console: Console) -> None:
    """Write the files that a run needs beside the inventory, and print how to start one."""
    inventory = deployed.inventory
    folder = path.parent / f"{inventory.name}-run"
    folder.mkdir(exist_ok=True)
    boards = folder / "boards.toml"
    before = boards.read_text(encoding="utf-8") if boards.exists() else ""
    for file, text in (
        (folder / "ca.pem", deployed.ca_pem),
        (boards, run_config(inventory, before)),
    ):
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            write_text(file, text)
    superlink = roles.address_of(inventory.one(SERVER))
    console.print(
        f"to train, in the sources: flwr run . {inventory.name} --stream --run-config "
        f"{boards}\nwith this in ~/.flwr/config.toml:\n"
        f'[superlink.{inventory.name}]\naddress = "{superlink}"\n'
        f'root-certificates = "{(folder / "ca.pem").resolve()}"\n'
        f"to look after it, on {inventory.registrar.host}: "
        f"sudo collapipe cluster status {inventory.clusters[0]}",
        soft_wrap=True,
    )


def run_config(inventory: Inventory, before: str = "") -> str:
    """Return the keys that all runs on this cluster share; files are those of the server.

    What the user added to ``before`` stays, and so do other values of `_DEFAULTS`. Raises
    ConfigError where both together are no TOML, as with a table [edge].
    """
    certs = f"{roles.folder_of(inventory.one(SERVER))}/certs"
    values = {
        "clusters": len(inventory.clusters),
        "edge.address": f'"{roles.address_of(inventory.one(EDGE))}"',
        "edge.certificate-name": '"edge"',
        "edge.tls-ca": f'"{certs}/ca.pem"',
        "edge.tls-cert": f'"{certs}/server.pem"',
        "edge.tls-key": f'"{certs}/server.key"',
        **_DEFAULTS,
    }
    lines, new = before.splitlines(), []
    places = {line.partition("=")[0].strip(): at for at, line in enumerate(lines)}
    for name, value in values.items():
        if name not in places:
            new.append(f"{name} = {value}")  # in front: after a table's header it would be in it
        elif name not in _DEFAULTS:
            lines[places[name]] = f"{name} = {value}"
    text = "".join(f"{line}\n" for line in (*new, *lines))
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"boards.toml of {inventory.name} cannot be updated ({error}): write a key of a table "
            'in one line, as edge.address = "HOST:PORT", or delete the file'
        ) from error
    return text
