"""The two lines of a round in plain output."""

from __future__ import annotations

import pytest

from collapipe_flwr.reporting.console import RoundPrinter
from collapipe_flwr.reporting.events import RoundEvent


def test_empty_energy_queues_have_no_sign(capsys: pytest.CaptureFixture[str]) -> None:
    queues_j = {"A/1": -0.0, "A/2": -0.0}
    event = RoundEvent(round_index=1, wall_s=1.0, metrics={}, loss=1.0, queues_j=queues_j)
    RoundPrinter(1).show(event)
    assert "energy queue at most 0 J" in capsys.readouterr().out


@pytest.mark.parametrize("clusters", [2, 40])
def test_in_a_pipe_a_plan_of_many_clusters_is_cut_to_the_first(
    capsys: pytest.CaptureFixture[str], clusters: int
) -> None:
    plan = {
        "latency_s": 3.1,
        "clusters": [
            {
                "cluster_id": f"c{number}",
                "segments": [{"device_id": f"c{number}/pi", "first_block": 0, "stop_block": 4}],
                "micro_batch_size": 8,
                "micro_batches": 4,
            }
            for number in range(clusters)
        ],
    }
    event = RoundEvent(round_index=1, wall_s=1.0, metrics={}, loss=1.0, plan=plan)
    RoundPrinter(1).show(event)
    line = capsys.readouterr().out.splitlines()[1]
    shown = line.count("pi:0-3 8x4")
    assert len(line) <= 240 and 2 <= shown < 20
    assert line.endswith(f"| and {clusters - shown} more") == (shown < clusters)
