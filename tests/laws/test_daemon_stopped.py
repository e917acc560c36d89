"""A device that is told to stop in the middle of a round finishes it, then ends in good order."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

from collapipe_flwr.core.errors import Unreachable
from tests.host.chain_to_edge import request
from tests.laws.test_cluster_equals_whole import SGD, Cut, _steps, make_splitter
from tests.laws.test_daemons_equal_whole import _order, cluster_of_daemons


@pytest.mark.timeout(200)
def test_a_stop_in_the_middle_of_a_round_loses_nothing_of_it(tmp_path: Path) -> None:
    splitter = make_splitter("bert", dropout=0.0)
    cut = Cut(stops=(1, 2, 5), micro_batches=(2, 2, 1))
    weights = splitter.initial_weights(seed=1)
    steps = _steps(splitter, cut, count=4)
    with cluster_of_daemons(tmp_path, tls=True) as cluster:
        device = cluster.daemons[1].process
        undisturbed, _ = cluster.train(splitter, _order(weights, cut, SGD), steps)
        begun = itertools.count()

        def stopping() -> None:
            if next(begun) == 1:
                device.send_signal(signal.SIGTERM)

        result, _ = cluster.train(splitter, _order(weights, cut, SGD), steps, stopping)
        assert result.losses == undisturbed.losses
        assert device.wait(15) == 0
        with cluster.client(cluster.config.devices[1]) as client, pytest.raises(Unreachable):
            client.open_session(request())
