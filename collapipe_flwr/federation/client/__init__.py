"""A Flower client that is a cluster: its ClientApp, resident control unit and SuperNode."""

# What `--node-config` may say of a node, besides Flower's own keys:
CLUSTER_KEY = "cluster"  # the file that lists its devices
COMPUTE_KEY = "compute"  # where its parts compute
STATE_KEY = "state-dir"  # where it keeps what lasts longer than a round
CONTROL_UNIT_KEY = "control-unit"  # the socket of its resident control unit
