"""Learning rates that change from step to step of a round, as factors of the configured rate.

The control unit computes the factor of each step and announces it with the step, so that all stages
use the same number and none of them needs the function behind it. Steps count from 0 in each round
of each cluster. What counts is an applied optimizer step: a batch without any label makes none, an
evaluation makes none, and a step that is replayed after a failure has the number that it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches

from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.core.imports import load_function

SCHEDULES = ("constant", "linear", "cosine")
Factor = Callable[[int], float]


def check_schedule(schedule: str) -> None:
    """Raise ConfigError unless it is one of `SCHEDULES` or looks like ``module:function``."""
    module, colon, name = schedule.partition(":")
    path = [*module.split("."), name]
    if schedule in SCHEDULES or (colon and all(part.isidentifier() for part in path)):
        return
    near = get_close_matches(schedule, SCHEDULES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"schedule must be one of {', '.join(SCHEDULES)} or the path of a function, as "
        f"my_app.task:factor, got {schedule!r}{hint}"
    )


def factor_of(schedule: str, warmup: int, total: int) -> Factor:
    """The factor by step, as `transformers.get_scheduler` defines the schedules of that name.

    ``warmup`` steps grow linearly from 0; ``linear`` and ``cosine`` fall to 0 at ``total``. A
    function that is named by its path takes the number of the step and knows of neither. Raises
    ConfigError for a function that cannot be imported, and for a ``total`` of 0 that is needed.
    """
    if schedule not in SCHEDULES:
        return _own(schedule)
    decay = {"constant": _constant, "linear": _linear, "cosine": _cosine}[schedule]
    if schedule != "constant" and not total:
        raise ConfigError(
            f"schedule {schedule} needs total_steps: the number of batches of the round is not "
            "known in advance"
        )

    def factor(step: int) -> float:
        if step < warmup:
            return float(step) / float(max(1, warmup))
        return decay(step, warmup, total)

    return factor


def _constant(step: int, warmup: int, total: int) -> float:
    del step, warmup, total
    return 1.0


def _linear(step: int, warmup: int, total: int) -> float:
    return max(0.0, float(total - step) / float(max(1, total - warmup)))


def _cosine(step: int, warmup: int, total: int) -> float:
    progress = float(step - warmup) / float(max(1, total - warmup))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))


def _own(path: str) -> Factor:
    try:
        function = load_function(path)
    except ModelError as error:
        raise ConfigError(f"schedule: {error}") from error

    def factor(step: int) -> float:
        found = function(step)
        if not isinstance(found, int | float) or not 0 <= found < math.inf:
            raise ConfigError(f"schedule {path} must return a number >= 0, got {found!r}")
        return float(found)

    return factor
