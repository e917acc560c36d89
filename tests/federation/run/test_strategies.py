"""The run-config names a strategy and its arguments; what it cannot take is refused by name."""

from __future__ import annotations

import pytest
from flwr.serverapp.strategy import FedAvg, FedProx, QFedAvg

from collapipe_flwr.config.schema import STRATEGIES, parse
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.run.strategies import list_arguments, make_strategy

ARGUMENTS = {
    "dp-fixed-clipping": "noise_multiplier=0.1 clipping_norm=1.0",
    "dp-adaptive-clipping": "noise_multiplier=0.1",
}


def made(name: str, arguments: str = "", clusters: int = 3):
    values = {"strategy": name, "strategy-arguments": arguments, "clusters": clusters}
    return make_strategy(parse(values), min_train_nodes=1, fraction_evaluate=0.0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_name_makes_its_strategy(name):
    strategy = made(name, ARGUMENTS.get(name, ""))
    inside = getattr(strategy, "strategy", strategy)
    assert isinstance(inside, FedAvg)
    assert inside.min_train_nodes == 1
    words = name.replace("dp-", "").replace("-", "")
    assert words in type(strategy).__name__.lower()


def test_arguments_are_those_of_the_class():
    assert made("fedprox", "proximal_mu=0.1").proximal_mu == 0.1
    assert made("multikrum", "num_malicious_nodes=1 num_nodes_to_select=2").num_nodes_to_select == 2
    assert made("fedadam", "eta=1 fraction_train=0.5").eta == 1
    assert made("dp-fixed-clipping", ARGUMENTS["dp-fixed-clipping"]).num_sampled_clients == 3
    assert isinstance(made("fedprox"), FedProx)


def test_qfedavg_reads_the_loss_that_clusters_report_at_their_rate():
    strategy = made("qfedavg", "q=0.5")
    assert isinstance(strategy, QFedAvg)
    assert (strategy.train_loss_key, strategy.client_learning_rate) == ("train_loss", 0.002)
    assert made("qfedavg", "client_learning_rate=0.3").client_learning_rate == 0.3


def test_what_the_app_decides_is_no_argument():
    assert list(list_arguments("fedavg")) == ["fraction_train"]
    assert list(list_arguments("krum")) == ["fraction_train", "num_malicious_nodes"]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("fedavgg", "", "strategy must be one of fedavg, .*; did you mean fedavg?"),
        ("fedtrimmedavg", "betta=0.1", "has no argument betta; known: fraction_train, beta$"),
        ("fedavg", "min_train_nodes=2", "has no argument min_train_nodes; known: fraction_train"),
        ("fedtrimmedavg", "beta=0.7", r"strategy-arguments: `beta` must be in the range"),
        ("fedprox", "proximal_mu=much", "proximal_mu must be a number, got 'much'"),
        ("fedprox", "proximal_mu=true", "proximal_mu must be a number, got True"),
        ("krum", "num_malicious_nodes=0.5", "num_malicious_nodes must be a whole number, got 0.5"),
        ("fedprox", "proximal_mu", 'strategy-arguments must read like "d_model=64'),
        ("dp-fixed-clipping", "clipping_norm=1", "needs noise_multiplier: set strategy-arg"),
        ("bulyan", "num_malicious_nodes=1", "needs 7 clusters, clusters is 3: use more, or krum"),
    ],
)
def test_a_wrong_name_or_argument_is_refused_with_the_known_ones(name, arguments, words):
    with pytest.raises(ConfigError, match=words):
        made(name, arguments)
