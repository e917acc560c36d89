"""The ClientApp: `client_app.cluster`, called in the resident control unit where there is one."""

from collapipe_flwr.federation.client.relay import Relay

app = Relay("client_app.cluster:app")
