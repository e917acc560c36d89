"""Plans count with the bytes that the codecs really write, and with what they really lose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import CODECS, UPDATE_CODECS
from collapipe_flwr.costs.layouts import Layouts, gather_hops
from collapipe_flwr.costs.radio import ROUNDING, WIRE_SHARE, rank_codecs
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.simulation.setting import ModelShape
from collapipe_flwr.simulation.world import make_world
from collapipe_flwr.transport.codec import WIRE_CODECS

ELEMENTS = 128 * 1000


def test_there_is_a_share_and_an_error_for_every_codec():
    assert ROUNDING.keys() == WIRE_CODECS.keys() == set(CODECS)
    assert WIRE_SHARE.keys() == set(UPDATE_CODECS)


@pytest.mark.parametrize("codec", WIRE_CODECS)
def test_the_share_is_that_of_the_codec(codec):
    written = len(WIRE_CODECS[codec].pack(torch.randn(ELEMENTS)))
    assert WIRE_SHARE[codec] == pytest.approx(written / (4 * ELEMENTS), rel=1e-4)


@pytest.mark.parametrize("codec", WIRE_CODECS)
def test_the_error_is_that_of_the_codec(codec):
    values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1))
    raw = bytearray(WIRE_CODECS[codec].pack(values))
    read = WIRE_CODECS[codec].unpack(raw, values.dtype)[:ELEMENTS]
    error = float(((read - values).square().mean() / values.square().mean()).sqrt())
    assert error == pytest.approx(ROUNDING[codec], rel=0.05)


def test_codecs_stand_in_order_of_what_they_lose():
    assert [ROUNDING[name] for name in CODECS] == sorted(ROUNDING.values())


def test_a_codec_that_loses_more_without_being_smaller_is_never_chosen():
    ranked = rank_codecs(("int8", "bf16", "fp16", "fp32"))
    assert [CODECS[k] for k in ranked] == ["fp32", "fp16", "int8"]
    assert [CODECS[k] for k in rank_codecs(("bf16",))] == ["bf16"]
    with pytest.raises(ConfigError, match="zip"):
        rank_codecs(("zip",))


def _hops(codec: str, bound: str = "") -> np.ndarray:
    """Bits of every hop of one cluster over two devices, the cluster bound to a codec or not."""
    world = make_world(cluster_devices=[["phone", "phone", "phone"]], examples=[10])
    world = replace(world, clusters=(replace(world.clusters[0], link_codec=bound),))
    model = ModelShape(blocks=3, decoder_blocks=3, width=16, tokens=8, wire_bytes=4).profile()
    rows = Layouts(
        cluster_r=np.array([0]),
        member_rs=np.array([[1, 2]]),
        stop_rs=np.array([[1, 3]]),
        micro_batch_size_r=np.array([4]),
        micro_batches_r=np.array([2]),
    )
    return gather_hops(tabulate(world.snapshot(1, model), codec), rows).bits


@pytest.mark.parametrize("codec", CODECS)
def test_hops_carry_coded_bits(codec):
    assert _hops(codec) == pytest.approx(_hops("fp32") * WIRE_SHARE[codec])


def test_a_cluster_may_be_bound_to_a_codec():
    assert (_hops("fp32", bound="int8") == _hops("int8")).all()
