"""A Flower node as a cluster: its run-config, its place among the others, its data and devices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flwr.app import Context

from collapipe_flwr.cluster.local_data import LocalData, Place, local_data, own_data
from collapipe_flwr.cluster.profile import profile_of
from collapipe_flwr.cluster.simulated import describe_cluster
from collapipe_flwr.config.cluster_file import ClusterConfig, read_cluster
from collapipe_flwr.config.schema import AppConfig, parse
from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.data.tokenizer import Vocabulary
from collapipe_flwr.federation.node_fleet import Crew, open_crew
from collapipe_flwr.federation.node_state import STATE_KEY, NodeState, state_folder
from collapipe_flwr.federation.records import SplitTask
from collapipe_flwr.federation.rounds import Progress
from collapipe_flwr.models.splitter import Splitter

CLUSTER_KEY = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a run; ``cluster`` is the file that describes it, None for a simulated one."""

    config: AppConfig
    place: Place
    cluster: ClusterConfig | None
    context: Context

    @staticmethod
    def of(context: Context) -> Node:
        """As run-config and ``--node-config`` say; raises ConfigError.

        Files that the node names as its own go before those of the run.
        """
        own = own_data(context.node_config)
        config = parse({**context.run_config, **own})
        index = context.node_config.get("partition-id")
        if index is None:
            raise ConfigError(
                "this node has no 'partition-id': start the SuperNode with "
                '--node-config "partition-id=0 num-partitions=2"'
            )
        place = Place(index=int(index), count=config.run.clusters, own_data=bool(own))
        return Node(config=config, place=place, cluster=_cluster_file(context), context=context)

    @property
    def is_spare(self) -> bool:
        """Whether the run has no place for it."""
        return self.place.index >= self.place.count

    def data(self, vocabulary_json: str) -> LocalData:
        """The cluster's examples, in the server's vocabulary."""
        return local_data(self.config, self.place, _vocabulary(vocabulary_json))

    def profile(self, examples: int | None = None) -> ClusterProfile:
        """The cluster as the planner sees it, for rounds of so many examples (None: its own)."""
        if examples is None:
            examples = local_data(self.config, self.place, None).examples_per_round
        if self.cluster is None:
            return describe_cluster(self.config.world, self.place, examples)
        return profile_of(self.cluster, examples)

    def state(self, server_round: int, progress: Progress, run_id: str) -> NodeState:
        """What it carries between rounds; its own state directory goes before the run's."""
        folder = self.context.node_config.get(STATE_KEY, self.config.train.state_dir)
        return NodeState(
            records=self.context.state,
            server_round=server_round,
            progress=progress,
            run_id=run_id,
            place=self.place,
            state_dir=state_folder(folder, run_id),
        )

    def crew(
        self, task: SplitTask, splitter: Splitter, examples: int
    ) -> AbstractContextManager[Crew]:
        """Its devices, joined to the edge session of ``task``, for a round of so many examples."""
        return open_crew(self.config.edge, self.cluster, self.profile(examples), task, splitter)


def _cluster_file(context: Context) -> ClusterConfig | None:
    """The cluster named by ``--node-config "cluster='FILE' ..."``; None for a simulated one."""
    path = context.node_config.get(CLUSTER_KEY, "")
    if not isinstance(path, str):
        raise ConfigError(f"node-config cluster must be the path of a file, got {path!r}")
    return _read(Path(path)) if path else None


@lru_cache(maxsize=4)
def _read(path: Path) -> ClusterConfig:
    return read_cluster(path)


@lru_cache(maxsize=4)
def _vocabulary(text: str) -> Vocabulary:
    return Vocabulary.from_json(text)
