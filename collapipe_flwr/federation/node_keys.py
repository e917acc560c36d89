"""What ``--node-config`` may say of a node, besides Flower's own keys."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

CLUSTER_KEY = "cluster"  # the file that lists its devices
COMPUTE_KEY = "compute"  # where its parts compute
STATE_KEY = "state-dir"  # where it keeps what lasts longer than a round
CONTROL_UNIT_KEY = "control-unit"  # the socket of its resident control unit
_CLUSTERS = "COLLAPIPE_CLUSTERS"  # for nodes of Flower's simulation, which have no --node-config


def lent_clusters(files: Sequence[Path]) -> dict[str, str]:
    """The environment in which the nodes of a simulation have these files, by partition id."""
    return {_CLUSTERS: os.pathsep.join(map(str, files))} if files else {}


def lent_cluster(node_config: Mapping[str, object]) -> str:
    """The file that a node of a simulation has; empty where it has none."""
    files = os.environ.get(_CLUSTERS, "").split(os.pathsep)
    index = node_config.get("partition-id", len(files))
    return files[index] if isinstance(index, int) and index < len(files) else ""
