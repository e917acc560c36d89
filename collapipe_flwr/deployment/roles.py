"""What a machine needs for its roles, as steps: programs, files of the cluster, services."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from shlex import quote
from urllib.parse import urlsplit

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.deployment.inventory import (
    CONTROL_UNIT,
    DEVICE,
    EDGE,
    SERVER,
    Inventory,
    Machine,
    MachineRole,
)
from collapipe_flwr.deployment.ssh import SshStep
from collapipe_flwr.membership.newcomer import PORTS

OPT, ETC = "/opt/collapipe", "/etc/collapipe"
USER, KEEPER = "collapipe", "collapipe-registrar"  # the one that trains; the one with the CA's key
REGISTRAR = "collapipe-cluster"
_UNITS = {
    CONTROL_UNIT: (REGISTRAR, "collapipe-control-unit", "collapipe-supernode"),
    EDGE: ("collapipe-edge",),
    SERVER: ("collapipe-superlink",),
    DEVICE: ("collapipe-device",),
}
_PORTS = {role.word: port for role, port in PORTS.items()}
_LISTEN_S = 120
_SETTLE = 20  # looks, of a second or two
_AS = """cd /
as() {{
  setpriv --reuid "$1" --regid {user} --init-groups -- env HOME=/tmp "${{@:2}}"
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSettings:
    """A unit, its settings (empty ones are left out) and, if it listens, its address."""

    unit: str
    settings: dict[str, str]
    address: str = ""

    @property
    def env_file(self) -> str:
        return f"{ETC}/{self.unit.removeprefix('collapipe-')}.env"


def folder_of(role: MachineRole) -> str:
    return f"{ETC}/{role.kind}"


def address_of(role: MachineRole) -> str:
    return f"{role.address}:{_PORTS[role.kind]}"


def prepare_machine(inventory: Inventory, machine: Machine) -> Iterator[SshStep]:
    """Yield the steps that install programs, user and units."""
    yield from _install_programs(machine)
    yield SshStep(
        name="users",
        test=f"id {USER} && id {KEEPER} || exit 1\n"  # restoring a copy has made them
        "for group in video render; do\n"
        f"  ! getent group $group || id -nG {USER} | grep -qw $group || exit 1\ndone",
        action=f"id {USER} || useradd --system {USER}\n"
        f"for group in video render; do usermod -a -G $group {USER} || true; done\n"
        f"id {KEEPER} || useradd --system --no-user-group --gid {USER} {KEEPER}",
    )
    names = ("collapipe", "flwr") if machine.with_flower else ("collapipe",)
    links = [(f"/usr/local/bin/{name}", f"{OPT}/venv/bin/{name}") for name in names]
    yield SshStep(
        name="commands",
        test=" && ".join(f'[ "$(readlink {link})" = {target} ]' for link, target in links),
        action="\n".join(f"ln -sf {target} {link}" for link, target in links),
    )
    for role in machine.roles:
        for unit in _UNITS[role.kind]:
            text = write_unit(unit, keeps_ca=inventory.keeps_ca(role))
            yield _write_file(
                f"unit {unit}", f"/etc/systemd/system/{unit}.service", text, reload=True
            )


def _install_programs(machine: Machine) -> Iterator[SshStep]:
    access = machine.access
    if access.environment:
        runs = f"{quote(access.environment)}/bin/collapipe"
        missing = (
            f"no collapipe that runs in the environment {access.environment}: install it there, or "
            "name a wheel"
        )
        yield SshStep(
            name="environment",
            test=f'[ "$(readlink {OPT}/venv)" = {quote(access.environment)} ] && {runs} --version',
            action=f"[ -x {runs} ] && {runs} --version || {{ echo {quote(missing)}; exit 1; }}\n"
            f"mkdir -p {OPT}\n[ ! -e {OPT}/venv ] || [ -L {OPT}/venv ] || {{ echo '{OPT}/venv is "
            f"an environment of its own: move it away, or name it'; exit 1; }}\n"
            f"ln -sfn {quote(access.environment)} {OPT}/venv",
        )
        return
    python = quote(access.python or "python3")
    venv = quote(f"{Path(access.python or 'python3').name}-venv")
    yield SshStep(
        name="python",
        test=f"{python} -c 'import sys; sys.exit(sys.version_info < (3, 11))'",
        action=f"echo {python} is missing or older than 3.11: install one that is newer, and name "
        "it with python in the inventory; exit 1",
    )
    yield SshStep(
        name="python's venv",
        test=f"{python} -c 'import ensurepip, venv'",
        action=f"apt-get install -y {venv} || {{ apt-get update && apt-get install -y {venv}; }}",
    )
    yield _install_wheel(machine)


def _install_wheel(machine: Machine) -> SshStep:
    """Run pip again, in the same environment, if it was interrupted or the wheel differs."""
    access, name = machine.access, Path(machine.access.wheel).name
    wheel = Path(access.wheel).read_bytes()
    constraints = (
        _read_constraints(Path(access.constraints)).encode() if access.constraints else b""
    )
    extras = "[flower,data,metrics]" if machine.with_flower else ""
    urls = {
        "--index-url": access.index,
        "--extra-index-url": access.extra_index,
        "--find-links": access.find_links,
    }
    plain = {urlsplit(url).netloc for url in urls.values() if url.startswith("http://")}
    options = shlex.join(
        [
            *(word for option, url in urls.items() if url for word in (option, url)),
            *(("--no-index",) if access.find_links and not access.index else ()),
            *(f"--trusted-host={host}" for host in sorted(plain)),  # or pip would not trust http
            *(("-c", "constraints.txt") if constraints else ()),
        ]
    )
    said = (wheel, constraints, extras.encode(), options.encode(), access.python.encode())
    mark = hashlib.sha256(b"\0".join(said)).hexdigest()
    pip = f"{OPT}/venv/bin/pip --disable-pip-version-check install --quiet"
    return SshStep(
        name="environment",
        test=f'[ "$(cat {OPT}/installed)" = {mark} ] && {OPT}/venv/bin/collapipe --version',
        action=f"""
mkdir -p {OPT}/wheel
rm -f {OPT}/installed
[ ! -L {OPT}/venv ] || rm {OPT}/venv
cd {OPT}/wheel
{_decode_to(wheel, name)}
{_decode_to(constraints, "constraints.txt")}
{OPT}/venv/bin/pip --version > /dev/null 2>&1 || {{
  rm -rf {OPT}/venv
  {quote(access.python or "python3")} -m venv {OPT}/venv
}}
{pip} {options} {quote(f"./{name}{extras}")}
{pip} --no-deps --force-reinstall {quote(f"./{name}")}
{OPT}/venv/bin/collapipe --version
echo {mark} > {OPT}/installed""",
    )


def _read_constraints(path: Path) -> str:
    """Read a file of constraints and those that it includes; raises ConfigError."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"constraints {path} cannot be read: {error.strerror}") from error
    texts = (
        _read_constraints(path.parent / line[3:].strip()) if line.startswith("-c ") else line
        for line in lines
    )
    return "\n".join(texts) + "\n"


def make_clusters(inventory: Inventory) -> Iterator[SshStep]:
    """Yield the steps that make the clusters beside the CA, and start the joining service."""
    role = inventory.one(CONTROL_UNIT)
    folder = folder_of(role)
    yield _make_cluster(inventory, role, "", f"{folder}/certs/{role.name}.key {folder}/certs/*.pem")
    for cluster in inventory.clusters[1:]:
        yield _make_cluster(
            inventory, replace(role, cluster=cluster), " --elsewhere control-unit", ""
        )
    yield from _serve(_describe_registrar(role, "--no-edge"))


def _make_cluster(inventory: Inventory, role: MachineRole, elsewhere: str, shared: str) -> SshStep:
    """Make a cluster in the folder of ``role``; the training user may read the files ``shared``."""
    folder, file = folder_of(role), f"{folder_of(role)}/{role.cluster}"
    mark = f"{folder}/.shared" if shared else f"{file}.toml"
    init = (
        f"as {KEEPER} {OPT}/venv/bin/collapipe cluster init {role.cluster} --folder {folder} "
        f"--address {quote(role.address)} --edge-address {quote(address_of(inventory.one(EDGE)))} "
        f"--elsewhere edge --elsewhere server{elsewhere} --members 1 --minutes 1"
    )
    return SshStep(
        name=f"cluster {role.cluster}",
        test=f"[ -e {file}.toml ] && [ -e {mark} ]",
        action=f"{_AS.format(user=USER)}\n"
        f"install -d -m 755 {ETC}\n"
        f"install -d -o {KEEPER} -g {USER} -m 2750 {folder} {folder}/certs\n"
        f"umask 027\n{init}\n"
        f"chmod g+r {shared} {file}.*\n" + (f"touch {mark}" if shared else ""),
    )


def _describe_registrar(role: MachineRole, options: str = "") -> UnitSettings:
    """Describe the service that admits newcomers or, beside no CA, receives rosters."""
    settings = {"COLLAPIPE_FOLDER": folder_of(role), "COLLAPIPE_OPTIONS": options}
    return UnitSettings(unit=REGISTRAR, settings=settings, address=address_of(role))


def join_cluster(role: MachineRole, token: str = "") -> SshStep:
    """Make a member's own key, certificate and cluster file."""
    folder = folder_of(role)
    reached = "--dial" if role.dial else f"--address {quote(address_of(role))}"
    return SshStep(
        name=f"member {role.name}",
        test=f"[ -e {folder}/{role.cluster}.toml ]",
        action=f"{_AS.format(user=USER)}\n"
        f"install -d -m 755 {ETC}\n"
        f"install -d -o {USER} -g {USER} -m 700 {folder}\n"
        f"printf '%s\\n' {quote(token)} | as {USER} {OPT}/venv/bin/collapipe join - --no-start "
        f"--folder {folder} --name {role.name} {reached}",
    )


def write_token_script(inventory: Inventory, role: MachineRole, members: int) -> str:
    """Return the script that prints a token for so many members of this kind, beside the CA."""
    folder = folder_of(inventory.one(CONTROL_UNIT))
    return (
        f"{_AS.format(user=USER)}\nas {KEEPER} {OPT}/venv/bin/collapipe cluster token "
        f"{role.cluster} --role {role.kind} --members {members} --minutes 60 --folder {folder}"
    )


def serve_roles(inventory: Inventory, machine: Machine) -> Iterator[SshStep]:
    """Yield the steps for settings and services of a machine's roles, without the registrar."""
    for service in (s for role in machine.roles for s in _list_services(inventory, role)):
        yield from _serve(service)


def _serve(service: UnitSettings) -> Iterator[SshStep]:
    text = "".join(f'{k}="{v}"\n' for k, v in service.settings.items() if v)
    yield _write_file(f"settings of {service.unit}", service.env_file, text)
    yield _restart_service(service)


def _list_services(inventory: Inventory, role: MachineRole) -> Iterator[UnitSettings]:
    folder = folder_of(role)
    if role.kind != CONTROL_UNIT:
        (unit,) = _UNITS[role.kind]
        settings = {"COLLAPIPE_FOLDER": folder, "COLLAPIPE_NAME": role.name}
        settings["COLLAPIPE_OPTIONS"] = role.options
        yield UnitSettings(
            unit=unit, settings=settings, address="" if role.dial else address_of(role)
        )
        return
    if not inventory.keeps_ca(role):
        yield _describe_registrar(role)
    _, unit, supernode = _UNITS[role.kind]
    yield UnitSettings(unit=unit, settings={"COLLAPIPE_OPTIONS": role.options})
    index, count = inventory.clusters.index(role.cluster), len(inventory.clusters)
    place = f"partition-id={index} num-partitions={count} cluster='{folder}/{role.cluster}.toml'"
    node = f"{place} {role.node_config}".rstrip()
    superlink = address_of(inventory.one(SERVER))
    settings = {"COLLAPIPE_FOLDER": folder, "COLLAPIPE_SUPERLINK": superlink}
    yield UnitSettings(unit=supernode, settings=settings | {"COLLAPIPE_NODE_CONFIG": node})


def _restart_service(service: UnitSettings) -> SshStep:
    """Restart a service if it runs with another environment, unit or settings."""
    unit, stamp = service.unit, f"{OPT}/started/{service.unit}"
    state = (  # a wheel's venv is not a link, and an action ends at the first failure
        f"state() {{ {{ readlink {OPT}/venv || true; cat {OPT}/installed "
        f"/etc/systemd/system/{unit}.service {service.env_file}; }} 2> /dev/null | sha256sum; }}\n"
    )
    host, _, port = service.address.rpartition(":")
    place = quote(f"/dev/tcp/{host.strip('[]')}/{port}")
    listens = f"(exec 3<> {place})" if port else "sleep 1"
    fault = "it does not run" + (f", or does not listen on {service.address}" if port else "")
    return SshStep(
        name=f"service {unit}",
        test=f"{state}systemctl is-active --quiet {unit} && systemctl is-enabled --quiet {unit} "
        f'&& [ "$(cat {stamp})" = "$(state)" ]',
        action=f"""{state}mkdir -p {OPT}/started
systemctl enable {unit}
systemctl restart {unit}
for i in $(seq {_LISTEN_S}); do
  sleep 1
  systemctl is-active --quiet {unit} || break
  if {listens} 2> /dev/null; then
    state > {stamp}
    exit 0
  fi
done
echo {quote(f"{fault}:")}
journalctl -u {unit} -n 2 -o cat --no-pager
exit 1""",
    )


def write_settle_script(inventory: Inventory) -> str:
    """Return the script that waits until every member has the newest roster of its clusters."""
    folder = folder_of(inventory.one(CONTROL_UNIT))
    status = f"as {KEEPER} {OPT}/venv/bin/collapipe cluster status $cluster --folder {folder}"
    return f"""{_AS.format(user=USER)}
for cluster in {shlex.join(inventory.clusters)}; do
  for i in $(seq {_SETTLE}); do
    {status} 2>&1 | grep -q ' behind$' || break
    sleep 1
  done
done"""


def write_check_script(inventory: Inventory, role: MachineRole, *, keep: bool) -> str:
    """Return the script that prints `collapipe cluster check` as JSON; ``keep``: for plans."""
    file, owner = f"{folder_of(role)}/{role.cluster}", KEEPER if inventory.keeps_ca(role) else USER
    keeping = f"install -o {owner} -g {USER} -m 640 $found/found.json {file}.json" if keep else ":"
    return f"""{_AS.format(user=USER)}
found=$(mktemp -d)
chown {USER} $found
cd $found
as {USER} {OPT}/venv/bin/collapipe cluster check {file}.toml --json $found/found.json > said 2>&1
[ -e found.json ] || {{ tail -n 1 said >&2; exit 1; }}
{keeping}
cat found.json
rm -r $found"""


def _write_file(name: str, path: str, text: str, *, reload: bool = False) -> SshStep:
    write, held = _decode_to(text.encode(), f"{path}.new"), base64.b64encode(text.encode()).decode()
    return SshStep(
        name=name,
        test=f'[ -e {path} ] && [ "$(base64 -w 0 {path})" = "{held}" ]',
        action=f"mkdir -p {Path(path).parent}\n{write}\nmv {path}.new {path}"
        + ("\nsystemctl daemon-reload" if reload else ""),
    )


def _decode_to(data: bytes, path: str) -> str:
    return f"base64 -d > {quote(path)} <<'END'\n{base64.encodebytes(data).decode()}END"


def write_unit(unit: str, *, keeps_ca: bool) -> str:
    """Return the file of a systemd unit; the service with the CA's key has its own user.

    The apps of runs, which may be anybody's, are executed as the user of the other services.
    """
    text = (files("collapipe_flwr") / "systemd" / f"{unit}.service").read_text(encoding="utf-8")
    if unit != REGISTRAR or not keeps_ca:
        return text
    text = text.replace(f"User={USER}\n", f"User={KEEPER}\nGroup={USER}\n")
    return text.replace("UMask=0077", "UMask=0027")  # the control unit reads the cluster's file
