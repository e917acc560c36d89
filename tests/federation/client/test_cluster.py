"""`Cluster` on a ClientApp: what Flower does with the app still works."""

from __future__ import annotations

from flwr.clientapp import ClientApp

from collapipe_flwr import Cluster


def test_an_app_with_a_cluster_travels_to_the_workers_of_a_simulation() -> None:
    from ray import cloudpickle  # slow; other workers do without

    app = ClientApp()
    Cluster(app, devices="jetson-nano,phone")
    assert isinstance(cloudpickle.loads(cloudpickle.dumps(app)), ClientApp)
