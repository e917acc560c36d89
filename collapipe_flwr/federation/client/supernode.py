"""Flower's SuperNode, with shorter waits between messages and ClientApps that start sooner.

Without a message, Flower 1.41 and 1.42 poll every 3 s for one, every 0.5 s for the reply of an app,
and every 1 s for an app to start; only the last of these can be set.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.client import client_process
from collapipe_flwr.transport.tls import check_validity

IDLE_S = 3.0  # Flower's wait where it found no message
REPLY_S = 0.1  # our longest wait for an app's reply
APP_S = 0.2  # our wait for an app to start
LEAST_S = 0.25  # our wait for the next message, right after the last
SHARE = 0.05  # of the time without a message, so that waits grow to Flower's in a minute

log = logging.getLogger("flwr.collapipe")
_LOOP = "flwr.supernode.start_client_internal"
_NO_API = "API failed to start"  # Flower's words for a port that is taken
_BEGIN = b"-----BEGIN CERTIFICATE-----"
_CLOCK = (
    "this machine's clock says %s UTC: set it if that is wrong (`timedatectl`), since a SuperLink "
    "refuses signatures by a clock that is 5 s ahead of its own or 5 minutes behind"
)
_APP_WAIT = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"


class Waits:
    """Replaces the module ``time`` in the SuperNode's loop, which sleeps between two polls."""

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock, self._sleep = clock, sleep
        self._worked_s = clock()

    def sleep(self, seconds: float) -> None:
        """Sleep ``seconds`` or less; waits below ``IDLE_S`` are for an app's reply."""
        if seconds < IDLE_S:
            self._worked_s = self._clock()
            self._sleep(min(seconds, REPLY_S))
        else:
            without_s = self._clock() - self._worked_s
            self._sleep(min(seconds, max(LEAST_S, SHARE * without_s)))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def shorten_waits() -> None:
    """Shorten the waits in this process; warns where this version of Flower does not allow it."""
    os.environ.setdefault(_APP_WAIT, str(APP_S))
    loop = importlib.import_module(_LOOP)
    if isinstance(getattr(loop, "time", None), ModuleType):
        vars(loop)["time"] = Waits(time.monotonic, time.sleep)
    else:
        log.warning("this version of Flower keeps its own waits between messages")


def check_root(arguments: Sequence[str], now: datetime) -> None:
    """Raise ConfigError for a CA certificate among Flower's arguments that is not valid now."""
    parser = ArgumentParser("collapipe supernode", add_help=False, allow_abbrev=False)
    parser.add_argument("--root-certificates", type=Path, nargs="?")
    path = parser.parse_known_args(arguments)[0].root_certificates
    if path is not None and path.is_file() and (pem := path.read_bytes()).count(_BEGIN) == 1:
        check_validity(str(path), pem, now)


def run(arguments: Sequence[str]) -> None:
    """Run `flower-supernode` with these arguments; where it fails, name the clock."""
    from flwr.supernode.cli import flower_supernode

    check_root(arguments, datetime.now(UTC))
    shorten_waits()
    sys.argv = ["collapipe supernode", *arguments]
    with client_process.offer_fast_program():
        try:
            flower_supernode()
        except SystemExit as end:
            if end.code == 1:
                log.error(_CLOCK, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}")
            raise
        except RuntimeError as error:
            if _NO_API not in str(error):
                raise
            raise ConfigError(
                "the SuperNode cannot listen at its --host and --port (127.0.0.1:9094 if not "
                "given), as another program, such as another SuperNode, may do: choose another port"
            ) from error
