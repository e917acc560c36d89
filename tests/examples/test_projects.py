"""The example projects: a few changed lines, and the same weights through Flower's own command."""

from __future__ import annotations

import difflib
import importlib
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.run.launcher import build_environment, start_superlink
from tests.thorough import few

EXAMPLES = Path(__file__).parents[2] / "examples"
PROJECTS = {
    "flowertune": "flowertune_example",
    "huggingface": "huggingface_example",
    "vision-transformer": "vision_example",
}
MARK = "  # CollaPipe"
LINES = 12
ROUNDS = 2
TOLERANCE = 1e-6
LIMIT_S = 240.0
Weights = dict[str, torch.Tensor]
FinalModel = Callable[[Path, Path, dict[str, str]], Weights]
NODES = "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=1"  # one worker


def sources(project: Path) -> dict[str, list[str]]:
    files = (*project.rglob("*.py"), project / "pyproject.toml")
    return {file.relative_to(project).as_posix(): file.read_text().splitlines() for file in files}


def changed_lines(name: str) -> list[str]:
    """The lines of the CollaPipe version that the plain one does not have, blank ones aside."""
    plain = sources(EXAMPLES / name / "plain")
    split = sources(EXAMPLES / name / "collapipe")
    assert plain.keys() == split.keys()
    compared = (line for file in plain for line in difflib.ndiff(plain[file], split[file]))
    return [line[2:] for line in compared if line.startswith("+ ") and line[2:].strip()]


@pytest.mark.parametrize("name", PROJECTS)
def test_at_most_twelve_lines_change_and_each_is_marked(name: str) -> None:
    changed = changed_lines(name)
    assert len(changed) <= LINES
    assert all(line.endswith(MARK) for line in changed)


@pytest.mark.parametrize("name", PROJECTS)
def test_model_data_and_metrics_stay_as_they_are(name: str) -> None:
    task = Path(PROJECTS[name]) / "task.py"
    plain, split = (EXAMPLES / name / version / task for version in ("plain", "collapipe"))
    assert plain.read_text() == split.read_text()


@pytest.mark.parametrize("name", PROJECTS)
def test_the_readme_shows_every_changed_line(name: str) -> None:
    readme = (EXAMPLES / name / "README.md").read_text()
    shown = {line[1:].strip() for line in readme.splitlines() if line.startswith("+")} - {""}
    assert shown == {line.removesuffix(MARK).strip() for line in changed_lines(name)}


@pytest.mark.parametrize("name", PROJECTS)
def test_the_plain_project_knows_nothing_of_collapipe(name: str) -> None:
    plain = sources(EXAMPLES / name / "plain")
    assert not [file for file, lines in plain.items() if "collapipe_flwr" in "".join(lines)]


def model_from_here(source: Path, folder: Path, _: dict[str, str]) -> Weights:
    """The weights behind two rounds of the project's apps on a grid in this process."""
    output = folder / f"{source.name}.pt"
    project = tomllib.loads((source / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    config = {**project["config"], "num-server-rounds": ROUNDS, "output": str(output)}
    places = {node: {"partition-id": node - 1, "num-partitions": 2} for node in (1, 2)}
    with importable(source):
        client, server = (
            importlib.import_module(project["components"][name].partition(":")[0]).app
            for name in ("clientapp", "serverapp")
        )
        grid = LocalGrid(dict.fromkeys(places, client), node_configs=places, run_config=config)
        server(grid, Context(1, 0, {}, RecordDict(), config))
    return torch.load(output, weights_only=True)


@contextmanager
def importable(source: Path) -> Iterator[None]:
    """The packages of a project; another one may have a package of the same name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(source), *sys.path])
        yield
    for name in [n for n in sys.modules if n.partition(".")[0] in PROJECTS.values()]:
        del sys.modules[name]


def model_from_flower(source: Path, folder: Path, env: dict[str, str]) -> Weights:
    """The weights behind two rounds of `flwr run`."""
    project, output = folder / source.name, folder / f"{source.name}.pt"
    shutil.copytree(source, project, ignore=shutil.ignore_patterns("__pycache__"))
    flwr = Path(sys.executable).parent / "flwr"
    command = [str(flwr), "run", ".", "--stream", "--federation-config", NODES]
    command += ["--run-config", f'num-server-rounds={ROUNDS} output="{output}"']

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=project, env=env, capture_output=True, text=True, timeout=LIMIT_S
        )

    done = run()
    if not output.exists() and "Ray" in done.stdout + done.stderr:  # its start fails now and then
        done = run()
    assert output.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return torch.load(output, weights_only=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(
    ("name", "plain_model", "split_model"),
    [
        *((name, model_from_here, model_from_here) for name in PROJECTS),
        *few((name, model_from_flower, model_from_flower) for name in PROJECTS),
    ],
)
def test_plain_and_split_end_with_the_same_weights(
    name: str, plain_model: FinalModel, split_model: FinalModel, tmp_path: Path
) -> None:
    env = build_environment(tmp_path)
    flower = model_from_flower in (plain_model, split_model)
    with start_superlink(tmp_path, env) if flower else nullcontext():
        plain = plain_model(EXAMPLES / name / "plain", tmp_path, env)
        split = split_model(EXAMPLES / name / "collapipe", tmp_path, env)
    assert list(plain) == list(split)
    for key, tensor in plain.items():
        assert tensor.dtype == split[key].dtype
        torch.testing.assert_close(split[key], tensor, rtol=0, atol=TOLERANCE, msg=key)
