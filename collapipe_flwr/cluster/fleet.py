"""The interface of the fleet that executes an order, and a fleet of threads.

A fleet (threads of this process, or daemons on boards) turns a planned round into a chain of stages
that is connected to the edge and waits for the first step. Its user gets one link, and after the
last step the trained segments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from collapipe_flwr.cluster.hosted import Edge
from collapipe_flwr.cluster.order import CONTROL_UNIT, Segments, TrainingOrder
from collapipe_flwr.core.errors import CollaPipeError, LinkError, LinkTimeout
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.core.schedule import ALONE, ReplicaIndex
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.pipeline.compute import bring_home
from collapipe_flwr.pipeline.gradient_sums import Siblings
from collapipe_flwr.pipeline.link import Link, join_links
from collapipe_flwr.pipeline.roles import MiddleStage
from collapipe_flwr.pipeline.state import PartState, copy_optimizer_state
from collapipe_flwr.pipeline.targets import Targets
from collapipe_flwr.transport.simulated_link import make_simulated_pair


@dataclass(frozen=True, slots=True)
class OpenChain:
    """Device 1 -> ... -> device K -> edge, ready for steps; ``link`` is that to device 1.

    ``collect`` returns all parts behind it, on request with slots, after the chain's last frame was
    sent down ``link``. It waits for every device and the edge to end, and raises the LinkError of
    one that failed or did not end. ``hops`` are the actual links, which a cluster file may limit.
    """

    link: Link
    collect: Callable[[bool], Segments]
    targets: Targets | None = None  # for the last stage, where it is in this process
    hops: Sequence[LinkConfig] = ()


class Fleet(Protocol):
    """The devices of one cluster."""

    def open_chain(
        self, splitter: AnySplitter, order: TrainingOrder
    ) -> AbstractContextManager[OpenChain]:
        """Place the segments of ``order`` and connect them; everything is freed afterwards.

        Raises LinkError when a device or the edge cannot be reached or refuses. ``order`` is
        never changed, so a round that fails can be tried again.
        """

    def find_missing(self, device_ids: Collection[str]) -> frozenset[str]:
        """Return the devices that do not answer now; all are asked at once, for a second or two."""


MakeStage = Callable[..., MiddleStage]


class ThreadFleet:
    """A `Fleet` in this process, before an ``edge`` wherever it is.

    A thread that ends by an error other than a CollaPipeError has crashed: its device is missing
    from then on. Tests pass a ``make_stage`` that makes a stage crash.
    """

    def __init__(self, edge: Edge, make_stage: MakeStage = MiddleStage) -> None:
        self._edge = edge
        self._make_stage = make_stage
        self._crashed: set[str] = set()

    @contextmanager
    def open_chain(self, splitter: AnySplitter, order: TrainingOrder) -> Iterator[OpenChain]:
        """See `Fleet.open_chain`; every thread has ended afterwards."""
        with self._edge.open(splitter, order) as edge, ExitStack() as links:
            last = order.plan.replicas[-2]
            edges = [
                links.enter_context(edge.connect(replace(order.hops[-1], lane=lane, lanes=last)))
                for lane in range(last)
            ]
            link, stages = join(splitter, order, edges, self._make_stage)
            threads = [DeviceThread(stage) for stage in stages]
            deadline_s = order.learning.deadline_s

            def collect(keep_optimizer: bool) -> Segments:
                for thread in threads:
                    thread.finish(deadline_s)
                links.close()
                last_part = edge.collect(keep_optimizer, nullcontext())
                return _collect_segments(stages, keep_optimizer) + last_part

            try:
                yield OpenChain(link, collect, edge.targets, order.hops)
            except BaseException as error:
                link.close(str(error) or type(error).__name__)
                raise
            finally:
                for thread in threads:
                    thread.join(deadline_s)
                self._crashed |= {t.stage.settings.name for t in threads if t.crashed}

    def find_missing(self, device_ids: Collection[str]) -> frozenset[str]:
        return frozenset(self._crashed.intersection(device_ids))


def _collect_segments(stages: Sequence[MiddleStage], keep_optimizer: bool) -> Segments:
    """Collect the segments of stages that have ended; replicas of a stage hold the same."""
    firsts = [stage for stage in stages if stage.settings.turn.replica == 0]
    kept = firsts if keep_optimizer else ()
    return Segments(
        state=PartState(
            weights={
                key: tensor.detach()
                for stage in firsts
                for key, tensor in bring_home(stage.part.state_dict()).items()
            },
            optimizer={k: t for s in kept for k, t in copy_optimizer_state(s.optimizer).items()},
        ),
        reports=tuple(stage.report() for stage in stages),
    )


class DeviceThread(threading.Thread):
    """Runs one stage, whose failure reaches both neighbours by their links."""

    def __init__(self, stage: MiddleStage) -> None:
        super().__init__(name=f"device {stage.settings.name}", daemon=True)
        self.stage = stage
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.stage.serve()
        except BaseException as error:  # raised by `finish`
            self._failure = error

    def finish(self, deadline_s: float) -> None:
        """Wait for the end; raises what the stage raised, LinkTimeout if it does not end."""
        self.join(deadline_s)
        if self.is_alive():
            raise LinkTimeout(f"{self.name} did not stop within {deadline_s:g} s")
        if self.crashed:
            raise LinkError(f"{self.name} crashed: {self._failure!r}") from self._failure
        if self._failure is not None:
            raise self._failure

    @property
    def crashed(self) -> bool:
        """Whether it ended by an error that is no CollaPipeError."""
        return self._failure is not None and not isinstance(self._failure, CollaPipeError)


_Place = tuple[int, int]  # stage, replica


def join(
    splitter: AnySplitter, order: TrainingOrder, edges: Sequence[Link], make_stage: MakeStage
) -> tuple[Link, list[MiddleStage]]:
    """Build a linked stage per holder; return the control unit's link and the stages.

    ``edges`` are those of the last stage's replicas to the edge.
    """
    segments, replicas, hops = order.plan.segments, order.plan.replicas, order.hops

    def name_holder(stage: int, replica: int) -> str:
        return segments[stage - 1].device_ids[replica] if stage else CONTROL_UNIT

    @cache
    def make_pair(sender: _Place, receiver: _Place, link: LinkConfig) -> tuple[Link, Link]:
        return make_simulated_pair(name_holder(*sender), name_holder(*receiver), link)

    def link_down(stage: int, turn: ReplicaIndex) -> Link:
        """Link to the next stage's replicas that its micro-batches meet, or to the edge."""
        if stage == len(segments):
            return edges[turn.replica]
        here, met = (stage, turn.replica), turn.list_met(replicas[stage + 1])
        return join_links(
            [make_pair(here, (stage + 1, other), hops[stage])[0] for other in met], turn
        )

    def link_up(stage: int, turn: ReplicaIndex) -> Link:
        here, met = (stage, turn.replica), turn.list_met(replicas[stage - 1])
        return join_links(
            [make_pair((stage - 1, other), here, hops[stage - 1])[1] for other in met], turn
        )

    def link_beside(stage: int, turn: ReplicaIndex) -> Siblings:
        place, link = turn.replica, LinkConfig(lanes=0)
        here, is_last = (stage, place), place == turn.replicas - 1
        return Siblings(
            ahead=make_pair((stage, place - 1), here, link)[1] if place else None,
            behind=None if is_last else make_pair(here, (stage, place + 1), link)[0],
            place=place,
        )

    stages = []
    for holder in order.holders:
        segment, stage, turn = holder.segment, holder.stage, holder.turn
        part, optimizer = order.place(
            splitter.build_segment(segment.first_block, segment.stop_block, order.weights)
        )
        stages.append(
            make_stage(
                part,
                optimizer,
                order.configure_stage(stage, turn),
                upstream=link_up(stage, turn),
                downstream=link_down(stage, turn),
                siblings=link_beside(stage, turn) if turn.replicas > 1 else None,
            )
        )
    return link_down(0, ALONE), stages
