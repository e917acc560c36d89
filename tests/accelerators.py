"""The kinds of accelerator that laws are tested on: real ones, or else one that is only pretended.

With both in one process, torch would ask the pretended one for streams of the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import TrainingOrder
from collapipe_flwr.generation.backends import ServedModel
from collapipe_flwr.host.service import HostService
from collapipe_flwr.pipeline.compute import list_devices, resolve
from collapipe_flwr.pipeline.stage import Stage
from tests.pretend import LACKING, NAME, pretend_device

KINDS = (NAME, "cuda", "xpu", "mps")
_REAL = {device.type for device in list_devices()} - {"cpu"}
NO_PRETENCE = LACKING or (f"{', '.join(_REAL)} is here" if _REAL else "")


def _param(kind: str) -> object:
    lacking = "" if kind in _REAL else f"no {kind} on this machine"
    if kind == NAME:
        lacking = NO_PRETENCE
    return pytest.param(kind, marks=pytest.mark.skipif(bool(lacking), reason=lacking))


@pytest.fixture(params=list(map(_param, KINDS)))
def accelerator(request: pytest.FixtureRequest) -> torch.device:
    """One of each kind."""
    return pretend_device() if request.param == NAME else resolve(request.param)


@contextmanager
def everything_at(device: torch.device) -> Iterator[set[torch.device]]:
    """All parts of chains and hosts that are made in the body compute there.

    So the tests of a law need not know of it. Yields where stages were.
    """
    seen: set[torch.device] = set()
    run_step = Stage.run_step

    def noted(stage: Stage, step: object) -> None:
        seen.add(stage.place)
        run_step(stage, step)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        for kind in (TrainingOrder, ServedModel, HostService):
            assert "compute" in kind.__init__.__kwdefaults__
            patch.setitem(kind.__init__.__kwdefaults__, "compute", device)
        patch.setattr(ThreadEdge.__init__, "__defaults__", (device,))
        patch.setattr(Stage, "run_step", noted)
        yield seen
