"""Shannon links: inverses, and the closed form of the thrifty time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.costs.radio import compute_power_w, compute_send_time_s, solve_exponent
from tests.thorough import examples

NOISE = 2e-20


@examples(30, 100)
@given(st.floats(3, 8), st.floats(5, 8), st.floats(-12, -6), st.floats(-3, 0))
def test_time_and_power_are_inverse(bits: float, width: float, gain: float, power: float) -> None:
    noise = NOISE / 10**gain
    time = compute_send_time_s(10**bits, 10**width, 10**power / noise)
    assert compute_power_w(10**bits, 10**width, noise, time) == pytest.approx(10**power, rel=1e-9)


@examples(20, 60)
@given(st.floats(4, 7), st.floats(-10, -7), st.floats(-4, 3))
def test_thrifty_time_minimises_time_plus_energy(bits: float, gain: float, price: float) -> None:
    a, width, noise, worth = 10**bits, 1e7, NOISE / 10**gain, 10**price

    def cost(time: float) -> float:
        return worth * time + float(compute_power_w(a, width, noise, time)) * time

    best = np.log(2.0) * a / (width * float(solve_exponent(worth / (noise * width))))
    assert cost(best) <= min(cost(best * f) for f in (0.9, 0.99, 1.01, 1.1)) * (1 + 1e-9)


def test_exponent_equation_over_many_decades() -> None:
    z = np.logspace(-6, 2, 300)
    ratio = np.where(z < 1e-3, z * z / 2 + z**3 / 3 + z**4 / 8, np.exp(z) * (z - 1) + 1)
    assert solve_exponent(ratio) == pytest.approx(z, rel=1e-6)
