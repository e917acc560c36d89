"""A Flower client that is a cluster: its ClientApp, resident control unit and SuperNode."""

# What `--node-config` may say of a node, besides Flower's own keys:
CLUSTER_KEY = "cluster"  # the file that lists its devices
COMPUTE_KEY = "compute"  # the device of its parts
STATE_KEY = "state-dir"  # the folder of its state between rounds
CONTROL_UNIT_KEY = "control-unit"  # the socket of its resident control unit
