"""A plan with replicas as rows of the common tables, each of which picks one replica of a stage.

The number of a row has two digits: one picks the replica of stages 1, 3, ... (modulo how many there
are), the other that of stages 2, 4, ... So any two replicas of neighbouring stages stand next to
each other in one of the rows, and a row is a chain like that of any plan.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.schedule import ReplicaIndex
from collapipe_flwr.costs.layouts import Layouts, index_members
from collapipe_flwr.costs.tables import Tables


class ReplicaRows:
    """Stages are numbered from the control unit (0) to the edge (K + 1), which have one place."""

    def __init__(self, tables: Tables, m: int, plan: ClusterPlan) -> None:
        self.replicas = plan.replicas
        self.edge = len(plan.segments) + 1
        self.segments = range(1, self.edge)
        self.devices = [(s, r) for s in self.segments for r in range(self.replicas[s])]
        self.members = [(0, 0), *self.devices]
        self._even = max(self.replicas[2:-1:2], default=1)
        self._plan, self._m = plan, m
        self._indices = index_members(tables, m)

    def make_rows(self) -> Layouts:
        """Build all rows."""
        plan, count = self._plan, max(self.replicas[1:-1:2]) * self._even
        members = [
            [self.find_member(s, self.pick(s, v)) for s in self.segments] for v in range(count)
        ]
        stops = np.array([segment.stop_block for segment in plan.segments], dtype=np.int64)
        return Layouts(
            cluster_r=np.full(count, self._m),
            member_rs=np.array(members, dtype=np.int64),
            stop_rs=np.tile(stops, (count, 1)),
            micro_batch_size_r=np.full(count, plan.micro_batch_size),
            micro_batches_r=np.full(count, plan.micro_batches),
        )

    def pick(self, stage: int, row: int) -> int:
        """Return the replica of a stage in a row."""
        digit = row // self._even if stage % 2 else row % self._even
        return digit % self.replicas[stage]

    def find_row(self, stage: int, replica: int, behind: int = 0) -> int:
        """Return the row in which a replica stands beside that one of the stage behind."""
        if stage % 2:
            return replica * self._even + behind
        return replica + behind * self._even

    def find_member(self, stage: int, replica: int) -> int:
        """Find a member's place on the member axis; the control unit's is 0."""
        return self._indices[self.find_name(stage, replica)] if stage else 0

    def find_name(self, stage: int, replica: int) -> str:
        """Return the id of a device, or of the control unit."""
        if stage == 0:
            return self._plan.member_ids[0]
        return self._plan.segments[stage - 1].device_ids[replica]

    def count_own(self, stage: int, replica: int) -> int:
        """Count the micro-batches of a step that pass a replica."""
        turn = ReplicaIndex(replica=replica, replicas=self.replicas[stage])
        return len(turn.list_own(self._plan.micro_batches))

    def count_meetings(self, hop: int) -> Counter[tuple[int, int]]:
        """Count the micro-batches of a step that pass from each replica to each one behind."""
        ahead, behind = self.replicas[hop], self.replicas[hop + 1]
        return Counter((j % ahead, j % behind) for j in range(self._plan.micro_batches))
