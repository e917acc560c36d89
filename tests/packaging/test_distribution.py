"""What is installed and what travels: the wheel, the FAB, the extras, and a base without extras."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

import collapipe_flwr
from collapipe_flwr.cli import app
from collapipe_flwr.core.errors import ConfigError, name_extra, require

ROOT = Path(__file__).parents[2]
OPTIONAL = ("datasets", "flwr_datasets", "PIL", "sacrebleu", "ray", "peft", "matplotlib", "cvxpy")
# What a device, an edge server, a certificate authority and a control unit without Flower import.
BASE = (
    "collapipe_flwr.cli",
    "collapipe_flwr.host.daemon",
    "collapipe_flwr.host.server",
    "collapipe_flwr.transport.certificates",
    "collapipe_flwr.cluster.check",
    "collapipe_flwr.cluster.control_unit",
    "collapipe_flwr.cluster.forecast",
    "collapipe_flwr.cluster.remote",
    "collapipe_flwr.deployment.deploy",
    "collapipe_flwr.generation.text_generator",
    "collapipe_flwr.membership.newcomer",
    "collapipe_flwr.membership.serving",
    "collapipe_flwr.models",
    "collapipe_flwr.reporting.simulation",
)
FLOWER = ("run.launcher", "split", "strategy")
WITHOUT_EXTRAS = f"""
import importlib, sys
for name in {OPTIONAL!r} + ("flwr",):
    sys.modules[name] = None

def wanting(module):
    try:
        importlib.import_module(module)
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")

for name in {BASE!r}:
    importlib.import_module(name)
wanting("collapipe_flwr.federation.strategy")
del sys.modules["flwr"]
for name in {FLOWER!r}:
    importlib.import_module(f"collapipe_flwr.federation.{{name}}")
import collapipe_flwr
for name in collapipe_flwr.__all__:
    getattr(collapipe_flwr, name)
for name in ("client_app.cluster", "server_app.app"):
    wanting(name)
"""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", text, maxsplit=1)[0] for text in requirements}


def test_the_wheel_holds_the_package_alone() -> None:
    """Installed apps would hide modules of the same names that a user's own project has."""
    wheel = project()["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["collapipe_flwr"]}


def test_nothing_in_the_package_needs_what_is_not_in_the_wheel() -> None:
    absent = re.compile(r"^\s*(?:from|import) (?:benchmarks|client_app|server_app|tests)\b", re.M)
    files = (ROOT / "collapipe_flwr").rglob("*.py")
    assert not [file for file in files if absent.search(file.read_text(encoding="utf-8"))]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of Flower's
def test_the_fab_holds_the_package_and_its_apps() -> None:
    from flwr.cli.build import build_fab_from_disk  # slow; other workers do without

    with zipfile.ZipFile(BytesIO(build_fab_from_disk(ROOT))) as fab:
        found = {name.partition("/")[0] for name in fab.namelist()}
        apps = {name for name in fab.namelist() if name.endswith("/app.py")}
    folders = {"collapipe_flwr", "client_app", "server_app"}
    assert found == {*folders, ".info", "LICENSE", "README.md", "pyproject.toml"}
    assert apps == {"client_app/app.py", "server_app/app.py"}


def test_all_is_every_extra_of_a_user_and_the_others_build_on_it() -> None:
    table = project()["project"]
    extras = table["optional-dependencies"]
    users = {
        "flower",
        "simulation",
        "data",
        "metrics",
        "lora",
        "gguf",
        "discovery",
        "plot",
        "report",
        "serve",
    }
    sinks = {"tensorboard", "wandb", "mlflow", "prometheus"}  # each for those who have the tool
    assert set(extras) == users | sinks | {"nf4", "privacy", "all", "bench", "test", "dev", "docs"}
    (everything,) = extras["all"]
    assert set(everything.partition("[")[2].rstrip("]").split(",")) == users
    chain = [("bench", "all"), ("test", "bench"), ("dev", "test")]
    assert all(f"collapipe-flwr[{inner}]" in extras[outer] for outer, inner in chain)
    optional = set().union(*(names(extras[name]) for name in users)) | {"cvxpy"}
    base = [text for text in table["dependencies"] if "extra ==" not in text]
    assert not names(base) & optional


def test_flower_is_an_extra_where_flower_looks_for_it() -> None:
    """A FAB of format 1 names flwr among its dependencies; the marker keeps it off the boards."""
    table = project()["project"]
    of_extras = [text for text in table["dependencies"] if "extra ==" in text]
    assert of_extras == ["flwr>=1.41,<1.43; extra == 'flower'"]
    assert table["optional-dependencies"]["flower"] == []
    assert any("[flower" in text for text in table["optional-dependencies"]["simulation"])


def test_pins_forbid_no_flower_that_is_supported() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    pins = {r.name: r.specifier for r in map(Requirement, lines)}
    asked = map(Requirement, project()["project"]["dependencies"])
    (supported,) = (r.specifier for r in asked if r.name == "flwr")
    for version in ("1.41.0", "1.42.0"):
        assert supported.contains(version) and pins["flwr"].contains(version)
    assert pins["certifi"].contains("2026.10.19") and pins["uv"].contains("0.13.5")  # 1.42 asks it


def test_flower_installs_what_the_apps_import() -> None:
    """`uv sync` in a FAB installs base and default groups, no extras; flwr is there already."""
    table = project()
    assert table["tool"]["uv"]["default-groups"] == ["app"]
    assert table["dependency-groups"]["app"] == ["collapipe-flwr[flower,data,metrics]"]


@pytest.mark.long
def test_base_and_library_work_without_extras_and_others_name_the_one_they_need() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=True, cwd=ROOT
    )
    wanted = [("flwr", "flower"), ("datasets", "data"), ("datasets", "data")]
    assert done.stdout.splitlines() == [
        f"ConfigError: the package {package} is not installed: "
        f"run `pip install 'collapipe-flwr[{name}]'`"
        for package, name in wanted
    ]


def test_a_missing_package_is_one_sentence_that_names_its_extra() -> None:
    sentence = r"^the package absent is not installed: run `pip install 'collapipe-flwr\[plot\]'`$"
    with pytest.raises(ConfigError, match=sentence), name_extra("plot"):
        import absent.inner  # noqa: F401
    with pytest.raises(ConfigError, match=sentence):
        require("absent", "plot")
    with name_extra("plot"):
        require("json", "plot")


def test_bench_says_where_the_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "collapipe_flwr" / "__init__.py"
    monkeypatch.setattr(collapipe_flwr, "__file__", str(installed))
    done = CliRunner().invoke(app, ["bench", "pipeline", "--quick"])
    assert isinstance(done.exception, ConfigError)
    assert "folder benchmarks/ of the project's repository" in str(done.exception)


def test_bench_passes_its_options_on() -> None:
    done = CliRunner().invoke(app, ["bench", "codecs", "--help"])
    assert done.exit_code == 0
    assert "collapipe bench codecs" in done.output
    assert all(option in done.output for option in ("--steps", "--seeds", "--json"))


def test_bench_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.scheduling.decisions", None)  # as if not there
    done = CliRunner().invoke(app, ["bench", "scheduler"])
    assert isinstance(done.exception, ConfigError)
    assert "run `pip install 'collapipe-flwr[bench]'`" in str(done.exception)
