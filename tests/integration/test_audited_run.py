"""Runs whose control units audit their devices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.core.keys import Value
from collapipe_flwr.federation.client import site
from collapipe_flwr.pipeline.link import Frame
from collapipe_flwr.pipeline.roles import MiddleStage
from tests.integration.conftest import RunApp, events_of

AUDITED: dict[str, Value] = {"trust.audit-share": 1.0, "train.snapshot-every": 2}


def weights_of(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def incidents_of(folder: Path) -> list[dict[str, Any]]:
    return [each for event in events_of(folder) for each in event["incidents"]]


def test_audits_of_honest_devices_change_nothing(run_app: RunApp, shared_run: RunApp) -> None:
    audited = run_app(AUDITED)
    assert weights_of(audited) == weights_of(shared_run())
    assert not incidents_of(audited)


def test_a_device_that_lies_is_reported_and_out_of_the_next_rounds(
    run_app: RunApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "cluster-0/2-jetson-nano"

    class Lazy(MiddleStage):
        def _compute(self, frame: Frame, hidden: Tensor | None) -> Tensor:
            if self.settings.name == name:
                assert hidden is not None
                return hidden * 1.0
            return super()._compute(frame, hidden)

    monkeypatch.setattr(site, "ThreadFleet", partial(ThreadFleet, make_stage=Lazy))
    folder = run_app({**AUDITED, "num-server-rounds": 3, "world.memory-share": 0.0003})
    first, *others = events_of(folder)
    told = {each["kind"]: each["text"] for each in first["incidents"]}
    assert told["quarantined"].startswith(f"{name}: an audit found that {name} computed wrong")
    assert told["recovered"].startswith(f"quarantined {name}, replayed from step 0")
    assert name not in devices_of(first) and not first["lost"]
    for event in others:
        assert name not in devices_of(event) and not event["incidents"]


def devices_of(event: dict[str, Any]) -> set[str]:
    """Whose results the round has."""
    return {name for cluster in event["clusters"].values() for name in cluster["stages"]}
