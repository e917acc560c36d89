"""A command in a real pseudo-terminal of so many columns, and what it wrote there and when."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ROWS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """``chunks`` are texts with the seconds since the start."""

    status: int
    chunks: tuple[tuple[float, str], ...]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.chunks)

    @property
    def lines(self) -> list[str]:
        """See `lines_of`."""
        return lines_of(self.text)


def lines_of(text: str) -> list[str]:
    """Every line as it stood at any time, without colours and cursor movements."""
    return re.split(r"[\r\n]+", _ESCAPES.sub("", text))


def in_terminal(
    command: Sequence[str], columns: int, env: Mapping[str, str] | None = None
) -> Written:
    """Run ``command`` to its end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    known = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    start_s = time.monotonic()
    chunks = []
    with subprocess.Popen(
        [sys.executable, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**known, "TERM": "xterm-256color", **(env or {})},
        start_new_session=True,
    ) as process:
        os.close(theirs)
        while data := _read(ours):
            chunks.append((time.monotonic() - start_s, data.decode(errors="replace")))
    os.close(ours)
    return Written(status=process.returncode, chunks=tuple(chunks))


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux tells that the other end is closed
        return b""
