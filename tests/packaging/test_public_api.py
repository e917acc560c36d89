"""What a program may import from the root of the package, and what it costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import collapipe_flwr

PROJECT = Path(__file__).parents[2]
MOST_S, MOST_MIB = 1.5, 120
_MEASURE = """
import re, sys, time
from pathlib import Path
begun = time.process_time()
from collapipe_flwr import CollaPipe
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(time.process_time() - begun, int(peak[1]) / 1024)
print(*[name for name in ("torch", "transformers", "ray", "datasets") if name in sys.modules])
"""


def test_every_public_name_is_there_and_nothing_else_is_promised() -> None:
    for name in collapipe_flwr.__all__:
        assert getattr(collapipe_flwr, name) is not None
    assert set(collapipe_flwr.__all__) <= set(dir(collapipe_flwr))
    assert (Path(collapipe_flwr.__file__).parent / "py.typed").exists()


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert collapipe_flwr.__version__ == project["version"]


def test_importing_the_strategy_loads_no_torch_and_is_light() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True, cwd=PROJECT
    ).stdout.splitlines()
    assert told[1] == ""
    cpu_s, mib = map(float, told[0].split())
    assert cpu_s < MOST_S
    assert mib < MOST_MIB
