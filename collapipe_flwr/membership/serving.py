"""What stays on a control unit: it lets newcomers in, tells members of each other, has the edge."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.core.processes import stopping
from collapipe_flwr.membership.discovery import announced
from collapipe_flwr.membership.herald import Herald
from collapipe_flwr.membership.registry import Registry
from collapipe_flwr.membership.service import JoiningService
from collapipe_flwr.transport.tls import fingerprint

_LOOK_S = 0.2
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
    listen = settings.listen or config.control_unit.address
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
