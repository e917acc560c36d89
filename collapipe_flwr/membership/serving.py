"""What stays where a cluster is kept: it lets newcomers in, tells members of each other, has the
edge. On a control unit that joined by a token, what stays is told there.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.core.processes import stopping
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.host.server import Listener
from collapipe_flwr.membership.discovery import announced
from collapipe_flwr.membership.figures import add_figures
from collapipe_flwr.membership.herald import Herald
from collapipe_flwr.membership.joining_service import JoiningService
from collapipe_flwr.membership.registry import Registry
from collapipe_flwr.transport.tls import fingerprint

_LOOK_S = 0.2
_HEAR_S = 1.0  # that who told a control unit of its removal gets to hear an answer
_END_S = 45.0  # for the edge to end its sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """``listen`` is where newcomers are let in, if not where the cluster file says; ``edge`` runs
    the edge that is on this machine, with these options.

    With ``announce`` the local network hears where newcomers are let in.
    """

    listen: str = ""
    edge: bool = True
    edge_options: tuple[str, ...] = ()
    announce: bool = False


def serve(registry: Registry, settings: ServeSettings, say: Callable[[str], object]) -> None:
    """Until SIGTERM or SIGINT. Raises ConfigError where it cannot listen, RunError without edge."""
    config = next(iter(registry.clusters().values()), None) or registry.cluster()
    if not registry.has_authority:
        follow(config, settings.listen, say)
        return
    listen = settings.listen or config.joining_address
    with stopping() as stop, ExitStack() as stack:
        joining = JoiningService(registry, listen, on_joined=lambda name: say(f"{name} joined"))
        edge = stack.enter_context(_edge(registry, settings)) if settings.edge else None
        stack.enter_context(joining)
        if settings.announce:
            pin = bytes.fromhex(fingerprint(registry.ca.read_bytes()))
            stack.enter_context(announced(config, joining.address, pin))
        watching = threading.Thread(target=Herald(registry).watch, args=(stop,), daemon=True)
        watching.start()
        say(f"newcomers of {', '.join(registry.clusters())} are let in at {joining.address}")
        while not stop.wait(_LOOK_S):
            if edge is not None and edge.poll() is not None:
                stop.set()
                raise RunError(f"the edge ended with {edge.returncode}: see what it printed")


def follow(config: ClusterConfig, listen: str, say: Callable[[str], object]) -> None:
    """Keep the cluster file of a control unit up to date; it ends, too, when that is removed.

    Raises ConfigError where its key is not here, or it cannot listen.
    """
    unit = config.control_unit
    files = config.tls_files(unit.name)
    if files is None or files.ca is None or files.key is None or not files.key.exists():
        raise ConfigError(
            f"neither the CA of {config.id} nor the key of {unit.name} is in {config.folder}: run "
            "this where the cluster was made, or on a control unit that joined by a token"
        )
    rosters = Rosters(unit.name, [config], files.ca)
    rosters.on_newer = add_figures
    with stopping() as stop:

        def leave(why: str) -> None:
            say(f"{why}: nothing is brought here any more")
            stop.set()

        rosters.on_removed = leave
        listener = Listener(listen or unit.address, None, tls=files, rosters=rosters)
        with listener:
            say(f"{unit.name} on {listener.address}: {config.path} is kept up to date")
            stop.wait()
            listener.stop(_HEAR_S)


@contextmanager
def _edge(registry: Registry, settings: ServeSettings) -> Iterator[subprocess.Popen[bytes] | None]:
    """The edge as a process of its own, where its files are here; it ends with this one."""
    folder = registry.edge_folder
    if not folder.is_dir():
        yield None
        return
    name = registry.cluster(next(iter(registry.clusters()))).edge.name
    command = [sys.executable, "-m", "collapipe_flwr.cli.child", "edge", "--name", name]
    command += ["--cluster", str(folder), "--state-dir", str(folder / "state")]
    process = subprocess.Popen([*command, *settings.edge_options], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
