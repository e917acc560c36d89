"""The errors of CollaPipe.

A message is one sentence that names the key, the value and the way out. Errors of other libraries
are translated where they are caught, with their cause kept.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path

_OWN = ("collapipe_flwr", "client_app", "server_app")


class CollaPipeError(Exception):
    """Base of all errors of CollaPipe; a command ends with ``exit_code``."""

    exit_code = 1


class ConfigError(CollaPipeError):
    """A run-config key or value that cannot be used."""


class DataError(CollaPipeError):
    """A data set, column or label that cannot be used."""


class ModelError(CollaPipeError):
    """A model that cannot be built or split."""


class CheckpointMissing(ModelError):
    """A checkpoint that is not on this machine."""


class ScheduleError(CollaPipeError):
    """A plan or schedule that breaks its own rules."""


class InfeasibleError(ScheduleError):
    """No plan satisfies the constraints (memory, bandwidth, ...).

    ``clusters`` are those for which none was found, alone or beside the others; empty if unknown.
    """

    def __init__(self, why: str, clusters: Iterable[str] = ()) -> None:
        super().__init__(why)
        self.clusters = tuple(clusters)


class DevicesMissing(InfeasibleError):
    """No plan without the devices that were lost; they may be back by now."""


class LinkError(CollaPipeError):
    """A peer that cannot be reached or broke off.

    ``peer_id`` is its name where a link leads to several, else empty.
    """

    peer_id = ""


class LinkTimeout(LinkError):
    """A peer that did not answer before the deadline."""


class PeerBroken(LinkError):
    """A peer whose call failed with an internal error."""


class FrozenWanted(LinkError):
    """A peer that has no checkpoint and needs its frozen weights from the control unit."""


class Unreachable(LinkError):
    """A peer that cannot be connected, or no longer."""


class EdgeLost(LinkError):
    """The edge is gone, so no chain can end there."""


class Busy(LinkError):
    """A peer that is at work, so that measuring it would mislead and disturb."""


class ProtocolError(LinkError):
    """A peer that sent something malformed."""


class Blame(IntEnum):
    """The kind of a member's failure; the number is sent on the wire."""

    RAISED = 0  # an error of its own
    MALFORMED = 1  # it sent an invalid frame
    UNSOUND = 2  # it sent or computed numbers that cannot be right
    UNREACHABLE = 3  # its neighbour cannot reach it, or it refuses
    SILENT = 4  # it did not send in time


class MemberFailed(ProtocolError):
    """A member of a chain that failed, although it may answer.

    ``witness`` is the member that reports it. It blames itself, or the neighbour on one ``side``,
    which it knows as ``accused`` (empty: it cannot tell which of several); with an empty name, it
    blames the receiver of the error.
    """

    UPSTREAM, ITSELF, DOWNSTREAM = -1, 0, 1

    def __init__(
        self, witness: str, why: str, blame: Blame, side: int = ITSELF, accused: str = ""
    ) -> None:
        super().__init__(witness, why, blame, side, accused)
        self.witness, self.why, self.blame = witness, why, blame
        self.side, self.accused = side, accused

    def __str__(self) -> str:
        return self.why if self.side else f"{self.witness} failed: {self.why}"


class MemberSilent(MemberFailed, LinkTimeout):
    """The neighbour of a stage that did not send in time."""


class AuditFailed(LinkError):
    """Members of a chain that reported wrong results; of two, one did."""

    def __init__(self, accused: tuple[str, ...], why: str) -> None:
        super().__init__(accused, why)
        self.accused, self.why = accused, why

    def __str__(self) -> str:
        return self.why


class NotFinite(ModelError):
    """A pass that made finite numbers infinite or NaN."""


class Diverged(CollaPipeError):
    """Training whose numbers are no longer finite, wherever they are computed."""


class RunError(CollaPipeError):
    """A federated run that cannot go on."""


class PrivacySpent(RunError):
    """A run or a cluster that may spend no more of its examples' privacy."""


@contextmanager
def mark_wrong_input() -> Iterator[None]:
    """End a command with exit code 2, as for a wrong option, if the body raises an error."""
    try:
        yield
    except CollaPipeError as error:
        error.exit_code = 2
        raise


@contextmanager
def prefix_errors(key: str) -> Iterator[None]:
    """Prefix errors of the body with ``key``, a key of the run-config or another source."""
    try:
        yield
    except CollaPipeError as error:
        raise type(error)(f"{key}: {error}") from error


@contextmanager
def wrap_unexpected() -> Iterator[None]:
    """Raise an error of any other kind as a RunError that says what happened and where.

    Flower reports only the message of an exception to the user who started the run.
    """
    try:
        yield
    except CollaPipeError:
        raise
    except Exception as error:
        words = (str(error).strip() or "no message").splitlines()[0]
        raise RunError(
            f"unexpected {type(error).__name__} ({words}) {_describe_place(error)}: the log holds "
            "the traceback; please report it"
        ) from error


def _describe_place(error: Exception) -> str:
    """Return the innermost line of our code in the traceback, else the line that raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    ours = [frame for frame in frames if set(_OWN) & set(Path(frame.filename).parts)]
    frame = (ours or frames)[-1]
    parts = Path(frame.filename).parts
    start = next((i for i, part in enumerate(parts) if part in _OWN), len(parts) - 1)
    return f"in {'/'.join(parts[start:])}, line {frame.lineno}"


@contextmanager
def name_extra(name: str) -> Iterator[None]:
    """Name the extra ``name`` in a ConfigError if the body imports a package that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _explain_missing(str(error.name), name) from error


def require(module: str, name: str) -> None:
    """Raise ConfigError if ``module`` of extra ``name`` is not installed; imports nothing."""
    if find_spec(module) is None:
        raise _explain_missing(module, name)


def _explain_missing(module: str, name: str) -> ConfigError:
    return ConfigError(
        f"the package {module.partition('.')[0]} is not installed: "
        f"run `pip install 'collapipe-flwr[{name}]'`"
    )
