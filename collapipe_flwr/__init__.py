"""CollaPipe for Flower: a cluster of weak devices trains a transformer as one Flower client.

Names are imported on first use: importing the strategy loads no torch, making one does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collapipe_flwr.cluster.order import LearningSettings as LearningSettings
    from collapipe_flwr.config.schema import EdgeConfig as EdgeConfig
    from collapipe_flwr.core.errors import CollaPipeError as CollaPipeError
    from collapipe_flwr.core.errors import ConfigError as ConfigError
    from collapipe_flwr.core.errors import DataError as DataError
    from collapipe_flwr.core.errors import LinkError as LinkError
    from collapipe_flwr.core.errors import ModelError as ModelError
    from collapipe_flwr.core.errors import RunError as RunError
    from collapipe_flwr.core.errors import ScheduleError as ScheduleError
    from collapipe_flwr.federation.client.cluster import Cluster as Cluster
    from collapipe_flwr.federation.client.relay import Relay as Relay
    from collapipe_flwr.federation.local_grid import LocalGrid as LocalGrid
    from collapipe_flwr.federation.planning import Planning as Planning
    from collapipe_flwr.federation.round import RoundRecord as RoundRecord
    from collapipe_flwr.federation.run.sinks import Sinks as Sinks
    from collapipe_flwr.federation.strategy import CollaPipe as CollaPipe
    from collapipe_flwr.models.split_model import SplitModel as SplitModel
    from collapipe_flwr.pipeline.config import CacheConfig as CacheConfig
    from collapipe_flwr.pipeline.config import Execution as Execution
    from collapipe_flwr.pipeline.optimizer import OptimizerConfig as OptimizerConfig
    from collapipe_flwr.pipeline.optimizer import ParameterGroup as ParameterGroup
    from collapipe_flwr.scheduler.protocol import SchedulerConfig as SchedulerConfig

__version__ = "0.1.0"
_HOMES = {
    "CacheConfig": "pipeline.config",
    "Cluster": "federation.client.cluster",
    "CollaPipe": "federation.strategy",
    "CollaPipeError": "core.errors",
    "ConfigError": "core.errors",
    "DataError": "core.errors",
    "EdgeConfig": "config.schema",
    "Execution": "pipeline.config",
    "LearningSettings": "cluster.order",
    "LinkError": "core.errors",
    "LocalGrid": "federation.local_grid",
    "ModelError": "core.errors",
    "OptimizerConfig": "pipeline.optimizer",
    "ParameterGroup": "pipeline.optimizer",
    "Planning": "federation.planning",
    "Relay": "federation.client.relay",
    "RoundRecord": "federation.round",
    "RunError": "core.errors",
    "ScheduleError": "core.errors",
    "SchedulerConfig": "scheduler.protocol",
    "Sinks": "federation.run.sinks",
    "SplitModel": "models.split_model",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
