"""Where the CPU seconds of a device go in a round: real daemons on loopback, driven from here.

Two devices hold the blocks, the first of them two. CPU time hardly depends on what else the machine
does. What products of matrices and other kernels take is measured apart from everything around
them: the kernels of one micro-batch are noted, and each is called again and again by itself.

``python -m benchmarks.rounds.anatomy BEFORE AFTER`` prints two files as Markdown for
docs/results-pipeline.md; a test compares the page with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.data_plane.codecs import CodecTask, batches_of, make_trial
from benchmarks.data_plane.recovery import Daemon, Job, cluster_of, make_recovery_plan, run_job
from benchmarks.rounds.metered import METER, PARTS, PASSES
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import Heartbeat
from collapipe_flwr.core.processes import exit_on_signals
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.backward import fuse_accumulation
from collapipe_flwr.pipeline.link import HIDDEN
from collapipe_flwr.pipeline.step import MicroBatch
from collapipe_flwr.reporting.output import number_table, prepare, write_json
from collapipe_flwr.transport.client import HostClient

PROGRAM = "benchmarks.rounds.metered"
PRODUCTS, KERNELS, AROUND = "products of matrices", "other kernels", "autograd and Python around"
REST, ALL = "gRPC's threads and the rest", "all"
ROWS = (PRODUCTS, KERNELS, AROUND, *(part for part in PARTS if part not in PASSES), REST)
WARM = 3  # rounds that are not counted
OWN_BLOCKS = 2  # of the first device
MICRO_BATCHES, STEP = (10, 40), 2  # of a round, of a step
_OF_MATRICES = ("mm", "bmm", "conv", "scaled_dot_product")
_BOARD = {"blocks": 4, "width": 256, "tokens": 48, "examples": 8}  # as on the testbed


def run_anatomy(names: Sequence[str], rounds: int, json_file: Path | None) -> None:
    """Measure, show and write."""
    prepare("--json", json_file)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    try:
        with exit_on_signals(), Console(stderr=True).status("rounds") as status:
            for name in names:
                found += measure(name, rounds, status.update)
    finally:
        torch.set_num_threads(threads)
    table = number_table(
        "CPU milliseconds of a device in a round; columns: blocks, micro-batches",
        ("part",),
        [_title(case) for case in found],
    )
    for row in ROWS:
        table.add_row(row, *(f"{1e3 * case['parts_s'][row]:.1f}" for case in found))
    for name in ("cpu_s", "wall_s", "stage_waits_s"):
        cells = (f"{1e3 * case[name]:.1f}" for case in found)
        table.add_row(name.removesuffix("_s").replace("_", " "), *cells)
    Console(highlight=False).print(table)
    write_json(json_file, {"rounds": rounds, "cases": found})


def _title(case: Mapping[str, Any]) -> str:
    return f"{case['model']}\n{case['blocks']} x {case['micro_batches']}"


def measure(
    name: str, rounds: int, say: Callable[[str], object] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """One case for every device and number of micro-batches; raises ConfigError."""
    if name not in _MODELS:
        raise ConfigError(f"--models {name} is not known: choose of {', '.join(_MODELS)}")
    splitter, batches = _MODELS[name](max(MICRO_BATCHES) // STEP)
    stops = (OWN_BLOCKS, splitter.num_blocks)
    kernels_s = [
        count_kernels(splitter, first, stop, batches[0][0])
        for first, stop in zip((0, *stops), stops, strict=False)
    ]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        meters = [Path(folder) / f"d{n}" for n in range(len(stops))]
        devices = [_start(stack, n, meter) for n, meter in enumerate(meters)]
        edge = Daemon("edge")
        stack.callback(edge.stop)
        for daemon in (*devices, edge):
            daemon.wait_until_it_listens()
        cluster = cluster_of(devices, edge)
        clients = [stack.enter_context(HostClient(device.address)) for device in devices]
        for micro_batches in MICRO_BATCHES:
            say(f"{name}, {micro_batches} micro-batches")
            steps = micro_batches // STEP
            job = Job(
                splitter=splitter,
                weights=splitter.initial_weights(seed=1),
                plan=make_recovery_plan(stops, steps),
                steps=steps,
                heartbeat=Heartbeat(),
                dropout_seed=None,  # as of models without any
            )
            seen = []
            for number in range(-WARM, rounds):
                before = [_read(*each) for each in zip(clients, meters, strict=True)]
                begin_s = time.perf_counter()
                result, weights = run_job(job, cluster, iter(batches[:steps]))
                wall_s = time.perf_counter() - begin_s
                job = replace(job, weights=weights)
                after = [_read(*each) for each in zip(clients, meters, strict=True)]
                waits = [report.wait_s for report in result.reports[1:]]
                if number >= 0:
                    seen.append((wall_s, waits, before, after))
            for n, (products_s, others_s) in enumerate(kernels_s):
                spent = _mean([_difference(before[n], after[n]) for _, _, before, after in seen])
                yield {
                    "model": name,
                    "device": n,
                    "blocks": stops[n] - (0, *stops)[n],
                    "micro_batches": micro_batches,
                    "steps": steps,
                    "wall_s": fmean(wall_s for wall_s, *_ in seen),
                    "stage_waits_s": fmean(waits[n] for _, waits, *_ in seen),
                    "cpu_s": spent["cpu_s"],
                    "parts_s": _parts(spent, micro_batches * products_s, micro_batches * others_s),
                }


def _parts(spent: Mapping[str, float], products_s: float, others_s: float) -> dict[str, float]:
    """CPU seconds by row: they sum to those of the process."""
    passes_s = sum(spent.get(name, 0.0) for name in PASSES)
    told = {part: spent.get(part, 0.0) for part in PARTS if part not in PASSES}
    parts = {
        PRODUCTS: products_s,
        KERNELS: others_s,
        AROUND: passes_s - products_s - others_s,
        **told,
    }
    return {**parts, REST: spent["cpu_s"] - sum(parts.values())}


def _start(stack: ExitStack, number: int, meter: Path) -> Daemon:
    os.environ[METER] = str(meter)
    daemon = Daemon("device", "--name", f"d{number}", "--threads", "1", program=PROGRAM)
    stack.callback(daemon.stop)
    return daemon


def _read(client: HostClient, meter: Path) -> dict[str, float]:
    """What a device has spent so far."""
    client.ask_status()
    told = json.loads(meter.read_text().splitlines()[-1])
    return {"cpu_s": told["cpu_s"], **told["parts"]}


def _difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0.0) for name in after}


def _mean(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(each[name] for each in rounds) for name in rounds[-1]}


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the kernels that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def count_kernels(
    splitter: Splitter, first: int, stop: int, batch: MicroBatch, *, turns: int = 40
) -> tuple[float, float]:
    """CPU seconds of the kernels of these blocks for one micro-batch: products, and all others."""
    weights = splitter.initial_weights(seed=1)
    hidden = splitter.build_embedding(weights)(batch.inputs).detach().requires_grad_()
    part = splitter.build_segment(first, stop, weights).train()
    fuse_accumulation(part)
    context: Mapping[str, Tensor] = batch.context
    part(hidden, context).sum().backward()
    with _Noted() as noted:
        output = part(hidden, {k: t for k, t in context.items() if k != HIDDEN})
        output.backward(torch.ones_like(output))
    spent = {True: 0.0, False: 0.0}
    with torch.no_grad():
        for func, args, kwargs in noted.calls:
            func(*args, **kwargs)
            begin_s = time.thread_time()
            for _ in range(turns):
                func(*args, **kwargs)
            took_s = (time.thread_time() - begin_s) / turns
            spent[any(word in str(func) for word in _OF_MATRICES)] += took_s
    return spent[True], spent[False]


def _demo(steps: int) -> tuple[Splitter, list[list[MicroBatch]]]:
    trial = make_trial(CodecTask(steps=steps, micro_batch=32, micro_batches=STEP), seed=7)
    return trial.splitter, list(batches_of(trial))


def _board(steps: int) -> tuple[Splitter, list[list[MicroBatch]]]:
    width, tokens, examples = _BOARD["width"], _BOARD["tokens"], _BOARD["examples"]
    spec = make_spec(
        "sequence-classification",
        model_type="bert",
        overrides={
            "hidden_size": width,
            "num_hidden_layers": _BOARD["blocks"],
            "num_attention_heads": 4,
            "intermediate_size": 2 * width,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        vocab_size=256,
        pad_token_id=0,
        num_labels=10,
    )
    splitter, rng = Splitter(spec), torch.Generator().manual_seed(0)

    def micro_batch() -> MicroBatch:
        ids = torch.randint(1, 256, (examples, tokens), generator=rng)
        labels = torch.randint(0, 10, (examples,), generator=rng)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        return MicroBatch(inputs=inputs, context=splitter.context(inputs), weight=examples)

    return splitter, [[micro_batch() for _ in range(STEP)] for _ in range(steps)]


_MODELS: Mapping[str, Callable[[int], tuple[Splitter, list[list[MicroBatch]]]]] = {
    "demo": _demo,
    "board": _board,
}


def markdown(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first device's CPU milliseconds of a round, and of each micro-batch in it."""
    heads = [f"{name}: a round | each micro-batch" for name in _MODELS]
    lines = [f"| {' | '.join(('part', *heads))} |", f"|---|{'---:|---:|' * len(heads)}"]
    for row in (*ROWS, ALL):
        cells = [row]
        for name in _MODELS:
            then, now = (_fit(file["cases"], name, row) for file in (before, after))
            cells += [f"{1e3 * a:z.1f} to {1e3 * b:z.1f}" for a, b in zip(then, now, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _fit(cases: Sequence[Mapping[str, Any]], model: str, row: str) -> tuple[float, float]:
    """CPU seconds of a round without micro-batches, and of each."""
    few, many = (
        case["cpu_s"] if row == ALL else case["parts_s"][row]
        for case in sorted(cases, key=lambda case: case["micro_batches"])
        if case["model"] == model and not case["device"]
    )
    each_s = (many - few) / (MICRO_BATCHES[1] - MICRO_BATCHES[0])
    return few - MICRO_BATCHES[0] * each_s, each_s


if __name__ == "__main__":
    files = [json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]]
    print(markdown(*files), end="")
