"""Where a process computes, by name, without asking whether it is there (`pipeline.compute`)."""

from __future__ import annotations

import re

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import Rule

AUTO, CPU = "auto", "cpu"
_NAME = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?")
_SAYS = "must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"


def compute_name() -> Rule:
    """Accept the names of places to compute at."""
    return Rule(lambda v: _NAME.fullmatch(v) is not None, _SAYS, names=(AUTO, CPU, "cuda", "mps"))


def check_compute(name: str, key: str = "compute") -> None:
    """Raise ConfigError, naming the `key`, for anything else."""
    if not compute_name().holds(name):
        raise ConfigError(f"{key} {_SAYS}, got {name!r}")
