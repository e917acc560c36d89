"""A simulation in which plans choose codecs says which they chose."""

from __future__ import annotations

from collapipe_flwr.reporting.simulation import codec_lines
from collapipe_flwr.simulation.setting import Setting, overridden
from collapipe_flwr.simulation.simulate import simulate

SMALL = overridden(
    Setting(),
    clusters=1,
    devices=2,
    rounds=1,
    blocks=3,
    width=64,
    tokens=16,
    policies="dssda,uniform",
    micro_batch_sizes=(4,),
    micro_batches=(2,),
    max_model_share=1.0,
)


def test_chosen_codecs_are_counted_and_rules_use_the_coarsest() -> None:
    assert codec_lines(simulate(SMALL)) == []
    several = overridden(SMALL, codecs="fp32,int8")
    ours, rule = codec_lines(simulate(several))
    assert ours.startswith("codecs of dssda: ") and "fp16" not in ours
    assert rule.startswith("codecs of uniform: int8 ") and "fp32" not in rule
