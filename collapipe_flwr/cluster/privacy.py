"""Private orders: the secret of their noise, and the models and plans that they accept."""

from __future__ import annotations

import secrets

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ConfigError, ScheduleError
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import ActivationNoise, ExamplePrivacy

_SECRET_BYTES = 32
_SEEN = ("attention_mask", "position_ids")  # of an example, which its length tells anyway


def draw_privacy(
    splitter: AnySplitter, learning: LearningSettings, plan: ClusterPlan
) -> ExamplePrivacy | None:
    """Draw the secret of the noise on one order's gradients; None where there is no such noise.

    Every order has a new secret: the server may repeat an order with other weights, and the
    difference of two answers with the same noise would reveal what the noise covers. Replays within
    the order, which the server does not see, use the same secret. Raises ConfigError as
    `check_private`, and ScheduleError for a plan whose micro-batches hold several examples.
    """
    asked = learning.privacy
    if not asked.on_gradients:
        return None
    check_private(splitter, learning)
    if plan.micro_batch_size != 1:
        raise ScheduleError(
            f"the plan has micro-batches of {plan.micro_batch_size} examples, but with "
            "privacy.clip-norm each must hold one: plan micro-batches of size 1"
        )
    return ExamplePrivacy(
        group_norm=asked.clip_norm / splitter.trained_groups**0.5,
        deviation=asked.noise_multiplier * asked.clip_norm,
        secret=secrets.token_hex(_SECRET_BYTES),
    )


def draw_activation_noise(
    splitter: AnySplitter, learning: LearningSettings
) -> ActivationNoise | None:
    """Draw the noise of one order's hidden states, as `draw_privacy`."""
    asked = learning.privacy
    if not asked.on_activations:
        return None
    check_private(splitter, learning)
    return ActivationNoise(
        behind=learning.trusted_blocks,
        norm=asked.clip_norm,
        deviation=asked.noise_multiplier * asked.clip_norm,
        secret=secrets.token_hex(_SECRET_BYTES),
    )


def check_private(splitter: AnySplitter, learning: LearningSettings) -> None:
    """Raise ConfigError for a model or settings that cannot protect examples."""
    why = _describe_unfit(splitter)
    if learning.privacy.on_activations:
        if not (ahead := splitter.held_blocks + learning.trusted_blocks):
            raise ConfigError(
                "privacy.noise-on=activations needs privacy.trusted-blocks of 1 or more, or blocks "
                "that cache.max-gb keeps at the control unit: noise is added behind them, on a "
                "machine that may see what it covers"
            )
        why = why or _describe_seen(splitter, ahead)
    elif not learning.labels_at_home:
        raise ConfigError(
            "privacy.clip-norm needs privacy.labels=home: an edge that is not the control unit "
            "sees gradients before their noise"
        )
    elif learning.execution.clip_norm:
        raise ConfigError(
            f"train.clip-norm={learning.execution.clip_norm:g} would clip again what "
            "privacy.clip-norm has clipped: set train.clip-norm=0"
        )
    if why:
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


def _describe_seen(splitter: AnySplitter, ahead: int) -> str:
    """Say what devices would see of an example besides states noised behind ``ahead`` blocks."""
    assert isinstance(splitter, Splitter)
    if not splitter.task.labelled:
        return "its labels are texts, which gradients tell, so set privacy.noise-on=gradients"
    example, _ = splitter.example(BatchShape(source_length=2))
    seen = set(splitter.context(example)).difference(_SEEN, splitter.targets_of(example))
    if seen or splitter.has_own_loss:
        what = ", ".join(sorted(seen)) or "what its own head or loss reads"
        return f"{what} would travel to the edge beside hidden states"
    if ahead > splitter.count_frozen():
        return (
            "embedding and blocks ahead of the noise train, by which later hidden states would "
            f"tell of earlier examples, so set model.frozen-blocks={ahead}"
        )
    return ""
