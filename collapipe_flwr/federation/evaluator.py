"""The check on unseen examples: the whole global model, loss and the task's own metrics."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from collapipe_flwr.cluster.evaluation import EvalResult, TestPart, prediction_config, tally_of
from collapipe_flwr.cluster.unsplit import evaluate_unsplit
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.metrics import Tally, added
from collapipe_flwr.data.tasks import Task
from collapipe_flwr.models.splitter import Splitter


class Evaluator:
    """Scores global weights on the test set of a task."""

    def __init__(self, splitter: Splitter, task: Task, batch_size: int) -> None:
        self._splitter = splitter
        self.task = task
        rows: list[Example] = task.examples(task.test).to_list()
        self._batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """``loss`` (mean over labels) and every metric of the task."""
        model, wanted = self._splitter.build_whole(weights), prediction_config(self.task)
        losses: list[tuple[float, float]] = []
        tally: Tally = {}
        for rows in self._batches:
            part = TestPart.of(self.task, rows)
            tested = evaluate_unsplit(model, [[part.tensors]], self._splitter.task, wanted)
            losses.append((tested.loss, tested.targets))
            tally = added(tally, tally_of(self.task, [part], tested.predictions[0]))
        return scores(self.task, EvalResult.mean(losses).loss, tally)


def scores(task: Task, loss: float, tally: Tally) -> dict[str, float]:
    """``loss`` and all metrics by name."""
    return {"loss": loss, **task.score_loss(loss), **task.score_of(tally)}
