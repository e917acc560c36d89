"""``collapipe bench pipeline``: the data plane beside its peers, everything in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.data_plane.cases import (
    SLOW_RATE_BYTES_PER_S,
    Case,
    Terms,
    loopback_cases,
    machine_flop_per_s,
    slow_device_cases,
    slow_link_cases,
    textbook_cases,
)
from benchmarks.data_plane.codecs import CodecTask, train_with_codecs
from benchmarks.data_plane.crew import Crew
from benchmarks.data_plane.duel import Arena, Duel, Pace
from benchmarks.data_plane.memory import MemoryCase, measure_memory
from benchmarks.data_plane.model import Shape
from benchmarks.data_plane.network import Loopback, Network, NetworkError, shaped
from benchmarks.data_plane.ours import member_tls
from benchmarks.data_plane.wire import Load, tls_step_ratio, wire_cost
from collapipe_flwr.core.json_codec import to_plain

Tick = Callable[[str], None]
Json = dict[str, object]
Recovery = Callable[[], Mapping[str, float]]  # detect_s, resume_s of a device that is killed
_WORKERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """How much to measure."""

    terms: Terms = field(default_factory=Terms)
    pace: Pace = field(default_factory=Pace)
    load: Load = field(default_factory=Load)
    memory: MemoryCase = field(default_factory=MemoryCase)
    codecs: CodecTask = field(default_factory=CodecTask)

    @property
    def ticks(self) -> int:
        """Cases and parts of the whole bench."""
        splits = len(self.terms.splits)
        return len(self.terms.schedules) * (splits + 1 + len(self.terms.codecs)) + splits + 5


def quick_plan() -> BenchPlan:
    """A look, not a measurement: small shapes, few turns, half of the cases."""
    shape = Shape(width=128, tokens=64, micro_batches=4)
    return BenchPlan(
        terms=Terms(shape=shape, splits=((3, 3), (1, 3, 2)), codecs=("bf16",)),
        pace=Pace(turns=3, openings=1),
        load=Load(frames=64),
        memory=MemoryCase(blocks=4, width=256, micro_batch=4, micro_batches=2, devices=4),
        codecs=CodecTask(steps=40),
    )


def bench(plan: BenchPlan, tick: Tick, recovery: Recovery | None = None) -> Json:
    """Measure everything. Parts that this machine does not allow are named in ``left_out``."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flop_per_s = machine_flop_per_s(plan.terms.shape)
        cases, links = _cases(plan, flop_per_s, tick)
        textbook = _fight(textbook_cases(plan.terms), Loopback(), plan.pace, tick)
        wire = _wire(plan, tick)
        memory = _memory(plan.memory, tick)
        codecs = to_plain(train_with_codecs(plan.codecs))
        tick("codecs")
        recovered = recovery() if recovery is not None else None
        tick("recovery")
    finally:
        torch.set_num_threads(threads)
    return {
        "settings": {**to_plain(plan), "flop_per_s": flop_per_s},
        "cases": cases,
        "textbook_depths": textbook,
        "wire": wire,
        "memory": memory,
        "codecs": codecs,
        "recovery": recovered,
        "slow_links": links.made_of,
        "left_out": [f"cases over a slow link: {links.refusal}"] if links.refusal else [],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlowLinks:
    """How links were made slow, or why they were not."""

    made_of: str = ""
    refusal: str = ""


def _cases(plan: BenchPlan, flop_per_s: float, tick: Tick) -> tuple[list[Json], _SlowLinks]:
    even = [*loopback_cases(plan.terms, flop_per_s), *slow_device_cases(plan.terms, flop_per_s)]
    rows = _fight(even, Loopback(), plan.pace, tick)
    try:
        with shaped([SLOW_RATE_BYTES_PER_S] * _WORKERS) as network:
            rows += _fight(slow_link_cases(plan.terms, flop_per_s), network, plan.pace, tick)
            return rows, _SlowLinks(made_of=network.rights.kind)
    except NetworkError as error:
        return rows, _SlowLinks(refusal=str(error))


def _fight(cases: Iterable[Case], network: Network, pace: Pace, tick: Tick) -> list[Json]:
    rows = []
    with Crew(_WORKERS, network) as ours, Crew(_WORKERS, network) as theirs:
        arena = Arena(ours, theirs, network)
        for case in cases:
            duel = arena.duel(case.ours, case.theirs, pace, case.hop_s)
            rows.append(_row(case, duel))
            tick(f"{case.ours.schedule} {case.link}")
    return rows


def _row(case: Case, duel: Duel) -> Json:
    ours = case.ours
    return {
        "schedule": ours.schedule,
        "stages": ours.stages,
        "split": "+".join(map(str, ours.split)),
        "depths": list(ours.planned_depths),
        "torch_pipelining_depths": list(case.theirs.planned_depths),
        "torch_pipelining_split": "+".join(map(str, case.theirs.split)),
        "link": case.link,
        "device": case.device,
        "codec": ours.codec,
        "step_s": duel.step_s,
        "torch_pipelining_step_s": duel.peer_step_s,
        "ratio": duel.ratio,
        "ratio_quartiles": list(duel.ratio_quartiles),
        "bound_s": duel.bound_s,
        "busiest_stage_s": duel.busiest_s,
        "bound_ratio": duel.bound_ratio,
        "cpu_s": duel.ours.cpu_s,
        "torch_pipelining_cpu_s": duel.theirs.cpu_s,
        "cpu_ratio": duel.ours.cpu_s / duel.theirs.cpu_s,
        "loss": duel.ours.loss,
        "torch_pipelining_loss": duel.theirs.loss,
        "stolen": duel.stolen,
        "turns_left_out": duel.left_out,
    }


def _wire(plan: BenchPlan, tick: Tick) -> Json:
    """Plain and mutual TLS in turn."""
    from collapipe_flwr.transport.certificates import Authority

    network = Loopback()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        Authority(Path(folder)).issue("member", [network.host(0)])
        sinks = [stack.enter_context(Crew(1, network, where)) for where in ("", folder)]
        keys = (None, member_tls(folder, "member"))
        plain_cost, tls_cost = (
            wire_cost(crew, plan.load, tls) for crew, tls in zip(sinks, keys, strict=True)
        )
        tick("wire")
        stack.pop_all().close()
        job = textbook_cases(plan.terms)[-1].ours
        ratio = tls_step_ratio(job, plan.pace, network, folder)
        tick("TLS")
    return {
        "cpu_s_per_gb": plain_cost.cpu_s_per_gb,
        "wall_s_per_gb": plain_cost.wall_s_per_gb,
        "tls_cpu_s_per_gb": tls_cost.cpu_s_per_gb,
        "tls_wall_s_per_gb": tls_cost.wall_s_per_gb,
        "tls_ratio": ratio,
    }


def _memory(case: MemoryCase, tick: Tick) -> Json:
    result = measure_memory(case)
    tick("memory")
    return {**to_plain(result), "ratio": result.ratio}
