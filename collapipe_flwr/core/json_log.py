"""Log records as JSON lines, each with its run, round and cluster."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType

_OURS = ("collapipe_flwr", "flwr")
_NOTHING: Mapping[str, object] = MappingProxyType({})
_about = ContextVar("about", default=_NOTHING)


@contextmanager
def add_log_fields(**fields: object) -> Iterator[None]:
    """Add fields, as ``run``, ``round``, ``cluster``, to this thread's log records in the body."""
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


class JsonLines(logging.Formatter):
    """One JSON object per record, without empty fields; ``time`` is UTC, ``error`` a traceback."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "device": self._device,
            **_about.get(),
            "logger": record.name,
            "message": record.getMessage(),
            "error": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({k: v for k, v in fields.items() if v not in (None, "")}, default=str)


def log_json(device: str) -> None:
    """Log to stderr as JSON lines: our records and Flower's from INFO on, others from WARNING."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(device))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers.clear()  # Flower's own writes to the console
        logger.propagate = True
        logger.setLevel(logging.INFO)
