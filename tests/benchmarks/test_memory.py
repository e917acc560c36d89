"""The least that a device can hold, computed from the split."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.data_plane.memory import MemoryCase, least_bytes

SMALL = MemoryCase(blocks=4, width=64, vocabulary=100, tokens=16, devices=2)


def test_a_device_holds_four_copies_of_its_blocks_and_the_inputs_of_the_batch() -> None:
    width = SMALL.width
    block = 12 * width**2 + 13 * width  # matrices, biases and norms of one block of BERT
    state, floor = least_bytes(SMALL)
    assert state == 2 * 4 * 4 * block
    one_more = replace(SMALL, micro_batches=SMALL.micro_batches + 1)
    inputs = 2 * 4 * SMALL.micro_batch * SMALL.tokens * width
    assert least_bytes(one_more) == (state, floor + inputs)
    assert least_bytes(replace(SMALL, recompute=False))[1] > floor > state
