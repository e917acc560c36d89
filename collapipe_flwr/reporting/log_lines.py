"""A run directory as lines of a log, for readers without access to the directory.

With ``reporting.log-lines=true`` the ServerApp prints each file that it writes: a mark, its kind,
and compressed JSON. Flower keeps the output of a ServerApp and returns it by ``flwr log``.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.reporting.run_directory import RunDirectory

_MARK = "collapipe-log "
_MOST_BYTES = 256 << 20  # of one line, unpacked


def log_line(kind: str, value: Mapping[str, Any]) -> str:
    """Encode a write of ``config``, ``anew`` (no events yet), ``event`` or ``summary``."""
    packed = zlib.compress(json.dumps(value, allow_nan=False).encode())
    return f"{_MARK}{kind} {base64.b64encode(packed).decode()}"


def parse_line(line: str) -> tuple[str, dict[str, Any]] | None:
    """Decode a line of a log; None without the mark. Raises ProtocolError for a damaged one."""
    _, mark, text = line.partition(_MARK)
    kind, _, packed = text.strip().partition(" ")
    if not mark:
        return None
    try:
        unpacking = zlib.decompressobj()
        unpacked = unpacking.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
        return kind, json.loads(unpacked)
    except (ValueError, zlib.error) as error:
        raise ProtocolError(f"a line of the log is damaged ({error})") from error


def print_line(kind: str, value: Mapping[str, Any]) -> None:
    """Print a line by a single write, as other threads print as well."""
    sys.stdout.write(f"{log_line(kind, value)}\n")
    sys.stdout.flush()


def replay(kind: str, value: Mapping[str, Any], directory: RunDirectory, lock: ExitStack) -> None:
    """Repeat the write of a line in another directory, whose run-config is locked by ``lock``."""
    match kind:
        case "config":
            directory.write_config(value, lock)
        case "anew":
            directory.rewrite_events(())
        case "event":
            directory.append_event(value)
        case "summary":
            directory.write_summary(value)
