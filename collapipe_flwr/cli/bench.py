"""``collapipe bench``: the commands of ``benchmarks``, which only a checkout of the project has."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import typer

import collapipe_flwr
from collapipe_flwr.core.errors import ConfigError


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
    importlib.import_module("benchmarks.__main__").app(context.args, prog_name=context.command_path)
