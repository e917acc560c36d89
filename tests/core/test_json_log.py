"""A JSON line per record, with what it is about."""

from __future__ import annotations

import json
import logging
import sys
import threading
from typing import Any

from collapipe_flwr.core.json_log import JsonLines, add_log_fields


def line(message: str, *values: object, failed: bool = False) -> dict[str, Any]:
    record = logging.LogRecord(
        "collapipe_flwr.host",
        logging.WARNING,
        __file__,
        1,
        message,
        values,
        sys.exc_info() if failed else None,
    )
    text = JsonLines("pi-1").format(record)
    assert "\n" not in text
    fields: dict[str, Any] = json.loads(text)
    return fields


def test_a_record_is_one_line_with_its_fields() -> None:
    with add_log_fields(run="a", round=3, cluster=""):
        found = line("%d of\n%s", 2, "three")
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "warning",
        "device": "pi-1",
        "run": "a",
        "round": 3,
        "logger": "collapipe_flwr.host",
        "message": "2 of\nthree",
    }


def test_a_traceback_is_a_field() -> None:
    try:
        raise ZeroDivisionError("by nothing")
    except ZeroDivisionError:
        found = line("failed", failed=True)
    assert found["error"].splitlines()[-1] == "ZeroDivisionError: by nothing"


def test_what_a_line_is_about_ends_with_the_body_and_stays_in_its_thread() -> None:
    other: list[dict[str, Any]] = []
    with add_log_fields(run="a", round=1):
        with add_log_fields(round=2):
            assert line("x")["round"] == 2
        assert line("x")["round"] == 1
        thread = threading.Thread(target=lambda: other.append(line("x")))
        thread.start()
        thread.join()
    assert "run" not in other[0]
    assert "run" not in line("x")
