"""``collapipe profile``, ``simulate`` and ``bench``: costs and plans, without training a model."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import collapipe_flwr
from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.errors import ConfigError, name_extra
from collapipe_flwr.core.hub import explain_absent_model, explain_no_checkpoint
from collapipe_flwr.core.keys import (
    Rule,
    assignments,
    check,
    counts,
    one_of,
    read_assignments,
    some_of,
)
from collapipe_flwr.core.schedule import SCHEDULES
from collapipe_flwr.models.spec import (
    FROZEN_DTYPES,
    MODEL_TYPES,
    TIE_POLICIES,
    may_be_type,
    nearest_types,
)


def profile(
    model: Annotated[
        str, Argument(help="Folder or config.json, hub name, or model type such as bert.")
    ],
    task: Annotated[str, Option(help="Task. Default: that of the model's architecture.")] = "",
    overrides: Annotated[str, Option(help='As model.overrides: "n_layer=6 n_embd=128".')] = "",
    length: Annotated[
        str, Option(help="Tokens per example; several with --boards: 64,512.")
    ] = "64",
    target_length: Annotated[int, Option(help="Tokens per target.", min=1)] = 64,
    edge_blocks: Annotated[int, Option(help="Upper blocks at the edge.", min=0)] = 0,
    ties: Annotated[
        str, Option(help="As model.ties: untie counts a tied table twice, rows once.")
    ] = "untie",
    lora_rank: Annotated[
        int, Option(help="Rank of LoRA adapters; 0: train all weights.", min=0)
    ] = 0,
    boards: Annotated[
        str,
        Option(help="Boards to share the model, by memory: raspberry-pi-4-4gb,my-board-8gb,..."),
    ] = "",
    frozen_dtypes: Annotated[
        str, Option(help="With --boards and --lora-rank: as lora.frozen-dtype, several.")
    ] = ",".join(FROZEN_DTYPES),
    cluster: Annotated[Path | None, Option(help="Cluster file (TOML).")] = None,
    devices: Annotated[str, Option(help="Device presets: raspberry-pi-4,jetson-nano,...")] = "",
    control_unit: Annotated[
        str, Option(help="Preset of the control unit, with --devices.")
    ] = "raspberry-pi-5",
    examples: Annotated[int, Option(help="Examples per round.", min=1)] = 256,
    micro_batch_sizes: Annotated[
        str, Option(help="Micro-batch sizes to choose from.")
    ] = "1,2,4,8,16",
    micro_batches: Annotated[
        str, Option(help="Numbers of micro-batches to choose from.")
    ] = "1,2,4,8",
    schedule: Annotated[str, Option(help="As scheduler.schedule: gpipe or 1f1b.")] = "1f1b",
    max_model_share: Annotated[
        float, Option(help="As scheduler.max-model-share; 1: no cap on a device's share.")
    ] = 0.5,
    batch: Annotated[int, Option(help="Examples per batch of the timed block.", min=1)] = 8,
    seconds: Annotated[float, Option(help="Seconds to time a block; 0: do not.", min=0)] = 1.0,
    json_file: Annotated[
        Path | None, Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Print the costs of every block, this machine's speed, and the plan for a cluster.

    With --boards: whether they train it together, and what each holds. Exit code 1 if a cluster or
    boards were named and the model does not fit them.
    """
    for option, value, rule in (
        ("--ties", ties, one_of(*TIE_POLICIES)),
        ("--schedule", schedule, one_of(*SCHEDULES)),
        ("--max-model-share", max_model_share, Rule(lambda v: 0 < v <= 1, "must be in (0, 1]")),
        ("--overrides", overrides, assignments()),
    ):
        check(option, value, rule)
    is_config = model.endswith(".json") and Path(model).is_file()
    known = is_config or may_be_type(model)
    if not known and (why := explain_no_checkpoint("MODEL", model)):
        raise ConfigError(why)
    from collapipe_flwr.reporting.output import prepare, terminal, write_json
    from collapipe_flwr.scheduler.protocol import SchedulerConfig
    from collapipe_flwr.simulation.setting import whole_numbers

    prepare("--json", json_file)
    sizes = whole_numbers("micro-batch-sizes", micro_batch_sizes)
    numbers = whole_numbers("micro-batches", micro_batches)
    check("--micro-batch-sizes", sizes, counts())
    check("--micro-batches", numbers, counts())
    lengths = whole_numbers("length", length)
    check("--length", lengths, counts())
    if len(lengths) > 1 and not boards:
        raise ConfigError(f"--length lists several only with --boards, got {length!r}")
    names, dtypes = (tuple(text.replace(",", " ").split()) for text in (boards, frozen_dtypes))
    if names and (cluster or devices):
        raise ConfigError("give --boards, --cluster or --devices, only one of them")
    check("--frozen-dtypes", dtypes, some_of(*FROZEN_DTYPES))
    settings = SchedulerConfig(
        micro_batch_sizes=sizes,
        micro_batches=numbers,
        schedule=schedule,
        max_model_share=max_model_share,
    )
    place = _read_cluster(cluster, devices, control_unit, examples)
    typer.echo(f"measuring {model}", err=True)  # libraries take seconds to load
    if not known and (why := explain_absent_model(model)):
        raise ConfigError(
            f"MODEL: {why}; give a folder, a hub name or a model type, such as "
            f"{', '.join(nearest_types(model) or MODEL_TYPES[:2])}"
        )
    from collapipe_flwr.cluster.forecast import ModelChoice, build_model, forecast
    from collapipe_flwr.models.spec import BatchShape
    from collapipe_flwr.reporting.tables import as_json, show_forecast

    request = ModelChoice(
        model=model,
        task=task,
        overrides=read_assignments(overrides),
        shape=BatchShape(source_length=lengths[0], target_length=target_length),
        edge_blocks=edge_blocks,
        lora_rank=lora_rank,
        ties=ties,
    )
    if names:
        from collapipe_flwr.cluster.boards import survey
        from collapipe_flwr.reporting.tables import show_boards

        seen = survey(request, names, dtypes, lengths, sizes, min(numbers), settings)
        show_boards(seen, terminal())
        write_json(json_file, seen.to_dict())
        raise typer.Exit(0 if seen.fitting else 1)
    found = forecast(
        build_model(request),
        request.shape,
        place,
        settings,
        examples_at_once=batch,
        seconds=seconds,
    )
    show_forecast(found, terminal())
    write_json(json_file, as_json(found))
    raise typer.Exit(1 if place is not None and found.plan is None else 0)


def _read_cluster(
    file: Path | None, devices: str, control_unit: str, examples: int
) -> ClusterProfile | None:
    from collapipe_flwr.cluster.profile import build_cluster, profile_cluster
    from collapipe_flwr.config.cluster_file import read_cluster

    if file is not None and devices:
        raise ConfigError("give --cluster or --devices, not both")
    if file is not None:
        return profile_cluster(read_cluster(file), examples)
    kinds = [kind.strip() for kind in devices.split(",") if kind.strip()]
    return build_cluster(kinds, control_unit, examples) if kinds else None


def simulate(
    preset: Annotated[
        str | None, Option(help="World: paper, one-strong or cellular; other options override it.")
    ] = None,
    clusters: Annotated[int | None, Option(help="Number of clusters.")] = None,
    devices: Annotated[
        int | None, Option(help="Devices per cluster, besides the control unit.")
    ] = None,
    blocks: Annotated[int | None, Option(help="Encoder blocks of the model.")] = None,
    width: Annotated[int | None, Option(help="Width of the model.")] = None,
    tokens: Annotated[int | None, Option(help="Tokens per example.")] = None,
    examples: Annotated[int | None, Option(help="Examples per cluster.")] = None,
    rounds: Annotated[int | None, Option(help="Rounds per episode.")] = None,
    seeds: Annotated[
        list[str] | None,
        Option("--seeds", "--seed", help="0,1,2 or 100-119; may be repeated."),
    ] = None,
    policies: Annotated[str | None, Option(help="Policies to compare: dssda,fedavg,...")] = None,
    run_config: Annotated[
        list[str] | None,
        Option(
            "--run-config",
            "-c",
            metavar="KEY=VALUE",
            help="A key of a run's planning, scheduler.schedule=gpipe; may be repeated.",
        ),
    ] = None,
    energy_budget: Annotated[
        str | None,
        Option(help="1.8x an equal share of work, 30% of training alone, 500 joules, or none."),
    ] = None,
    channel: Annotated[
        str | None, Option(help="static, block-fading, mobility or trace:FILE.")
    ] = None,
    radio: Annotated[str | None, Option(help="wifi or 5g.")] = None,
    kinds: Annotated[str | None, Option(help="Device kinds to draw from.")] = None,
    devices_from: Annotated[
        Path | None, Option(help="JSON or TOML file of clusters and device kinds.")
    ] = None,
    codecs: Annotated[
        str | None, Option(help="fp32,bf16,int8: DSSDA chooses hop by hop; else fp16.")
    ] = None,
    memory_margin: Annotated[
        float | None, Option(help="Share of each device's memory that plans leave free.")
    ] = None,
    best_batches: Annotated[
        bool | None,
        Option(
            "--best-batches/--middle-batches",
            help="Fixed rules take the best micro-batches, or the middle of the grid.",
        ),
    ] = None,
    edge_shared: Annotated[
        bool | None,
        Option("--edge-shared", help="Clusters share the edge's computing power."),
    ] = None,
    recompute: Annotated[
        bool | None,
        Option("--recompute", help="Recompute activations instead of keeping them."),
    ] = None,
    profile_error: Annotated[
        float | None, Option(help="Largest relative error of the profiles schedulers see.")
    ] = None,
    profile_error_kind: Annotated[
        str | None, Option(help="noise: new every round; bias: fixed per device.")
    ] = None,
    profile_delay: Annotated[
        int | None, Option(help="Age in rounds of the snapshots schedulers see.")
    ] = None,
    truth_error: Annotated[
        float | None,
        Option(help="Standard deviation of ln(true / believed) speed and power of devices."),
    ] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write results to this file.")] = None,
) -> None:
    """Let scheduling policies plan rounds in a simulated world; nothing is trained."""
    options = dict(locals())  # by name, as they were given
    from collapipe_flwr.config.parsing import (
        flatten_section,
        parse_section,
        read_overrides,
        refuse_unknown,
    )
    from collapipe_flwr.reporting.simulation import run_simulation
    from collapipe_flwr.simulation.setting import overridden
    from collapipe_flwr.simulation.setting import preset as preset_setting

    options["seeds"] = ",".join(seeds) if seeds else None
    setting = overridden(preset_setting(preset), **options)
    known = flatten_section(setting.settings, "scheduler.")
    values = read_overrides(run_config or (), known)
    refuse_unknown(values, known)
    planning = parse_section(setting.settings, "scheduler.", values)
    setting = replace(setting, settings=planning)
    run_simulation(setting, json_file=json_file)


def bench(context: typer.Context) -> None:
    """Measure parts of CollaPipe on this machine (in a checkout of the project only)."""
    root = Path(collapipe_flwr.__file__).parents[1]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise ConfigError(
            "the benchmarks are in the folder benchmarks/ of the project's repository, not in the "
            "installed package: use `collapipe bench` in a checkout installed by `pip install -e .`"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    with name_extra("bench"):
        program = importlib.import_module("benchmarks.__main__").app
        program(context.args, prog_name=context.command_path)
