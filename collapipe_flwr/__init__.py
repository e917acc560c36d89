"""CollaPipe for Flower: a cluster of weak devices trains a transformer as one Flower client.

Names are imported on first use: importing the strategy loads no torch, making one does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from collapipe_flwr.renamed import install

if TYPE_CHECKING:
    from collapipe_flwr.cluster.fleet import LearningSettings
    from collapipe_flwr.config.schema import EdgeConfig
    from collapipe_flwr.core.errors import (
        CollaPipeError,
        ConfigError,
        DataError,
        LinkError,
        ModelError,
        RunError,
        ScheduleError,
    )
    from collapipe_flwr.federation.client.cluster import Cluster
    from collapipe_flwr.federation.client.relay import Relay
    from collapipe_flwr.federation.local_grid import LocalGrid
    from collapipe_flwr.federation.planning import Planning
    from collapipe_flwr.federation.rounds import RoundRecord
    from collapipe_flwr.federation.run.sinks import Sinks
    from collapipe_flwr.federation.strategy import CollaPipe
    from collapipe_flwr.models.split_model import SplitModel
    from collapipe_flwr.pipeline.config import Execution
    from collapipe_flwr.pipeline.optimizer import OptimizerConfig, ParameterGroup
    from collapipe_flwr.scheduler.protocol import SchedulerConfig

__version__ = "0.1.0"
__all__ = [
    "Cluster",
    "CollaPipe",
    "CollaPipeError",
    "ConfigError",
    "DataError",
    "EdgeConfig",
    "Execution",
    "LearningSettings",
    "LinkError",
    "LocalGrid",
    "ModelError",
    "OptimizerConfig",
    "ParameterGroup",
    "Planning",
    "Relay",
    "RoundRecord",
    "RunError",
    "ScheduleError",
    "SchedulerConfig",
    "Sinks",
    "SplitModel",
    "__version__",
]
_MODULES = {
    "cluster.fleet": ("LearningSettings",),
    "config.schema": ("EdgeConfig",),
    "core.errors": (
        "CollaPipeError",
        "ConfigError",
        "DataError",
        "LinkError",
        "ModelError",
        "RunError",
        "ScheduleError",
    ),
    "federation.client.cluster": ("Cluster",),
    "federation.planning": ("Planning",),
    "federation.local_grid": ("LocalGrid",),
    "federation.client.relay": ("Relay",),
    "federation.rounds": ("RoundRecord",),
    "federation.run.sinks": ("Sinks",),
    "federation.strategy": ("CollaPipe",),
    "models.split_model": ("SplitModel",),
    "pipeline.config": ("Execution",),
    "pipeline.optimizer": ("OptimizerConfig", "ParameterGroup"),
    "scheduler.protocol": ("SchedulerConfig",),
}

install()


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
