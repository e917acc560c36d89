"""The ClientApp of a cluster, in its resident control unit where there is one."""

from collapipe_flwr import Relay

app = Relay("rounds_app.cluster_client:app")
