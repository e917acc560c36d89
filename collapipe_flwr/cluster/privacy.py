"""What a private order demands of a model and a plan, and its noise."""

from __future__ import annotations

import secrets

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ConfigError, ScheduleError
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import ExamplePrivacy

_SECRET_BYTES = 32


def draw_privacy(
    splitter: AnySplitter, learning: LearningSettings, plan: ClusterPlan
) -> ExamplePrivacy | None:
    """Draw the noise of one order; None where the run asks for none.

    The secret is a new one for every order: the server may send one again with other weights, and
    the difference of two answers with the same noise would tell what the noise covers. Replays
    within the order, which the server does not see, draw the same. Raises ConfigError as
    `check_private`, and ScheduleError for a plan whose micro-batches hold several examples.
    """
    asked = learning.privacy
    if not asked.active:
        return None
    check_private(splitter, learning)
    if plan.micro_batch_size != 1:
        raise ScheduleError(
            f"the plan has micro-batches of {plan.micro_batch_size} examples, but with "
            "privacy.clip-norm each must hold one: plan such"
        )
    return ExamplePrivacy(
        group_norm=asked.clip_norm / splitter.trained_groups**0.5,
        deviation=asked.noise_multiplier * asked.clip_norm,
        secret=secrets.token_hex(_SECRET_BYTES),
    )


def check_private(splitter: AnySplitter, learning: LearningSettings) -> None:
    """Raise ConfigError for a model or settings with which examples cannot be protected."""
    if not learning.labels_at_home:
        raise ConfigError(
            "privacy.clip-norm needs privacy.labels=home: an edge that is not the control unit "
            "sees gradients before their noise"
        )
    if learning.execution.clip_norm:
        raise ConfigError(
            f"train.clip-norm={learning.execution.clip_norm:g} would clip again what "
            "privacy.clip-norm has clipped: set train.clip-norm=0"
        )
    if why := _describe_unfit(splitter):
        raise ConfigError(f"privacy.clip-norm cannot protect examples of this model: {why}")


def _describe_unfit(splitter: AnySplitter) -> str:
    if not isinstance(splitter, Splitter):
        return "it is described by SplitModel, of which only models of transformers can be private"
    if splitter.whole_batches:
        return "its layers or its loss compute with whole batches, which mixes examples"
    if set(splitter.ties) - splitter.constant_keys:
        return "two parts train one table, so set model.ties=untie"
    if splitter.sums_shared:
        return "several parts train the same parameters, so set model.shared=freeze"
    return ""
