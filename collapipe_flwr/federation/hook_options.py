"""The options of :class:`CollaPipe`: their checks, and the learning settings of each round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from flwr.serverapp.strategy import Strategy

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.config.schema import EdgeConfig
from collapipe_flwr.core.errors import ConfigError, RunError, prefix_errors
from collapipe_flwr.core.links import TOP_K, split_address
from collapipe_flwr.federation.inner import BY_COORDINATE, CLIPPED_BY_CLIENTS, layers
from collapipe_flwr.models.any_splitter import DescribedModel
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.pipeline.optimizer import OptimizerConfig, optimizer_config

_SEES_CODES = (
    "with coded updates (links.updates, LearningSettings.updates), a CollaPipe cannot be wrapped "
    "in another strategy, which would see codes: put that inside, CollaPipe(OtherStrategy("
    "FedAvg(), ...), ...)"
)
WITHOUT_MODEL = (
    "{} has no effect without a model to split, since clients train whole models: pass "
    "model=SplitModel(...) too, or leave it out"
)
Learning = LearningSettings | Callable[[int], LearningSettings]  # the same, or by server round


def check_options(
    model: object,
    *,
    optimizer: object,
    learning: object,
    edge: object,
    on_round: object,
    retries: object,
) -> None:
    """Raise ConfigError for an option of the wrong type, or one that has no effect."""
    if not (on_round is None or callable(on_round)):
        raise ConfigError(
            f"on_round must be a function that takes the record of a round, got {on_round!r}"
        )
    if type(retries) is not int or retries < 0:
        raise ConfigError(f"retries must be a whole number of at least 0, got {retries!r}")
    if not isinstance(model, DescribedModel | None):
        raise ConfigError(
            f"model must be a SplitModel, got {type(model).__name__}: describe it, "
            "CollaPipe(..., model=SplitModel(model, example=batch))"
        )
    options = {"optimizer": optimizer, "learning": learning, "edge": edge}
    given = [name for name, value in options.items() if value is not None]
    if model is None and given:
        raise ConfigError(WITHOUT_MODEL.format(given[0]))
    if not (learning is None or callable(learning) or isinstance(learning, LearningSettings)):
        raise ConfigError(
            "learning must be LearningSettings, or a function of the round that returns them, got "
            f"{learning!r}"
        )
    if not isinstance(edge, str | EdgeConfig | None):
        raise ConfigError(f"edge must be an address, host:port, or an EdgeConfig, got {edge!r}")
    if isinstance(edge, str) and edge:
        with prefix_errors("edge"):
            split_address(edge)


def check_updates(inner: Strategy, codec: str, *, outermost: bool, products: bool) -> None:
    """Raise RunError for a strategy around ours, or an ``inner`` one, that codes would deceive."""
    if not outermost:
        raise RunError(_SEES_CODES)
    if codec == TOP_K and products:
        raise RunError(
            "updates in top-k need lora.aggregate=factors: what they leave for later rounds is of "
            "other factors by then; set that, or choose int8 or int4 (links.updates, "
            "LearningSettings.updates)"
        )
    for layer in layers(inner):
        if codec == TOP_K and isinstance(layer, BY_COORDINATE):
            raise RunError(
                f"{type(layer).__name__} takes medians or trimmed means of every number, and in "
                "top-k most clusters send no change of it: choose int8 or int4 (links.updates, "
                "LearningSettings.updates), or another strategy"
            )
        if isinstance(layer, CLIPPED_BY_CLIENTS):
            raise RunError(
                f"{type(layer).__name__} relies on updates that clients clip, and coded ones carry "
                "the errors of earlier rounds beyond that norm: leave out coded updates "
                "(links.updates, LearningSettings.updates), or clip on the server's side"
            )


def learning_of(
    given: object, learning: Learning | None, model: DescribedModel | None
) -> Callable[[int], LearningSettings]:
    """Return the learning settings by round, with ``given`` as their optimizer if it is set."""
    if given is not None:
        given = optimizer_config(given, model.model if isinstance(model, SplitModel) else None)
    holds = model is not None and model.splitter.held_blocks > 0
    return partial(_choose_settings, learning or LearningSettings(), given, holds)


def _choose_settings(
    learning: Learning, optimizer: OptimizerConfig | None, holds: bool, server_round: int
) -> LearningSettings:
    settings = learning(server_round) if callable(learning) else learning
    if settings.cache.active and not holds:
        raise ConfigError(
            "LearningSettings.cache has no effect on a model whose frozen blocks are on devices: "
            "pass SplitModel(..., hold_frozen=True), or leave it out"
        )
    return settings if optimizer is None else replace(settings, optimizer=optimizer)
