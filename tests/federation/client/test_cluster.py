"""`Cluster` on a ClientApp: what Flower does with the app still works."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from collapipe_flwr import Cluster
from collapipe_flwr.cluster.evaluation import EvalResult
from collapipe_flwr.config.schema import EdgeConfig, TrainConfig, WorldConfig
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.accepted import Progress
from collapipe_flwr.federation.client.cluster import LoaderTest
from collapipe_flwr.federation.client.node import Node
from collapipe_flwr.federation.client.node_state import OPTIMIZER, NodeState
from collapipe_flwr.federation.client.site import Site
from collapipe_flwr.federation.records import TaskAssignment, write_assignment


def test_an_app_with_a_cluster_travels_to_the_workers_of_a_simulation() -> None:
    from ray import cloudpickle  # slow; other workers do without

    app = ClientApp()
    Cluster(app, devices="jetson-nano,phone")
    assert isinstance(cloudpickle.loads(cloudpickle.dumps(app)), ClientApp)


def test_a_cluster_file_that_is_being_edited_when_a_round_ends_does_not_cost_the_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "shed.toml"
    file.write_text('id = "shed"\n[[device]]\nname = "pi-1"\naddress = "pi-1:50071"\n')
    node = {"cluster": str(file)}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})
    cluster = Cluster(ClientApp())
    profile = cluster._try_profile(context)
    assert profile is not None and profile.cluster_id == "shed"
    file.write_text("[[device")
    assert cluster._try_profile(context) is None
    assert f"cluster file {file} is not TOML" in caplog.text


@pytest.mark.parametrize("number", ["a", 0.7, -1, True])
def test_a_node_whose_number_is_none_is_told_how_to_start(number: str | float) -> None:
    node = {"partition-id": number}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})
    for made in (Node.of, Cluster(ClientApp())._site_of):
        with pytest.raises(ConfigError, match=rf"partition-id must .*, got {number!r}: start the"):
            made(context)


def restarted(folder: Path, server_round: int, *, run: int = 1) -> NodeState:
    """The state of a SuperNode that has just begun, in a round of a library's run."""
    node = {"partition-id": 0, "state-dir": str(folder)}
    context = Context(run_id=run, node_id=1, node_config=node, state=RecordDict(), run_config={})
    done = server_round - 1
    order = TaskAssignment(
        server_round=server_round, progress=Progress(rounds=done, last_round=done)
    )
    message = SimpleNamespace(content=write_assignment(RecordDict(), order))
    site = Site.of(context, WorldConfig(), EdgeConfig(), TrainConfig(compute="cpu"))
    return site.state(message, context)


def test_a_library_keeps_its_state_in_the_folder_of_the_node_under_flowers_run(
    tmp_path: Path,
) -> None:
    slots = (torch.arange(3.0),)
    restarted(tmp_path, 1).remember(OPTIMIZER, {"weight": slots})
    found = restarted(tmp_path, 2).recall(OPTIMIZER)
    assert found is not None and torch.equal(found["weight"][0], slots[0])
    assert restarted(tmp_path, 2, run=2).recall(OPTIMIZER) is None


@pytest.mark.parametrize("name", ["labels", "label"])
def test_labels_of_shorter_texts_are_padded_by_none_for_the_metrics(name: str) -> None:
    batches = [{name: torch.ones(2, length).long()} for length in (3, 1)]
    counted = []
    test = LoaderTest(loader=batches, metrics=lambda _, labels: counted.append(labels) or 0.0)
    logits = tuple((torch.zeros(2, length, 4),) for length in (3, 1))
    list(test.cut_steps(2, 2))
    test.scores(EvalResult(loss=0.0, targets=8.0, predictions=logits))
    assert counted[0].tolist() == [[1, 1, 1]] * 2 + [[1, -100, -100]] * 2


@pytest.mark.parametrize("score", [None, [0.5, 0.25], torch.ones(2), "high"])
def test_metrics_that_are_no_numbers_are_refused(score: object) -> None:
    logits = ((torch.zeros(2, 4),),)
    result = EvalResult(loss=0.0, targets=2.0, predictions=logits)
    for value, name in ((score, "accuracy"), ({"f1": score}, "f1")):

        def accuracy(*_: torch.Tensor, value: object = value) -> object:
            return value

        test = LoaderTest(loader=[{"labels": torch.ones(2).long()}], metrics=accuracy)
        list(test.cut_steps(2, 2))
        with pytest.raises(ConfigError, match=f"return a number, .* but '{name}' is "):
            test.scores(result)
