"""Our runtime as a chain of processes: the first drives, the others are hosts of one part each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from torch import Tensor

from benchmarks.data_plane.job import TOKEN, Job, StageOrder, StageSeconds, StepSeconds, Turn
from benchmarks.data_plane.model import BenchPart, micro_batches
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.links import LinkConfig, TlsFiles
from collapipe_flwr.core.measurements import Span
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.pipeline.config import (
    Execution,
    NextHop,
    Placement,
    SessionKey,
    SessionRequest,
    StageConfig,
)
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.roles import FirstStage
from collapipe_flwr.pipeline.stage import WEIGHTS
from collapipe_flwr.transport.client import Dialer, HostClient

OPTIMIZER = OptimizerConfig(learning_rate=1e-4)
_KEY = SessionKey(session_id="bench", token=TOKEN)


def build_part(request: SessionRequest, weights: Mapping[str, Tensor]) -> BenchPart:
    """The part of the stage that a session asks for."""
    order = from_json(StageOrder, request.spec_json, "bench")
    part = order.job.part(order.stage)
    part.load_weights(weights)
    return part


def member_tls(folder: str, name: str) -> TlsFiles | None:
    """Certificate of one member in a folder of ``certs``; none where no folder is named."""
    if not folder:
        return None
    files = {kind: Path(folder) / f"{name}.{kind}" for kind in ("pem", "key")}
    return TlsFiles(ca=Path(folder) / "ca.pem", certificate=files["pem"], key=files["key"])


def serve(host: str, tls: TlsFiles | None) -> HostServer:
    """A host on a free port of an address of this machine."""
    service = HostService(build_part, connect=Dialer(name="device", tls=tls))
    return HostServer(f"{host}:0", service, tls=tls)


class Driver:
    """The first stage of a chain whose other stages are hosts at ``addresses``."""

    def __init__(self, job: Job, addresses: Sequence[str], tls: TlsFiles | None) -> None:
        self._job = job
        self._clients = [HostClient(address, tls=tls) for address in addresses]
        for stage in range(1, job.stages):
            self._open(stage, addresses)
        self._link = self._clients[0].get_session(_KEY).stream(config=LinkConfig(codec=job.codec))
        part = job.part(0)
        self._batch = micro_batches(job.shape)
        self._first = FirstStage(
            part,
            Optimizer(OPTIMIZER, part.named_parameters()),
            _config(job, 0),
            downstream=self._link,
        )

    def steps(self, count: int) -> Turn:
        """Train some steps."""
        start_s = time.perf_counter()
        for _ in range(count):
            loss = self._first.train_step(self._batch).loss
        return Turn(wall_s=time.perf_counter() - start_s, loss=loss)

    def close(self) -> tuple[StepSeconds, ...]:
        """End the chain in good order; what every step took, by all stages."""
        self._first.finish()
        self._link.close()
        spans: list[Sequence[Span]] = [self._first.recorder.spans]
        for client in self._clients:
            session = client.get_session(_KEY)
            spans.append(session.report().spans)
            session.close()
            client.close()
        return _by_step(spans)

    def _open(self, stage: int, addresses: Sequence[str]) -> None:
        job, client = self._job, self._clients[stage - 1]
        placement = None
        if stage + 1 < job.stages:
            hop = NextHop(
                address=addresses[stage],
                key=_KEY,
                name=f"stage {stage + 1}",
                link=LinkConfig(codec=job.codec),
            )
            placement = Placement(blocks=(stage - 1, stage), next_hops=(hop,))
        request = SessionRequest(
            key=_KEY,
            spec_json=to_json(StageOrder(job=job, stage=stage)),
            stage=_config(job, stage),
            placement=placement,
            optimizer=OPTIMIZER,
        )
        client.open_session(request).push_weights(job.part(stage).state_dict())


def _config(job: Job, stage: int) -> StageConfig:
    return StageConfig(
        name=f"stage {stage}" if stage else "control unit",
        schedule=job.schedule,
        depth=job.planned_depths[stage],
        execution=Execution(recompute=job.recompute, keep_spans=True),
    )


def _by_step(stages: Sequence[Sequence[Span]]) -> tuple[StepSeconds, ...]:
    """The spans of all stages as one row per step."""
    rows = []
    for step in sorted({span.step for span in stages[0]}):
        of_step = [[span for span in spans if span.step == step] for spans in stages]
        start_s = min(span.start_s for span in of_step[0])
        stop_s = max(span.stop_s for span in of_step[0])
        work = [span for span in of_step[0] if span.work == "optimizer"]
        if work:  # the END frame is a step without work
            stages_s = tuple(map(_stage_seconds, of_step))
            rows.append(StepSeconds(step_s=stop_s - start_s, stages=stages_s))
    return tuple(rows)


def _stage_seconds(spans: Sequence[Span]) -> StageSeconds:
    def seconds(work: str) -> list[float]:
        return [span.stop_s - span.start_s for span in spans if span.work == work]

    return StageSeconds(
        forward_s=fmean(seconds("forward")),
        backward_s=fmean(seconds("backward")),
        weights_s=fmean(seconds(WEIGHTS) or [0.0]),
        optimizer_s=sum(seconds("optimizer")),
    )
