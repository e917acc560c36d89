"""`collapipe cluster serve`: newcomers, rosters, the relay to devices that dial, and the edge.

On a control unit that joined by a token, it receives rosters instead.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.core.processes import run_beside, stop_on_signals
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.host.server import Listener
from collapipe_flwr.membership import discovery
from collapipe_flwr.membership.admission import JoiningService
from collapipe_flwr.membership.figures import add_figures
from collapipe_flwr.membership.members import RosterSender
from collapipe_flwr.membership.newcomer import make_reachable
from collapipe_flwr.membership.registry import Registry
from collapipe_flwr.transport.relay import run_relay
from collapipe_flwr.transport.tls import fingerprint

_LOOK_S = 0.2
_HEAR_S = 1.0  # for the answer to a removal to leave
_END_S = 45.0  # for the edge to end its sessions


def serve(
    registry: Registry,
    say: Callable[[str], object],
    *,
    listen: str = "",
    edge: bool = True,
    edge_options: Sequence[str] = (),
    announce: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Newcomers are admitted at ``listen`` (empty: where the cluster file says), which the local
    network hears with ``announce``. ``edge`` runs the edge of this machine, with its options.
    For clusters whose files are written by hand, it only relays to devices that dial. Raises
    ConfigError where it cannot listen, RunError when the edge ends.
    """
    by_hand = () if registry.clusters() else registry.read_handwritten()
    if by_hand:
        with stop_on_signals() as stop, run_relay(lambda: by_hand):
            names = ", ".join(config.id for config in by_hand)
            say(f"devices of {names} dial in at {by_hand[0].relay_address}")
            stop.wait()
        return
    config = next(iter(registry.clusters().values()), None) or registry.cluster()
    if not (registry.certs / "ca.key").exists():
        follow(config, listen, say)
        return
    listen = listen or config.joining_address
    with stop_on_signals() as stop, ExitStack() as stack:
        joining = JoiningService(registry, listen, on_joined=lambda name: say(f"{name} joined"))
        process = stack.enter_context(_run_edge(registry, edge_options)) if edge else None
        stack.enter_context(joining)
        if announce:
            pin = bytes.fromhex(fingerprint(registry.ca.read_bytes()))
            stack.enter_context(discovery.announce(config, make_reachable(joining.address), pin))
        stack.enter_context(run_relay(lambda: registry.clusters().values()))
        stack.enter_context(run_beside(RosterSender(registry).watch, "rosters"))
        say(f"newcomers of {', '.join(registry.clusters())} are let in at {joining.address}")
        while not stop.wait(_LOOK_S):
            if process is not None and process.poll() is not None:
                raise RunError(f"the edge ended with {process.returncode}: see what it printed")


def follow(config: ClusterConfig, listen: str, say: Callable[[str], object]) -> None:
    """Keep the cluster file of a control unit up to date, until that is removed from the cluster.

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
    with stop_on_signals() as stop:

        def leave(why: str) -> None:
            say(f"{why}: this cluster file is not updated any more")
            stop.set()

        rosters.on_removed = leave
        listener = Listener(listen or unit.address, None, tls=files, rosters=rosters)
        with listener, run_relay(lambda: rosters.clusters):
            say(f"{unit.name} on {listener.address}: {config.path} is kept up to date")
            stop.wait()
            listener.stop(_HEAR_S)


@contextmanager
def _run_edge(
    registry: Registry, options: Sequence[str]
) -> Iterator[subprocess.Popen[bytes] | None]:
    """Run the edge as a process that ends with this one, if its files are here."""
    folder = registry.edge_folder
    if not folder.is_dir():
        yield None
        return
    name = registry.cluster(next(iter(registry.clusters()))).edge.name
    command = [sys.executable, "-m", "collapipe_flwr.cli.child", "edge", "--name", name]
    command += ["--cluster", str(folder)]
    process = subprocess.Popen([*command, *options], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
