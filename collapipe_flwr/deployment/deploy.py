"""All machines of an inventory, side by side: from what ssh reaches to a checked cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from collapipe_flwr.cluster.profile import Measurements
from collapipe_flwr.core.errors import CollaPipeError, LinkError
from collapipe_flwr.core.json_codec import from_json
from collapipe_flwr.deployment import roles
from collapipe_flwr.deployment.inventory import CONTROL_UNIT, DEVICE, Inventory, Machine, Role
from collapipe_flwr.deployment.ssh import Ssh
from collapipe_flwr.deployment.steps import Outcome, Result, Step, results_in, script_of

T = TypeVar("T")
_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploySettings:
    """A ``dry`` deployment looks at the machines and changes nothing.

    ``deadline_s`` is for each phase on a machine; ``accept_new``: see `Ssh`.
    """

    dry: bool = False
    accept_new: bool = False
    deadline_s: float = 1800.0


@dataclass(kw_only=True)
class Deployed:
    """What became of it: of every step, and of the check at the end (None: there was none)."""

    results: list[Result] = field(default_factory=list)
    check: Measurements | None = None
    ca_pem: str = ""

    @property
    def failures(self) -> list[Result]:
        """One for each machine that failed."""
        return [result for result in self.results if result.outcome is Outcome.FAILED]

    def of(self, machine: Machine, *outcomes: Outcome) -> list[Result]:
        """The results of a machine with one of these outcomes."""
        return [r for r in self.results if r.machine == machine.name and r.outcome in outcomes]


class Deployment:
    """Carries an inventory out; ``on_result`` is told each step when it ends."""

    def __init__(
        self,
        inventory: Inventory,
        settings: DeploySettings,
        on_result: Callable[[Result], object] = lambda _: None,
    ) -> None:
        self._inventory = inventory
        self._settings = settings
        self._on_result = on_result
        self._deployed = Deployed()

    def run(self) -> Deployed:
        """All phases; a machine that fails is left out of the next ones."""
        inventory, unit = self._inventory, self._inventory.control_unit
        self._phase(inventory.machines, lambda m: list(roles.preparing(m)))
        self._phase([unit], lambda _: list(roles.founding(inventory)))
        if self._failed(unit):
            self._give_up()
            return self._deployed
        self._join()
        self._phase(inventory.machines, lambda m: list(roles.serving(inventory, m)))
        if not self._settings.dry and not self._failed(unit):
            self._check()
        return self._deployed

    def _join(self) -> None:
        """Let those in that have not joined yet, each by a token of its role."""
        newcomers = self._newcomers()
        if self._settings.dry or not newcomers:
            for machine, role in newcomers:
                name = roles.joining(self._inventory, role).name
                self._note(Result(machine=machine.name, step=name, outcome=Outcome.WOULD))
            return
        kinds = {role.kind for _, role in newcomers}
        tokens = {k: self._token(k, sum(r.kind == k for _, r in newcomers)) for k in sorted(kinds)}

        def steps(machine: Machine) -> list[Step]:
            mine = [role for m, role in newcomers if m is machine and tokens[role.kind]]
            return [roles.joining(self._inventory, r, tokens[r.kind] or "") for r in mine]

        self._phase([m for m in self._inventory.machines if steps(m)], steps)

    def _newcomers(self) -> list[tuple[Machine, Role]]:
        """Roles without the files of a member, on the machines that are well."""

        def missing(machine: Machine) -> list[tuple[Machine, Role]]:
            others = [role for role in machine.roles if role.kind != CONTROL_UNIT]
            steps = [roles.joining(self._inventory, role) for role in others]
            told = self._tell(machine, steps, dry=True)
            would = {result.step for result in told if result.outcome is Outcome.WOULD}
            for result in told:
                if result.outcome is not Outcome.WOULD:
                    self._note(result)
            return [(machine, r) for r, s in zip(others, steps, strict=True) if s.name in would]

        return [pair for found in self._everywhere(self._well(), missing) for pair in found]

    def _token(self, kind: str, members: int) -> str | None:
        """For so many members in a role; None if the control unit gives none."""
        unit = self._inventory.control_unit
        try:
            text = self._ssh(unit).run(
                roles.token_script(self._inventory, kind, members),
                deadline_s=self._settings.deadline_s,
            )
        except LinkError as error:
            self._fail(unit, f"token for {kind}", str(error))
            return None
        words = text.split()
        return words[words.index("join") + 1] if "join" in words[:-1] else None

    def _check(self) -> None:
        unit, inventory = self._inventory.control_unit, self._inventory
        changed = any(result.outcome is Outcome.DID for result in self._deployed.results)
        try:
            ssh = self._ssh(unit)
            script = roles.check_script(inventory, keep=changed)
            text = ssh.run(script, deadline_s=self._settings.deadline_s)
            self._deployed.check = from_json(Measurements, text, "what the check measured")
            self._deployed.ca_pem = ssh.run(
                roles.ca_script(inventory), deadline_s=self._settings.deadline_s
            )
        except CollaPipeError as error:
            self._fail(unit, "check", str(error))
            return
        there = {member.name for member in self._deployed.check.members}
        for machine in inventory.machines:
            role = machine.role(DEVICE)
            if role is not None and role.name not in there and not self._failed(machine):
                self._fail(
                    machine,
                    "check",
                    f"{role.name} was removed from {inventory.cluster}: take it out of the "
                    f"inventory, or delete {roles.folder_of(role)} there and deploy again",
                )

    def _phase(
        self, machines: Iterable[Machine], steps: Callable[[Machine], Sequence[Step]]
    ) -> None:
        def one(machine: Machine) -> None:
            for result in self._tell(machine, steps(machine), dry=self._settings.dry):
                self._note(result)

        self._everywhere([m for m in machines if not self._failed(m)], one)

    def _tell(self, machine: Machine, steps: Sequence[Step], *, dry: bool) -> list[Result]:
        """The results of these steps there; of one that failed, if there was no answer."""
        if not steps:
            return []
        try:
            script = script_of(steps, dry=dry)
            text = self._ssh(machine).run(script, deadline_s=self._settings.deadline_s)
            return results_in(text, machine.name, steps)
        except LinkError as error:
            why = str(error)
            return [Result(machine=machine.name, step="ssh", outcome=Outcome.FAILED, why=why)]

    def _everywhere(self, machines: Iterable[Machine], do: Callable[[Machine], T]) -> list[T]:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="deploy") as pool:
            return list(pool.map(do, machines))

    def _ssh(self, machine: Machine) -> Ssh:
        return Ssh(
            machine=machine,
            config=self._inventory.ssh_config,
            accept_new=self._settings.accept_new,
        )

    def _well(self) -> list[Machine]:
        return [machine for machine in self._inventory.machines if not self._failed(machine)]

    def _failed(self, machine: Machine) -> bool:
        return bool(self._deployed.of(machine, Outcome.FAILED))

    def _give_up(self) -> None:
        why = f"waits for the control unit on {self._inventory.control_unit.host}: deploy again"
        for machine in self._well():
            self._fail(machine, "cluster", why)

    def _fail(self, machine: Machine, step: str, why: str) -> None:
        self._note(Result(machine=machine.name, step=step, outcome=Outcome.FAILED, why=why))

    def _note(self, result: Result) -> None:
        self._deployed.results.append(result)
        self._on_result(result)
