"""A control unit and one device in this process, the head on an edge server over loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch import Tensor

from collapipe_flwr.core.errors import CollaPipeError
from collapipe_flwr.host.service import HostService
from collapipe_flwr.pipeline.config import (
    Execution,
    NextHop,
    Placement,
    SessionKey,
    SessionRequest,
    StageConfig,
)
from collapipe_flwr.pipeline.link import Link, make_memory_pair
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import FirstStage, MiddleStage
from collapipe_flwr.transport.client import HostClient
from tests.pipeline.chains import DEADLINE_S, SGD, Head, settings

TOKEN = "a token for tests only"


def build_head(request: SessionRequest, weights: Mapping[str, Tensor]) -> Head:
    assert request.spec_json == "{}"
    head = Head()
    head.load_weights(weights)
    return head


def service(**options: Any) -> HostService:
    return HostService(build_head, **options)


def session_key(session_id: str = "c1") -> SessionKey:
    return SessionKey(session_id=session_id, token=TOKEN)


def request(session_id: str = "c1", token: str = TOKEN, **options: Any) -> SessionRequest:
    """Options are fields of the request, of its stage, its execution or its placement."""

    def own(kind: type) -> dict[str, Any]:
        return {f.name: options.pop(f.name) for f in fields(kind) if f.name in options}

    execution = Execution(**own(Execution))
    waits = {"name": "edge", "deadline_s": DEADLINE_S, "idle_s": DEADLINE_S}
    stage = StageConfig(**{**waits, **own(StageConfig), "execution": execution})
    nowhere = NextHop(address="", key=session_key())
    placed = {k: v for k, v in own(Placement).items() if v is not None}
    return SessionRequest(
        **{
            "key": SessionKey(session_id=session_id, token=token),
            "spec_json": "{}",
            "stage": stage,
            "placement": Placement(**{"blocks": (0, 1), "next_hops": (nowhere,), **placed})
            if placed
            else None,
            "optimizer": SGD,
            **options,
        }
    )


def open_session(client: HostClient, head: Head, session_id: str = "c1") -> None:
    client.open_session(request(session_id)).push_weights(head.state_dict())


class Cluster:
    """Stages of the control unit and one device; `edge` is the device's link downstream."""

    def __init__(self, parts, edge: Link, deadline_s: float = DEADLINE_S) -> None:
        to_device, to_control = make_memory_pair("control unit", "device 1")
        self.links = (to_device, to_control, edge)
        self.first = FirstStage(
            parts[0],
            Optimizer(SGD, parts[0].named_parameters()),
            settings("control unit", deadline_s=deadline_s),
            downstream=to_device,
        )
        self.device = MiddleStage(
            parts[1],
            Optimizer(SGD, parts[1].named_parameters()),
            settings("device 1", deadline_s=deadline_s),
            upstream=to_control,
            downstream=edge,
        )
        self.failure: CollaPipeError | None = None
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        try:
            self.device.serve()
        except CollaPipeError as error:
            self.failure = error

    @contextmanager
    def running(self) -> Iterator[FirstStage]:
        self._thread.start()
        try:
            yield self.first
            self.first.finish()
            self._thread.join(DEADLINE_S)
        finally:
            for link in self.links:
                link.close()
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive()
