"""Devices of a simulated cluster: a thread per segment, joined by in-memory links."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise

from collapipe_flwr.cluster.fleet import RoundOrder, Segments
from collapipe_flwr.core.errors import CollaPipeError, LinkError, LinkTimeout
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import MiddleStage
from collapipe_flwr.pipeline.state import PartState, load_optimizer_state, optimizer_state_of
from collapipe_flwr.transport.simulated_link import simulated_pair

Connect = Callable[[LinkConfig], AbstractContextManager[Link]]
MakeStage = Callable[..., MiddleStage]


class ThreadFleet:
    """A `Fleet` in this process; ``connect`` makes a new link as asked to the cluster's decoder.

    A thread that ends by an error other than a CollaPipeError has crashed: its device is missing
    from then on. ``make_stage`` is the seam for tests that crash one on purpose.
    """

    def __init__(self, connect: Connect, make_stage: MakeStage = MiddleStage) -> None:
        self._connect = connect
        self._make_stage = make_stage
        self._crashed: set[str] = set()

    @contextmanager
    def chain(self, splitter: Splitter, order: RoundOrder) -> Iterator[ThreadChain]:
        """See `Fleet.chain`; every thread has ended afterwards."""
        with ExitStack() as edge:
            downstream = edge.enter_context(self._connect(order.hops[-1]))
            link, stages = _join(splitter, order, downstream, self._make_stage)
            chain = ThreadChain(link, [DeviceThread(s) for s in stages], order.deadline_s, edge)
            chain.start()
            try:
                yield chain
            except BaseException as error:
                link.close(str(error) or type(error).__name__)
                raise
            finally:
                chain.wait()
                self._crashed |= chain.crashed()

    def missing(self, device_ids: Collection[str]) -> frozenset[str]:
        """See `Fleet.missing`."""
        return frozenset(self._crashed.intersection(device_ids))


class ThreadChain:
    """The running threads; see `Chain`."""

    def __init__(
        self, link: Link, devices: Sequence[DeviceThread], deadline_s: float, edge: ExitStack
    ) -> None:
        self.link = link
        self._devices = devices
        self._deadline_s = deadline_s
        self._edge = edge

    def start(self) -> None:
        """Start serving."""
        for device in self._devices:
            device.start()

    def wait(self) -> None:
        """Wait until every device has ended, normally or not."""
        for device in self._devices:
            device.wait(self._deadline_s)

    def crashed(self) -> set[str]:
        """Devices whose worker thread failed unexpectedly."""
        return {d.stage.settings.name for d in self._devices if d.crashed}

    def collect(self, *, keep_optimizer: Callable[[], bool] = lambda: False) -> Segments:
        """See `Chain.collect`."""
        for device in self._devices:
            device.join(self._deadline_s)
        self._edge.close()
        stages = [device.stage for device in self._devices]
        kept = stages if keep_optimizer() else ()
        return Segments(
            state=PartState(
                weights={k: t.detach() for s in stages for k, t in s.part.state_dict().items()},
                optimizer={
                    k: t for s in kept for k, t in optimizer_state_of(s.part, s.optimizer).items()
                },
            ),
            reports=tuple(stage.report() for stage in stages),
        )


class DeviceThread:
    """A thread that runs one stage; its failure reaches both neighbours by their links."""

    def __init__(self, stage: MiddleStage) -> None:
        self.stage = stage
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._serve, name=f"device {stage.settings.name}", daemon=True
        )

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def wait(self, deadline_s: float) -> None:
        """Wait until it has ended, normally or not."""
        self._thread.join(deadline_s)

    def join(self, deadline_s: float) -> None:
        """Wait for the end; raises what the stage raised, LinkTimeout when it goes on."""
        self.wait(deadline_s)
        if self._thread.is_alive():
            raise LinkTimeout(
                f"device {self.stage.settings.name} did not stop within {deadline_s:g} s"
            )
        if self.crashed:
            name = self.stage.settings.name
            raise LinkError(f"device {name} crashed: {self._failure!r}") from self._failure
        if self._failure is not None:
            raise self._failure

    @property
    def crashed(self) -> bool:
        """Whether it ended by an error that is no CollaPipeError."""
        return self._failure is not None and not isinstance(self._failure, CollaPipeError)

    def _serve(self) -> None:
        # `join` raises whatever ended the thread.
        try:
            self.stage.serve()
        except BaseException as error:
            self._failure = error


def _join(
    splitter: Splitter, order: RoundOrder, edge: Link, make_stage: MakeStage
) -> tuple[Link, list[MiddleStage]]:
    """The control unit's link, and a stage per segment with its links, the last one to ``edge``."""
    pairs = [
        simulated_pair(left, right, config)
        for (left, right), config in zip(pairwise(order.names), order.hops, strict=False)
    ]
    downstream: list[Link] = [*(left for left, _ in pairs), edge]
    stages = []
    for index, segment in enumerate(order.plan.segments):
        part = splitter.build_segment(segment.first_block, segment.stop_block, order.weights)
        optimizer = Optimizer(order.optimizer, part.parameters())
        load_optimizer_state(part, optimizer, order.slots)
        stages.append(
            make_stage(
                part,
                optimizer,
                order.settings(index + 1),
                upstream=pairs[index][1],
                downstream=downstream[index + 1],
            )
        )
    return downstream[0], stages
