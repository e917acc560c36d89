"""What a user may hand to :class:`CollaPipe`, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from collapipe_flwr.cluster.fleet import LearningSettings
from collapipe_flwr.config.schema import EdgeConfig
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.default_profile import DefaultProfilePlanner
from collapipe_flwr.federation.described import DescribedClusters, Planning
from collapipe_flwr.federation.rounds import RoundPlanner
from collapipe_flwr.federation.split import EdgeGateway
from collapipe_flwr.models.any_splitter import DescribedModel
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.user_optimizer import optimizer_config
from collapipe_flwr.scheduler.protocol import Scheduler

Learning = LearningSettings | Callable[[int], LearningSettings]  # the same, or by server round


def check_options(model: object, *, optimizer: object, learning: object, edge: object) -> None:
    """Raise ConfigError for an option of another kind, or one that has no effect."""
    if not isinstance(model, DescribedModel | None):
        raise ConfigError(
            f"model must be a SplitModel, got {type(model).__name__}: describe it, "
            "CollaPipe(..., model=SplitModel(model, example=batch))"
        )
    options = {"optimizer": optimizer, "learning": learning, "edge": edge}
    given = [name for name, value in options.items() if value is not None]
    if model is None and given:
        raise ConfigError(
            f"{given[0]} has no effect without a model to split, since clients train as they "
            "like: pass model=SplitModel(...) too, or leave it out"
        )
    if not (learning is None or callable(learning) or isinstance(learning, LearningSettings)):
        raise ConfigError(
            "learning must be LearningSettings, or a function of the round that returns them, got "
            f"{learning!r}"
        )
    if not isinstance(edge, str | EdgeConfig | EdgeGateway | None):
        raise ConfigError(f"edge must be an address, host:port, or an EdgeConfig, got {edge!r}")


def planner_of(
    scheduler: str | Scheduler | Planning | RoundPlanner | None,
    model: DescribedModel | None,
    learning: Callable[[int], LearningSettings],
) -> RoundPlanner:
    """What plans rounds: a planner as it is; for a ``model`` one of clusters that describe
    themselves, else one of assumed clusters. Raises ConfigError for a bad name.
    """
    if isinstance(scheduler, RoundPlanner):
        return scheduler
    if isinstance(scheduler, Planning):
        planning = scheduler
    else:
        planning = Planning(policy=scheduler or ("dssda" if model else "fedavg"))
    if model is None:
        return DefaultProfilePlanner(planning.scheduler)
    if model.batch_size is not None:
        planning = planning.for_batches(model.batch_size, cut=not model.splitter.whole_batches)
    optimizer = learning(1).optimizer
    return DescribedClusters(
        planning, lambda: profile_model(model.splitter, model.shape, optimizer.state_bytes)
    )


def learning_of(
    given: object, learning: Learning | None, model: DescribedModel | None
) -> Callable[[int], LearningSettings]:
    """How clusters learn by server round, with the optimizer that is ``given`` if there is one."""
    if given is not None:
        given = optimizer_config(given, model.model if isinstance(model, SplitModel) else None)
    return partial(_learning, learning or LearningSettings(), given)


def _learning(
    learning: Learning, optimizer: OptimizerConfig | None, server_round: int
) -> LearningSettings:
    settings = learning(server_round) if callable(learning) else learning
    return settings if optimizer is None else replace(settings, optimizer=optimizer)
