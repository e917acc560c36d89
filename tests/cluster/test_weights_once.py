"""A control unit never holds the weights twice: not beside its message, not beside its reply."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.forked import start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory as Linux counts it")


def test_a_round_takes_less_than_the_weights_a_second_time() -> None:
    process = start("tests.cluster.one_round_in_memory", env=os.environ)
    assert process.stdout is not None
    with process.stdout as told:
        words = told.read()
    assert process.wait(60) == 0
    message_bytes, grown_bytes = json.loads(words)
    assert message_bytes > 150e6
    assert grown_bytes < 0.4 * message_bytes
