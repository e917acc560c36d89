"""Rights to make network namespaces: those we have, or those of root in a user namespace.

A kernel that lets its users make user namespaces lets them shape links in there. Either way a
process of ours holds a mount of its own where ``ip netns`` keeps names, and commands enter it. It
ends when its stdin is closed, also because we were killed, and all of it is gone then.
"""

from __future__ import annotations

import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from collapipe_flwr.core.errors import CollaPipeError

_DEADLINE_S = 10.0
_HOLD = "mount -t tmpfs tmpfs /var/run && echo ready && exec cat"


class NetworkError(CollaPipeError):
    """The kernel refuses namespaces or shaping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What to put before a command so that it may shape links."""

    kind: str
    command: Sequence[str] = ()


@contextmanager
def own_rights() -> Iterator[Rights]:
    """Those of this process, which suffice for root; raises NetworkError where they do not."""
    with _held() as enter:
        yield Rights(kind="network namespaces", command=enter)


@contextmanager
def user_rights() -> Iterator[Rights]:
    """Root in a new user namespace; raises NetworkError where the kernel allows none."""
    with _held("--user", "--net", root=True) as enter:
        kind = "network namespaces in a user namespace"
        yield Rights(kind=kind, command=(*enter, "--preserve-credentials"))


@contextmanager
def _held(*namespaces: str, root: bool = False) -> Iterator[tuple[str, ...]]:
    """How to enter a mount namespace, and these besides, that a process holds meanwhile."""
    shared = (*namespaces, "--mount")
    command = ("unshare", *shared, *(["--map-root-user"] if root else []), "sh", "-c", _HOLD)
    try:
        holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError as error:
        raise NetworkError("namespaces need the program unshare (util-linux)") from error
    with holder:  # closes its input, which ends it, and waits
        _await_ready(holder)
        yield ("nsenter", f"--target={holder.pid}", *shared)


def _await_ready(holder: subprocess.Popen[str]) -> None:
    assert holder.stdout is not None and holder.stderr is not None
    if not select.select([holder.stdout], [], [], _DEADLINE_S)[0]:
        holder.kill()
        raise NetworkError(f"a namespace was not made within {_DEADLINE_S:g} s")
    if holder.stdout.readline().strip() != "ready":
        words = holder.stderr.read().strip() or "no word why"
        raise NetworkError(f"the kernel allows no namespaces here: {words}")
