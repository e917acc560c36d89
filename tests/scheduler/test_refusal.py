"""A cluster that no plan fits is told so in numbers that bear the sentence out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.domain import DeviceProfile
from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.setting import ModelShape
from collapipe_flwr.simulation.world import make_world
from tests.thorough import examples
from tests.worlds import planned

MODEL = ModelShape(blocks=5, width=64, tokens=16, decoder_blocks=1, vocabulary=300).profile()
SHORT = re.compile(r"needs? ([\d.]+) MiB and ha(?:s|ve) ([\d.]+) MiB for plans")
TOGETHER = re.compile(r"all blocks need ([\d.]+) MiB and the \d+ devices have ([\d.]+) MiB in all")
MEMORIES = st.lists(
    st.floats(0.02, 1.2), min_size=2, max_size=5
)  # of the whole, control unit first


def refused(memories: list[float], options: SchedulerConfig) -> str:
    """Why the cluster cannot be planned; empty where it can."""
    whole = sum(p.state_bytes + 4 * p.stash_bytes for p in MODEL.blocks)
    kinds = ["raspberry-pi-5"] * len(memories)
    world = make_world(cluster_devices=[kinds], examples=[50])
    sizes = iter(memories)

    def sized(member: DeviceProfile) -> DeviceProfile:
        return replace(member, memory_bytes=int(next(sizes) * whole))

    cluster = world.clusters[0].with_members(sized)
    snapshot = replace(world, clusters=(cluster,)).snapshot(1, MODEL)
    try:
        planned(snapshot, options)
    except InfeasibleError as error:
        return str(error)
    return ""


@examples(20, 80)
@given(
    memories=MEMORIES,
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    counts=st.sampled_from([(1, 4), (3,)]),
    share=st.sampled_from([1.0, 0.5, 0.2]),
    margin=st.sampled_from([0.0, 0.05]),
)
def test_no_refusal_contradicts_its_own_numbers(
    memories: list[float], schedule: str, counts: tuple[int, ...], share: float, margin: float
) -> None:
    options = SchedulerConfig(
        micro_batch_sizes=(1, 4),
        micro_batches=counts,
        schedule=schedule,
        max_model_share=share,
        memory_margin=margin,
    )
    sentence = refused(memories, options)
    if not sentence:
        return
    short, together = SHORT.findall(sentence), TOGETHER.findall(sentence)
    assert bool(short) != bool(together), sentence
    assert all(float(need) > float(have) for need, have in short), sentence
    assert all(float(need) <= float(have) for need, have in together), sentence


@pytest.mark.parametrize(
    ("memories", "words"),
    [
        ([0.01, 1.0, 1.0], "the control unit needs"),
        ([1.0, 0.1, 0.1], "a device for one block needs"),
        ([1.0, 0.3, 0.3], "the 2 devices together need "),
    ],
)
def test_what_falls_short_is_named(memories: list[float], words: str) -> None:
    options = SchedulerConfig(micro_batch_sizes=(1, 4), micro_batches=(1, 4))
    assert words in refused(memories, options)
