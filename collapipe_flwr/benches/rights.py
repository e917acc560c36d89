"""Rights to make network namespaces: those we have, or those of root in a user namespace.

A kernel that lets its users make user namespaces lets them shape links in there: a process of ours
holds one, with a mount of its own where ``ip netns`` keeps names, and commands enter it. All of it
is gone when that process ends.
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
    """Those of this process; they suffice for root."""
    yield Rights(kind="network namespaces")


@contextmanager
def user_rights() -> Iterator[Rights]:
    """Root in a new user namespace; raises NetworkError where the kernel allows none."""
    command = ("unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _HOLD)
    try:
        holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError as error:
        raise NetworkError("a user namespace needs the program unshare (util-linux)") from error
    with holder:  # closes its input, which ends it, and waits
        _await_ready(holder)
        enter = ("nsenter", f"--target={holder.pid}", "--user", "--mount", "--net")
        yield Rights(
            kind="network namespaces in a user namespace",
            command=(*enter, "--preserve-credentials"),
        )


def _await_ready(holder: subprocess.Popen[str]) -> None:
    assert holder.stdout is not None and holder.stderr is not None
    if not select.select([holder.stdout], [], [], _DEADLINE_S)[0]:
        holder.kill()
        raise NetworkError(f"a user namespace was not made within {_DEADLINE_S:g} s")
    if holder.stdout.readline().strip() != "ready":
        words = holder.stderr.read().strip() or "no word why"
        raise NetworkError(f"the kernel allows no user namespace: {words}")
