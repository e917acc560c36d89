"""Every strategy that Flower exports, as a test builds it for ``nodes`` clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import flwr.serverapp.strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy

Make = Callable[..., Strategy]
NOISE, NORM = 0.3, 0.5


def _private(name: str) -> Make:
    def make(**settings) -> Strategy:
        return getattr(flower, name)(FedAvg(**settings), NOISE, NORM, 5)

    return make


def _adaptive(name: str) -> Make:
    def make(**settings) -> Strategy:
        return getattr(flower, name)(FedAvg(**settings), NOISE, 5, initial_clipping_norm=NORM)

    return make


def _with(name: str, **own) -> Make:
    return lambda **settings: getattr(flower, name)(**own, **settings)


AVERAGING: Mapping[str, Make] = {
    "Bulyan": _with("Bulyan", num_malicious_nodes=0),
    "FedAdagrad": _with("FedAdagrad"),
    "FedAdam": _with("FedAdam"),
    "FedAvg": _with("FedAvg"),
    "FedAvgM": _with("FedAvgM", server_momentum=0.5, server_learning_rate=0.7),
    "FedMedian": _with("FedMedian"),
    "FedProx": _with("FedProx", proximal_mu=0.1),
    "FedTrimmedAvg": _with("FedTrimmedAvg", beta=0.25),
    "FedYogi": _with("FedYogi"),
    "Krum": _with("Krum", num_malicious_nodes=1),
    "MultiKrum": _with("MultiKrum", num_malicious_nodes=1, num_nodes_to_select=3),
    "QFedAvg": _with("QFedAvg", client_learning_rate=0.1, q=0.2, train_loss_key="loss"),
}
PRIVATE: Mapping[str, Make] = {
    "DifferentialPrivacyClientSideAdaptiveClipping": _adaptive(
        "DifferentialPrivacyClientSideAdaptiveClipping"
    ),
    "DifferentialPrivacyClientSideFixedClipping": _private(
        "DifferentialPrivacyClientSideFixedClipping"
    ),
    "DifferentialPrivacyServerSideAdaptiveClipping": _adaptive(
        "DifferentialPrivacyServerSideAdaptiveClipping"
    ),
    "DifferentialPrivacyServerSideFixedClipping": _private(
        "DifferentialPrivacyServerSideFixedClipping"
    ),
}
TREES: Mapping[str, Make] = {
    "FedXgbBagging": _with("FedXgbBagging"),
    "FedXgbCyclic": _with("FedXgbCyclic"),
}
ALL: Mapping[str, Make] = {**AVERAGING, **PRIVATE, **TREES}
