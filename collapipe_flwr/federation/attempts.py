"""Repetitions of a round that fails as a whole, after ever longer pauses.

An edge, a SuperNode or a device that restarts only needs time. A round in which every cluster
failed, or whose edge could not be reached, is therefore planned and opened again; clusters continue
from their last accepted round. Errors that time does not fix are not repeated: a run-config, data
or a model that no cluster can use, and training that diverges.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from time import monotonic, sleep

from flwr.app import Error, Message

from collapipe_flwr.core.errors import ConfigError, DataError, Diverged, ModelError

DEFAULT_TIMEOUT_S = 3600.0  # of a round, as Flower has it
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # each is twice the one before
log = logging.getLogger("flwr.collapipe")
_LASTING = {kind.__name__ for kind in (ConfigError, DataError, Diverged, ModelError)}
_KIND = re.compile(r"^<class '(?:[\w.]*\.)?(\w+)'>")  # Flower puts it before an error's words
_KIND_IN_RAY = re.compile(  # the last line of the traceback that Flower's simulation reports
    r"^collapipe_flwr\.core\.errors\.(\w+)(?::.*)?\n\n"
    r"The above exception was the direct cause of the following exception:\n"
    r"(?:(?!The above exception).*\n)*.*\bClientAppException: ",
    re.MULTILINE,
)


class Attempts:
    """The failed attempts at one round, of which at most ``most`` are repeated."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._started_s = monotonic()
        self.failures: list[str] = []

    def retry(self, why: str) -> bool:
        """Record a failure; returns after a pause whether the round is repeated."""
        self.failures.append(why)
        failed = len(self.failures)
        if failed > self._most:
            return False
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(failed - 1, 30), LONGEST_PAUSE_S)
        log.warning(
            "%s; the round is repeated in %g s (%d of %d)", why, pause_s, failed, self._most
        )
        sleep(pause_s)
        return True

    def with_count(self, why: str) -> str:
        """Add the number of attempts to ``why``, if there was more than one."""
        if len(self.failures) < 2:
            return why
        seconds = monotonic() - self._started_s
        return f"{why} (tried {len(self.failures)} times in {seconds:.0f} s)"


def are_permanent(replies: Iterable[Message]) -> bool:
    """Return whether a repetition can fix none of the failures among the replies."""
    errors = [reply.error for reply in replies if reply.has_error()]
    return bool(errors) and all(_kind(error) in _LASTING for error in errors)


def _kind(error: Error) -> str:
    """Return the class name of the exception that a ClientApp raised, "" if none was raised."""
    reason = error.reason or ""
    found = _KIND_IN_RAY.search(reason) or _KIND.match(reason)
    return found.group(1) if found else ""
