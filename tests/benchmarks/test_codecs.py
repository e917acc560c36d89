"""The same training by every codec: fewer bytes, nearly the same loss, exact where it says so."""

from __future__ import annotations

import pytest

from benchmarks.data_plane.codecs import CodecTask, train_with_codecs
from collapipe_flwr.costs.radio import WIRE_SHARE


def test_auto_is_measured_with_the_codecs_of_a_plan():
    case = CodecTask(steps=2, micro_batch=16, test_examples=4, codecs=("auto",))
    exact, auto, _ = train_with_codecs(case)
    assert exact.hops == ("fp32",) * 3 and auto.codec == "auto"
    assert len(auto.hops) == 3 and set(auto.hops) - {"fp32"}
    assert auto.link_bytes < exact.link_bytes
    assert auto.loss != exact.loss and auto.loss == pytest.approx(exact.loss, rel=1e-2)


def test_bytes_shrink_by_the_codec_and_the_loss_stays_near():
    sizes = {"steps": 2, "micro_batch": 16, "test_examples": 4}
    case = CodecTask(codecs=("fp32", "int8"), seeds=(7, 8), **sizes)
    exact, coded, halved = train_with_codecs(case)
    assert all(len(set(row.losses)) == len(row.metrics) == 2 for row in (exact, coded, halved))
    assert (exact.codec, coded.codec) == ("fp32", "int8")
    assert (exact.precision, halved.precision) == ("fp32", "bf16")
    assert exact.loss_over_fp32 == 1.0
    assert 1.0 not in (coded.loss_over_fp32, halved.loss_over_fp32)
    assert coded.loss_over_fp32 == pytest.approx(1.0, rel=1e-3)
    assert halved.loss_over_fp32 == pytest.approx(1.0, rel=1e-2)
    # headers, masks and labels are not coded
    assert WIRE_SHARE["int8"] < coded.link_bytes / exact.link_bytes < 1.5 * WIRE_SHARE["int8"]
