"""A planned round of one cluster, on its devices and its edge.

Shared by a user's `Cluster` and our own ClientApp; it knows neither tasks nor data sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

from flwr.app import RecordDict
from torch import Tensor

from collapipe_flwr.cluster.control_unit import ClusterResult, evaluate_batches, train_round
from collapipe_flwr.cluster.evaluation import EvalResult, PredictionConfig
from collapipe_flwr.cluster.loader import Batches
from collapipe_flwr.cluster.order import EDGE, TrainingOrder
from collapipe_flwr.cluster.privacy import draw_activation_noise, draw_privacy
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.measurements import CacheUse, ClusterMeasurement, StageMeasurement
from collapipe_flwr.core.texts import to_one_line
from collapipe_flwr.federation import records
from collapipe_flwr.federation.client.node_state import OPTIMIZER, NodeState, recall_optimizer
from collapipe_flwr.federation.client.site import Site
from collapipe_flwr.federation.records import SplitTask
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.module_splitter import ModuleSplitter
from collapipe_flwr.models.splitter import Splitter, splitter_of
from collapipe_flwr.pipeline.offload import LazyMapping
from collapipe_flwr.pipeline.step import MicroBatch

Weights = Mapping[str, Tensor]
MOST_PREDICTED = 32  # micro-batches: their predictions are the tensors of one frame
Steps = Iterable[Sequence[Mapping[str, Tensor]]]  # each of micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRound:
    """What the server asks of a cluster in one round, and where the cluster does it."""

    server_round: int
    attempt: int
    plan: ClusterPlan
    task: SplitTask
    site: Site
    splitter: AnySplitter

    @staticmethod
    def of(content: RecordDict, site: Site) -> ClusterRound:
        """Read the round that a message asks for; raises ProtocolError if it asks for none."""
        assignment = records.read_assignment(content)
        if assignment.split is None or assignment.plan is None:
            raise ProtocolError(
                "the server sent neither a plan nor a whole task: its strategy needs a model to "
                "split, CollaPipe(..., model=SplitModel(...))"
            )
        return ClusterRound(
            server_round=assignment.server_round,
            attempt=assignment.attempt,
            plan=assignment.plan,
            task=assignment.split,
            site=site,
            splitter=splitter_of(assignment.split.model_spec_json),
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """Examples of a step and of a micro-batch."""
        size = self.plan.micro_batch_size
        return size * self.plan.micro_batches, size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The largest planned tensor shapes of an example, images excepted."""
        if isinstance(self.splitter, ModuleSplitter):
            return {name: shape[1:] for name, _, shape in self.splitter.spec.example if shape[1:]}
        texts = isinstance(self.splitter, Splitter) and self.splitter.input_name == "input_ids"
        return {"input_ids": (self.task.shape.source_length,)} if texts else {}

    def run(
        self, weights: Weights, batches: Batches, state: NodeState | None
    ) -> tuple[ClusterResult, tuple[str, ...]]:
        """Take one optimizer step per batch; returns the result and the devices absent at the end.

        The optimizer continues from ``state``, or starts anew without one. Raises as `train_round`.
        """
        with self.site.devices(self.task, self.splitter) as (fleet, recovery):
            order = replace(
                self._order(weights),
                batches=batches.count_batches(self.sizes[0]),
                privacy=draw_privacy(self.splitter, self.task.learning, self.plan),
                activations=draw_activation_noise(self.splitter, self.task.learning),
            )
            if state is not None:
                order = replace(order, slots=recall_optimizer(state), keep_optimizer=True)
            result = train_round(
                self.splitter,
                order,
                self._micro_batches(batches.cut_steps(*self.sizes)),
                fleet,
                self._micro_batches(batches.probe(*self.sizes)),
                recovery=recovery,
            )
            if state is not None:
                state.remember(OPTIMIZER, result.slots)
            ours = [device.device_id for device in recovery.profile.devices]
            return result, tuple(sorted(fleet.find_missing(ours)))

    def complete(self, sent: Weights, trained: LazyMapping[Tensor]) -> LazyMapping[Tensor]:
        """Return all weights that were ``sent``, with those that were trained in their places."""
        aliases, names = self.splitter.aliases, {key: self._own_name(key) for key in sent}
        changed = {
            k: own for k, name in names.items() if (own := aliases.get(name, name)) in trained
        }
        fresh = {key: partial(trained.__getitem__, name) for key, name in changed.items()}
        return LazyMapping.join(sent, LazyMapping(fresh))

    def test(self, weights: Weights, steps: Steps, wanted: PredictionConfig | None) -> EvalResult:
        """Compute the loss on batches of micro-batches, and predictions where ``wanted``.

        A model whose embedding holds borrowed rows only cannot generate, so it predicts nothing.
        """
        splitter = self.splitter
        if wanted is not None and wanted.generates(splitter.decodes) and splitter.ties:
            wanted = None
        with self.site.devices(self.task, splitter) as (fleet, recovery):
            return evaluate_batches(
                splitter,
                self._order(weights),
                self._micro_batches(_cut_steps(steps, self.plan.micro_batches)),
                fleet,
                recovery=recovery,
                wanted=wanted,
            )

    def _order(self, weights: Weights) -> TrainingOrder:
        return TrainingOrder(
            plan=self.plan,
            weights=LazyMapping.join(weights).rename(self._own_name),
            learning=self.task.learning,
            dropout_seed=self._dropout_seed(),
            server_round=self.server_round,
            attempt=self.attempt,
            compute=self.site.place,
        )

    def _own_name(self, key: str) -> str:
        """Return the splitter's name of a key of the message."""
        return key.removeprefix(self.splitter.prefix)

    def _dropout_seed(self) -> int | None:
        """Derive a seed per run, cluster and round; None, which is faster, without dropout."""
        if not self.splitter.drops:
            return None
        place = f"{self.task.learning.seed}/{self.plan.cluster_id}/{self.server_round}"
        return int.from_bytes(sha256(place.encode()).digest()[:6], "big")

    def _micro_batches(self, steps: Steps) -> Iterator[list[MicroBatch]]:
        for step in steps:
            self.splitter.check_parts(step)
            yield [micro_batch(self.splitter, tensors) for tensors in step]


def micro_batch(splitter: AnySplitter, tensors: Mapping[str, Tensor]) -> MicroBatch:
    """Make a micro-batch of these tensors."""
    context = splitter.context(tensors)
    return MicroBatch(
        inputs=tensors,
        context=context,
        weight=splitter.weight_of(tensors),
        targets=tuple(name for name in splitter.targets_of(tensors) if name in context),
    )


def _cut_steps(steps: Steps, planned: int) -> Iterator[list[Mapping[str, Tensor]]]:
    """Cut steps into some of no more micro-batches than ``planned``, for which deadlines are made.

    The losses stay the same, since each is weighed by its labels.
    """
    most = min(planned, MOST_PREDICTED)
    for step in steps:
        for start in range(0, len(step), most):
            yield list(step[start : start + most])


def build_telemetry(
    result: ClusterResult, batches: Batches, absent: tuple[str, ...], *, wall_s: float
) -> ClusterMeasurement:
    """Collect the measurements of a round that took ``wall_s`` from its message to its reply."""
    replanned = any(incident.lost for incident in result.incidents)
    reports, edge = result.reports, None
    if reports and reports[-1].name == EDGE:
        reports, edge = reports[:-1], reports[-1]
    return ClusterMeasurement(
        cluster_id=result.plan.cluster_id,
        examples=batches.examples * batches.epochs,
        wall_s=wall_s,
        losses=result.losses,
        reports=reports,
        edge=edge,
        moved=result.moved,
        replanned=result.plan if replanned else None,
        incidents=tuple(to_one_line(str(incident)) for incident in result.incidents),
        absent=absent,
        quarantined={name: to_one_line(why) for name, why in result.quarantined.items()},
        lost=tuple(name for each in result.incidents if not each.quarantined for name in each.lost),
        untrue=tuple(name for each in result.incidents if each.untrue for name in each.lost),
        fresh_examples=batches.fresh_examples,
        prequential_loss=result.probe.loss if batches.fresh_examples else None,
        kept_share=_predict_kept_share(reports, getattr(batches, "seen_share", None)),
    )


def _predict_kept_share(reports: Sequence[StageMeasurement], seen_share: float | None) -> float:
    """Predict which share of the next round's visits finds hidden states of frozen blocks kept.

    ``seen_share`` is how many of them are of examples that were visited before; where that is not
    known, the next round counts as this one.
    """
    use = reports[0].cache if reports else CacheUse()
    if not use.visits:
        return 0.0
    if seen_share is None:
        return use.hits / use.visits
    return seen_share * (use.hits + use.stored) / use.visits
