"""A Flower client that is a cluster: its ClientApp, resident control unit and SuperNode."""

from collections.abc import Mapping

from collapipe_flwr.core.errors import ConfigError

# Keys of `--node-config` besides Flower's own:
CLUSTER_KEY = "cluster"  # the file that lists its devices
COMPUTE_KEY = "compute"  # the device of its parts
STATE_KEY = "state-dir"  # the folder of its state between rounds
CONTROL_UNIT_KEY = "control-unit"  # the socket of its resident control unit
RANK_KEY = "lora-rank"  # of its adapters


def named_path(node_config: Mapping[str, object], key: str, kind: str, default: str = "") -> str:
    """Read the path of a file, folder or socket; raises ConfigError for another value."""
    found = node_config.get(key, default)
    if not isinstance(found, str):
        raise ConfigError(f"node-config {key} must be the path of a {kind}, got {found!r}")
    return found


def partition_of(node_config: Mapping[str, object]) -> int | None:
    """Read the node's number from Flower's key, if there is one; raises ConfigError."""
    found = node_config.get("partition-id")
    if found is None:
        return None
    if not str(found).isdecimal():
        raise ConfigError(
            f"node-config partition-id must be a whole number >= 0, got {found!r}: start the "
            'SuperNode with --node-config "partition-id=0 num-partitions=2"'
        )
    return int(str(found))
