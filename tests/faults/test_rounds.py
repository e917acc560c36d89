"""Whatever happens to a device or the edge in a round, it ends with an undisturbed round's weights.

One table of faults over real processes; those without the mark ``slow`` are part of every check.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.data_plane.recovery import Job, cluster_of, run_job, small_job
from collapipe_flwr.cluster.control_unit import ClusterResult
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.links import Heartbeat
from tests.closeness import assert_same
from tests.cluster.test_killed_processes import striking
from tests.faults.hosts import Host, hosts
from tests.faults.rows import Row

PHASES = ("placing", "forward", "backward", "apply", "collecting")
WITH_A_PASS = PHASES[:3]  # a defect shows in the next pass, so there must be one
STEPS, STEP = 4, 2  # of the round; the one that is struck
DONE = {"placing": 0, "collecting": STEPS}  # steps before the strike; else STEP
JOB = replace(small_job(3, steps=STEPS), deadline_s=30.0, heartbeat=Heartbeat())
IMPATIENT_S = 3.0  # deadline where it is what notices
VICTIM = "recovery/d1"
GOES_ON, REPLAYS, LOSES, QUARANTINES = (
    "goes on",
    "replays on the same plan",
    "replays without it",
    "replays without it; quarantined",
)
Deployment = tuple[Sequence[Host], Host]
Undisturbed = Callable[[ClusterPlan], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to a host, and what comes of it."""

    name: str
    strike: Callable[[Host], None]
    how: str
    deadline_s: float = JOB.deadline_s
    phases: tuple[str, ...] = PHASES


def killed_and_restarted(host: Host) -> None:
    host.stop()
    host.start()


def suspended(seconds: float) -> Callable[[Host], None]:
    def strike(host: Host) -> None:
        host.signal(signal.SIGSTOP)
        host.later(seconds, host.signal, signal.SIGCONT)

    return strike


def cut(seconds: float) -> Callable[[Host], None]:
    return lambda host: host.wire.cut(seconds)


def with_defect(defect: str) -> Callable[[Host], None]:
    return lambda host: host.spoil(defect)


HARMLESS = tuple(
    Fault(name=name, strike=strike, how=GOES_ON, phases=WITH_A_PASS)
    for name, strike in (
        ("full disk", lambda host: host.limit(4096)),
        ("clock a day ahead", with_defect("clock 86400")),
        ("0.3 s slower per pass", with_defect("slow 0.3")),
    )
)
OF_DEVICES = (
    Fault(name="killed", strike=Host.stop, how=LOSES),
    Fault(name="hangs", strike=suspended(3600.0), how=LOSES),
    Fault(name="cut off for 10 s", strike=cut(10.0), how=LOSES),
    Fault(name="cut off for 60 s", strike=cut(60.0), how=LOSES),
    Fault(
        name="library missing",
        strike=with_defect("unimportable"),
        how=QUARANTINES,
        phases=("placing",),
    ),
    Fault(name="raises", strike=with_defect("raise"), how=QUARANTINES, phases=WITH_A_PASS),
    Fault(name="NaN", strike=with_defect("nan"), how=QUARANTINES, phases=WITH_A_PASS),
    Fault(
        name="absurd numbers",
        strike=with_defect("absurd"),
        how=QUARANTINES,
        phases=WITH_A_PASS,
    ),
    Fault(name="garbage", strike=with_defect("garbage"), how=QUARANTINES, phases=WITH_A_PASS),
    Fault(
        name="stuck, deadline 3 s",
        strike=with_defect("stuck"),
        how=QUARANTINES,
        deadline_s=IMPATIENT_S,
        phases=WITH_A_PASS,
    ),
    *HARMLESS,
)
OF_THE_EDGE = (
    Fault(name="killed, restarted", strike=killed_and_restarted, how=REPLAYS),
    Fault(name="hangs for 10 s", strike=suspended(10.0), how=REPLAYS),
    Fault(name="cut off for 10 s", strike=cut(10.0), how=REPLAYS),
    Fault(name="cut off for 60 s", strike=cut(60.0), how=REPLAYS),
    Fault(name="raises once", strike=with_defect("raise once"), how=REPLAYS, phases=WITH_A_PASS),
    Fault(name="NaN once", strike=with_defect("nan once"), how=REPLAYS, phases=WITH_A_PASS),
    Fault(
        name="garbage once",
        strike=with_defect("garbage once"),
        how=REPLAYS,
        phases=WITH_A_PASS,
    ),
    *HARMLESS[1:],
)
QUICK = {
    ("device", "killed", "placing"),
    ("device", "killed", "forward"),
    ("device", "killed", "backward"),
    ("device", "killed", "collecting"),
    ("device", "hangs", "backward"),
    ("device", "library missing", "placing"),
    ("device", "raises", "backward"),
    ("device", "NaN", "placing"),
    ("device", "NaN", "forward"),
    ("device", "absurd numbers", "backward"),
    ("device", "garbage", "forward"),
    ("device", "full disk", "forward"),
    ("device", "clock a day ahead", "forward"),
    ("device", "0.3 s slower per pass", "forward"),
    ("edge", "killed, restarted", "forward"),
    ("edge", "killed, restarted", "backward"),
    ("edge", "killed, restarted", "collecting"),
    ("edge", "NaN once", "forward"),
    ("edge", "garbage once", "backward"),
    ("edge", "clock a day ahead", "forward"),
}


def cases() -> Iterator[Any]:
    """Every role, fault and phase."""
    for role, faults in (("device", OF_DEVICES), ("edge", OF_THE_EDGE)):
        for fault, phase in ((each, phase) for each in faults for phase in each.phases):
            marks = () if (role, fault.name, phase) in QUICK else pytest.mark.slow
            name = f"{role}-{fault.name}-{phase}".replace(" ", "-")
            yield pytest.param(role, fault, phase, id=name, marks=marks)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("hosts")
    with hosts(folder, devices=3) as found:
        run_job(replace(JOB, steps=1), cluster_of(*found))  # all have loaded what they need
        yield found
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def undisturbed(deployment: Deployment) -> Undisturbed:
    """The weights of a round by a plan that nothing happens to."""
    known: dict[tuple, dict[str, Tensor]] = {}

    def on(plan: ClusterPlan) -> dict[str, Tensor]:
        if plan.segments not in known:
            known[plan.segments] = run_job(replace(JOB, plan=plan), cluster_of(*deployment))[1]
        return known[plan.segments]

    return on


@pytest.mark.parametrize(("role", "fault", "phase"), list(cases()))
def test_training_goes_on(
    deployment: Deployment, undisturbed: Undisturbed, role: str, fault: Fault, phase: str
) -> None:
    devices, edge = deployment
    host = devices[1] if role == "device" else edge
    job, cluster = replace(JOB, deadline_s=fault.deadline_s), cluster_of(devices, edge)
    try:
        with striking(phase, STEP, lambda: fault.strike(host)) as struck_s:
            result, weights = run_job(job, cluster)
    finally:
        for each in (*devices, edge):
            each.heal()
    check(result, fault, phase, job)
    assert_same(weights, undisturbed(result.plan))
    ended_s = [incident.resumed_s for incident in result.incidents]
    from_step = min((incident.from_step for incident in result.incidents), default=None)
    done = DONE.get(phase, STEP)
    Row(
        role=role,
        fault=fault.name,
        phase=phase,
        seconds=round(max(ended_s) - struck_s[0], 1) if ended_s else 0.0,
        steps_lost=0 if from_step is None else done - from_step,
        how=fault.how if ended_s else GOES_ON,
    ).record()


def check(result: ClusterResult, fault: Fault, phase: str, job: Job) -> None:
    """The round came to what the fault says; what nobody needed any more, nobody missed."""
    assert len(result.losses) == job.steps
    lost = [name for incident in result.incidents for name in incident.lost]
    unneeded = ("placing", "collecting") if fault.how == REPLAYS else ("collecting",)
    if phase in unneeded and not result.incidents:
        return
    assert lost == ([VICTIM] if fault.how in (LOSES, QUARANTINES) else [])
    assert bool(result.incidents) is (fault.how != GOES_ON)
    assert set(result.quarantined) == ({VICTIM} if fault.how == QUARANTINES else set())
