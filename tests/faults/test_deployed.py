"""Whatever restarts, hangs or is cut off in a deployment of one cluster, its run goes on.

One run for all cases: each strikes amid the steps of a round. Where SuperLink or ServerApp is
killed, the run is resumed, as `docs/recovery.md` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from collapipe_flwr.reporting.progress import RunProgress, read_progress
from tests.faults.rows import Row
from tests.faults.soak_schedule import (
    APP,
    CUT,
    HANG,
    KILL,
    LINK,
    NODE,
    SERVER_HOST,
    UNIT,
    UNIT_HOST,
    Fault,
)
from tests.faults.soak_site import Site, site
from tests.testbed.namespaces import namespaces_allowed

CLUSTER = {"a": ("a1", "a2")}
PHASE = "forward"
LASTS_S = 10.0
LOOK_S = 0.1
WAIT_S = 600.0  # of a machine that does much else
REPEATS, RESUMES, GOES_ON = "round is repeated", "the run is resumed", "goes on"
MENDED = "goes on, or round is repeated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What happens to whom, and what comes of it."""

    role: str
    kind: str
    how: str

    @property
    def name(self) -> str:
        """As the table says it."""
        names = {KILL: "killed, restarted", HANG: "hangs for 10 s", CUT: "cut off for 10 s"}
        return names[self.kind]

    @property
    def who(self) -> str:
        """As the table says it; a control unit of the other rows is a process per message."""
        return f"resident {UNIT}" if self.role == UNIT else self.role


CASES = (
    Case(role=UNIT, kind=KILL, how=REPEATS),
    Case(role=UNIT, kind=HANG, how=MENDED),
    Case(role=UNIT_HOST, kind=CUT, how=MENDED),
    Case(role=NODE, kind=KILL, how=REPEATS),
    Case(role=NODE, kind=HANG, how=GOES_ON),
    Case(role=LINK, kind=KILL, how=RESUMES),
    Case(role=LINK, kind=HANG, how=GOES_ON),
    Case(role=APP, kind=KILL, how=RESUMES),
    Case(role=APP, kind=HANG, how=GOES_ON),
    Case(role=SERVER_HOST, kind=CUT, how=MENDED),
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if not namespaces_allowed():
        pytest.skip("network namespaces need root, ip and tc")
    with site(tmp_path_factory.mktemp("site") / "files", CLUSTER) as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.who}-{case.kind}")
def test_the_run_of_one_cluster_goes_on(running: Site, case: Case) -> None:
    runs, unasked = running.runs, list(running.unasked)
    host = "server" if case.role in (LINK, APP, SERVER_HOST) else "cu-a"
    fault = Fault(at_s=0.0, role=case.role, kind=case.kind, host=host)
    at = awaited(running, lambda now: 0 < steps(now) < all_steps(now))
    runs = max(runs, 1)
    running.sample(time.monotonic())
    running.strike(fault)
    struck_s, heal_s = time.time(), time.monotonic() + LASTS_S
    healed, again = case.kind == KILL, False

    def goes_on(now: RunProgress) -> bool:
        nonlocal healed, again
        if not healed and time.monotonic() > heal_s:
            running.heal(fault)
            healed = True
        again = again or now.since_s > struck_s or steps(now) < steps(at)
        return healed and again and steps(now) > 0

    try:
        after = awaited(running, goes_on)
    finally:
        running.heal(fault)
    repeated = after.round_index == at.round_index
    assert running.unasked == unasked
    assert running.runs - runs == (case.how == RESUMES)
    assert repeated or case.how in (GOES_ON, MENDED)
    indices = [event["round_index"] for event in running.deployment.events()]
    assert indices == list(range(1, after.round_index))
    Row(
        role=case.who,
        fault=case.name,
        phase=PHASE,
        seconds=round(after.at_s - struck_s, 1),
        steps_lost=steps(at) if repeated else 0,
        how=case.how,
    ).record()


def awaited(running: Site, there: Callable[[RunProgress], bool]) -> RunProgress:
    """What the run says when it is ``there``; the deployment is looked after meanwhile."""
    folder, end_s = running.deployment.run_folder(), time.monotonic() + WAIT_S
    while True:
        assert time.monotonic() < end_s, f"never there: {read_progress(folder)}"
        time.sleep(LOOK_S)
        running.sample(time.monotonic())
        running.tend(time.monotonic())
        now = read_progress(folder)
        if now is not None and now.phase == "training" and there(now):
            return now


def steps(now: RunProgress) -> int:
    return sum(each.trained // each.per_step for each in now.clusters.values())


def all_steps(now: RunProgress) -> int:
    return sum(each.of // each.per_step for each in now.clusters.values())
