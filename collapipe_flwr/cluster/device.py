"""A device of a simulated cluster: a thread that serves one segment until the round ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from collapipe_flwr.core.errors import LinkTimeout
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.roles import MiddleStage


class DeviceThread:
    """Runs a stage beside the control unit; its failure reaches both neighbours by their links."""

    def __init__(self, stage: MiddleStage) -> None:
        self.stage = stage
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._serve, name=f"device {stage.settings.name}", daemon=True
        )

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def wait(self, deadline_s: float) -> None:
        """Wait for the end, however it came."""
        self._thread.join(deadline_s)

    def join(self, deadline_s: float) -> None:
        """Wait for the end; raises what the stage raised, LinkTimeout when it goes on."""
        self.wait(deadline_s)
        if self._thread.is_alive():
            raise LinkTimeout(
                f"device {self.stage.settings.name} did not stop within {deadline_s:g} s"
            )
        if self._failure is not None:
            raise self._failure

    def report(self) -> StageReport:
        """What the device measured."""
        return self.stage.report()

    def _serve(self) -> None:
        # Whatever ends the thread must reach the one who joins it, so nothing is let through.
        try:
            self.stage.serve()
        except BaseException as error:
            self._failure = error


@contextmanager
def running(devices: Sequence[DeviceThread], deadline_s: float) -> Iterator[None]:
    """Devices serve while the body runs; afterwards every thread has ended.

    Raises the first device's failure if the body itself went well.
    """
    for device in devices:
        device.start()
    try:
        yield
    except BaseException:
        for device in devices:
            device.wait(deadline_s)
        raise
    for device in devices:
        device.join(deadline_s)
