"""How often a round is tried: one that fails as a whole is repeated after ever longer pauses.

An edge or a SuperNode that restarts, and a device that somebody switches on again, need a while and
nothing else. So a round in which every cluster failed, or that the edge could not be asked for, is
opened again, by a plan for who is there then. Nothing of the attempt before is left but its time:
clusters continue from their last accepted round. What time does not mend is not repeated: a
run-config, data or a model that no cluster can use, and training that diverges.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.app import Error, Message

from collapipe_flwr.core.errors import ConfigError, DataError, Diverged, ModelError

DEFAULT_TIMEOUT_S = 3600.0  # of a round, as Flower has it
log = logging.getLogger("flwr.collapipe")
_LASTING = {kind.__name__ for kind in (ConfigError, DataError, Diverged, ModelError)}
_KIND = re.compile(r"^<class '(?:[\w.]*\.)?(\w+)'>")  # Flower puts it before an error's words


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """``most`` repetitions of a round; every pause is twice the one before, up to the longest."""

    most: int = 0
    first_pause_s: float = 2.0
    longest_pause_s: float = 60.0
    sleep: Callable[[float], None] = time.sleep

    def pause_s(self, failures: int) -> float:
        """The pause after so many failures, which are at least 1."""
        doubled = self.first_pause_s * 2.0 ** min(failures - 1, 30)
        return min(doubled, self.longest_pause_s)


class Attempts:
    """The attempts at one round that came to nothing."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._started_s = time.monotonic()
        self.failures: list[str] = []

    def again(self, why: str) -> bool:
        """Note a failure; whether the round is tried again, after a pause."""
        self.failures.append(why)
        if len(self.failures) > self._retries.most:
            return False
        pause_s = self._retries.pause_s(len(self.failures))
        count = f"{len(self.failures)} of {self._retries.most}"
        log.warning("%s; the round is repeated in %g s (%s)", why, pause_s, count)
        self._retries.sleep(pause_s)
        return True

    def told(self, why: str) -> str:
        """A failure's sentence with how often the round was tried, if more than once."""
        if len(self.failures) < 2:
            return why
        seconds = time.monotonic() - self._started_s
        return f"{why} (tried {len(self.failures)} times in {seconds:.0f} s)"


def lasting(replies: Iterable[Message]) -> bool:
    """Whether all failures among replies are of a kind that a repetition does not mend."""
    errors = [reply.error for reply in replies if reply.has_error()]
    return bool(errors) and all(_kind(error) in _LASTING for error in errors)


def _kind(error: Error) -> str:
    """The class of what a ClientApp raised, "" where nothing was raised."""
    found = _KIND.match(error.reason or "")
    return found.group(1) if found else ""
