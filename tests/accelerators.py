"""The kinds of accelerator that laws are tested on: real ones where there are any, and one that is
only pretended."""

from __future__ import annotations

import pytest
import torch

from collapipe_flwr.cluster.fleet import RoundOrder
from collapipe_flwr.generation.backends import ServedModel
from collapipe_flwr.host.service import EdgeService
from collapipe_flwr.pipeline.compute import present, resolve
from tests.pretend import LACKING, NAME, pretend_device

KINDS = (NAME, "cuda", "xpu", "mps")


def _param(kind: str) -> object:
    lacking = LACKING if kind == NAME else f"no {kind} on this machine"
    there = not LACKING if kind == NAME else kind in {device.type for device in present()}
    return pytest.param(kind, marks=pytest.mark.skipif(not there, reason=lacking))


@pytest.fixture(params=list(map(_param, KINDS)))
def accelerator(request: pytest.FixtureRequest) -> torch.device:
    """One of each kind."""
    return pretend_device() if request.param == NAME else resolve(request.param)


@pytest.fixture
def everything_is_there(accelerator: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """All parts of chains and hosts compute on the accelerator; unsplit models stay where they are.

    So the tests of a law need not know of it.
    """
    for kind in (RoundOrder, ServedModel, EdgeService):
        defaults = kind.__init__.__kwdefaults__
        assert "compute" in defaults
        monkeypatch.setitem(defaults, "compute", accelerator)
    return accelerator
