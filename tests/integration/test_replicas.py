"""A whole run in which devices share stages learns what one without replicas learns."""

from __future__ import annotations

import pytest

from collapipe_flwr.core.keys import Value
from collapipe_flwr.scheduler import replicating
from tests.integration.conftest import RunApp, events_of
from tests.integration.test_app import _assert_same_model


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_a_run_with_replicas_learns_what_one_without_learns(
    run_app: RunApp, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    batch: dict[str, Value] = {
        "scheduler.micro-batch-sizes": "3",
        "scheduler.micro-batches": "3",
        "scheduler.schedule": schedule,
        "scheduler.replicas": True,
        "scheduler.policy": "latency-only",
        "world.memory-share": 1.0,
    }
    monkeypatch.setattr(replicating, "WORTH", -1e9)  # also where they make rounds longer
    shared = run_app({**batch, "run-name": "shared"})
    monkeypatch.undo()
    plain = run_app({**batch, "scheduler.replicas": False, "run-name": "plain"})
    _assert_same_model(shared, plain, depth=4)
    events = events_of(shared)
    for event in events:
        assert not event["failures"]
        for cluster in event["plan"]["clusters"]:
            together = [n for s in cluster["segments"] for n in (s["device_id"], *s["replicas"])]
            measured = {r for r in event["memory_bytes"] if r.startswith(cluster["cluster_id"])}
            assert {r.rpartition("/")[2] for r in measured} > {
                n.rpartition("/")[2] for n in together
            }
        assert any(s["replicas"] for c in event["plan"]["clusters"] for s in c["segments"])
