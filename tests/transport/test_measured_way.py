"""The rate of a link on a machine so busy that echoes of nothing take as long as full ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from collapipe_flwr.transport import client
from collapipe_flwr.transport.client import HostClient

SIZE = 4 * 2**20


class Way:
    """Its echoes take these seconds: empty ones, and those with bytes."""

    def __init__(self, empty_s: float, full_s: float) -> None:
        self._empty_s, self._full_s, self.now_s = empty_s, full_s, 0.0

    def echo(self, payload: bytes = b"") -> None:
        self.now_s += self._full_s if payload else self._empty_s


@pytest.mark.parametrize(
    ("empty_s", "full_s", "rate"),
    [
        (0.002, 0.022, 8 * SIZE / 0.02),
        (0.01, 0.01, 8 * SIZE / 0.001),
        (0.02, 0.01, 8 * SIZE / 0.001),
    ],
    ids=["quiet", "as long", "longer"],
)
def test_a_rate_is_at_most_ten_times_what_an_echo_carried(
    empty_s: float, full_s: float, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = Way(empty_s, full_s)
    monkeypatch.setattr(client, "time", SimpleNamespace(perf_counter=lambda: way.now_s))
    found = HostClient.measure_way(cast(HostClient, way), SIZE)
    assert found.rate_bit_per_s == pytest.approx(rate)
    assert found.delay_s == pytest.approx(empty_s / 2)
