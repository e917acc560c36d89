"""What a cluster is evaluated on, and what becomes of the model's predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from collapipe_flwr.cluster.evaluation import EvalResult, PredictionConfig
from collapipe_flwr.cluster.loader import LoaderBatches, joined, stacked
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.records import EXAMPLES

Metrics = Callable[[Tensor, Tensor], Mapping[str, float] | float]
LABEL_NAMES = ("labels", "label")


@runtime_checkable
class TestSet(Protocol):
    """Batches that cut themselves by a plan, as `Batches` do, and score their predictions."""

    @property
    def wanted(self) -> PredictionConfig | None:
        """How the model predicts; None for the loss alone."""

    def steps(self, batch_size: int, micro_batch_size: int) -> Iterable[list[dict[str, Tensor]]]:
        """The micro-batches of every batch; raises DataError."""

    def scores(self, found: EvalResult) -> dict[str, float | list[float]]:
        """The reply's metrics besides the loss; ``num-examples`` is its weight in averages."""


@dataclass(slots=True, kw_only=True)
class LoaderTest:
    """The :class:`TestSet` of a user's ``loader``, scored by a function of logits and labels."""

    loader: Iterable[Any]
    metrics: Metrics | None
    _batches: LoaderBatches = field(init=False)
    _seen: list[dict[str, Tensor]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._batches = LoaderBatches(loader=self.loader, any_size=True)

    @property
    def wanted(self) -> PredictionConfig | None:
        return None if self.metrics is None else PredictionConfig(logits=True)

    def steps(self, batch_size: int, micro_batch_size: int) -> Iterator[list[dict[str, Tensor]]]:
        """Every batch as the loader yields it, kept if it has to be scored."""
        for step in self._batches.steps(batch_size, micro_batch_size):
            if self.metrics is not None:
                self._seen += step
            yield step

    def scores(self, found: EvalResult) -> dict[str, float | list[float]]:
        """The number of examples, and the metrics over all of them; raises ConfigError."""
        scores: dict[str, float | list[float]] = {EXAMPLES: self._batches.examples}
        if self.metrics is None:
            return scores
        logits = stacked([part for step in found.predictions for part in step])
        value = self.metrics(logits, _labels(joined(self._seen)))
        if not isinstance(value, Mapping):
            value = {getattr(self.metrics, "__name__", "metric"): value}
        return scores | {str(name): float(score) for name, score in value.items()}


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    labels = next((batch[name] for name in LABEL_NAMES if name in batch), None)
    if labels is None:
        raise ConfigError(
            f"metrics need labels, but the batches hold only {', '.join(batch)}: have the loader "
            "yield them as 'labels'"
        )
    return labels
