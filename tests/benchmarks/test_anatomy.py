"""`collapipe bench round-anatomy`: CPU seconds of parts, each without those that it calls."""

from __future__ import annotations

import threading
import time
from math import isclose

import pytest

from benchmarks.rounds.anatomy import AROUND, MICRO_BATCHES, PRODUCTS, REST, ROWS, _parts, measure
from benchmarks.rounds.metered import Meter
from collapipe_flwr.core.errors import ConfigError


def busy(cpu_s: float) -> float:
    until_s = time.thread_time() + cpu_s
    while (now_s := time.thread_time()) < until_s:
        pass
    return now_s


def spend(meter: Meter, within: str) -> None:
    inner = meter.timed("frames", busy)
    meter.timed(within, lambda: (busy(0.02), inner(0.03)))()


def test_a_part_counts_without_those_that_it_calls():
    meter, begin_s = Meter(), time.thread_time()
    spend(meter, "stage loop")
    assert 0.03 <= meter.cpu_s["frames"] < meter.cpu_s["stage loop"] + 0.02
    assert 0.05 <= sum(meter.cpu_s.values()) <= time.thread_time() - begin_s


def test_a_transfer_counts_with_all_that_it_calls():
    meter = Meter()
    spend(meter, "hand-out")
    assert list(meter.cpu_s) == ["hand-out"] and meter.cpu_s["hand-out"] >= 0.05


def test_threads_add_up_and_what_waits_costs_nothing():
    meter = Meter()
    threads = [threading.Thread(target=spend, args=(meter, "stage loop")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        meter.timed("streams", thread.join)()
    assert meter.cpu_s["frames"] >= 0.06 and meter.cpu_s["streams"] < 0.02


def test_the_items_of_a_generator_are_timed_and_not_who_takes_them():
    def items():
        for number in range(3):
            busy(0.01)
            yield number

    meter = Meter()
    for _ in meter.timed_items("collection", items()):
        busy(0.02)
    assert 0.03 <= meter.cpu_s["collection"] < 0.06


def test_rows_sum_to_the_process():
    parts = _parts({"cpu_s": 1.0, "forward": 0.3, "backward": 0.3, "frames": 0.1}, 0.4, 0.05)
    assert tuple(parts) == ROWS and isclose(sum(parts.values()), 1.0)
    assert isclose(parts[AROUND], 0.15) and isclose(parts[REST], 0.3)


def test_an_unknown_model_is_refused():
    with pytest.raises(ConfigError, match="choose of demo, board"):
        next(measure("gpt", 1))


@pytest.mark.slow
def test_a_device_computes_longer_the_more_blocks_and_micro_batches_it_has():
    cases = {(case["device"], case["micro_batches"]): case for case in measure("demo", 1)}
    few, many = MICRO_BATCHES
    assert cases[0, few]["blocks"] < cases[1, few]["blocks"]
    for case in cases.values():
        assert isclose(sum(case["parts_s"].values()), case["cpu_s"])
        assert min(case["parts_s"].values()) >= 0
        assert case["cpu_s"] < case["wall_s"]
    assert cases[0, few]["parts_s"][PRODUCTS] < cases[1, few]["parts_s"][PRODUCTS]
    assert cases[0, few]["parts_s"]["frames"] < cases[0, many]["parts_s"]["frames"]
