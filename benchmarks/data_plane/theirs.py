"""The peer: `torch.distributed.pipelining` on gloo, with the same parts, batch and optimiser."""

from __future__ import annotations

import time

import torch
from torch import distributed as dist

from benchmarks.data_plane.job import Job, Turn
from benchmarks.data_plane.model import make_batch, mean_loss
from benchmarks.data_plane.ours import OPTIMIZER
from collapipe_flwr.pipeline.optimizer import Optimizer


class Rank:
    """One stage of the peer's pipeline; ``store`` is where the ranks meet, as HOST:PORT."""

    def __init__(self, job: Job, rank: int, store: str) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        self._job, self._rank = job, rank
        dist.init_process_group(
            "gloo", init_method=f"tcp://{store}", rank=rank, world_size=job.stages
        )
        part = job.part(rank)
        self._optimizer = Optimizer(OPTIMIZER, part.named_parameters())
        self._ids, self._labels = make_batch(job.shape)
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[job.schedule]
        self._schedule = kind(
            PipelineStage(part, rank, job.stages, torch.device("cpu")),
            job.shape.micro_batches,
            loss_fn=mean_loss,
        )

    def steps(self, count: int) -> Turn:
        """Train some steps; the loss is known to the last rank only."""
        loss = float("nan")
        start_s = time.perf_counter()
        for _ in range(count):
            loss = self._step()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return Turn(wall_s=time.perf_counter() - start_s, loss=loss)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _step(self) -> float:
        if self._rank == 0:
            self._schedule.step(self._ids, return_outputs=False)
        elif self._rank < self._job.stages - 1:
            self._schedule.step(return_outputs=False)
        else:
            losses: list[torch.Tensor] = []
            self._schedule.step(target=self._labels, losses=losses, return_outputs=False)
            return float(torch.stack(losses).detach().mean())
        return float("nan")
