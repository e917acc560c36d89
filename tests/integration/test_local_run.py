"""`collapipe run --cluster`: the apps on the daemons of a cluster file, without a SuperLink."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from collapipe_flwr.config.cluster_file import format_cluster
from collapipe_flwr.config.parsing import declared_config
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation import local_grid
from collapipe_flwr.federation.local_grid import run_locally
from collapipe_flwr.federation.run.launcher import first_error
from collapipe_flwr.federation.run.running import edge_of, launch_of
from tests.cluster.hosted import daemons
from tests.integration.conftest import TINY, events_of

ROOT = Path(__file__).parents[2]


def test_a_run_on_the_boards_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "shed.toml"
    with daemons(2) as (cluster, edge):
        file.write_text(format_cluster(replace(cluster, edge=replace(cluster.edge, address=edge))))
        given = {k: v for k, v in TINY.items() if not k.startswith("world.")}
        values = {**declared_config(ROOT), **given, **edge_of([file])}
        values |= {"output-dir": str(tmp_path / "runs"), "num-server-rounds": 1}
        run_locally(ROOT, values, [file])
    folder = tmp_path / "runs" / "run"
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    last = events_of(folder)[-1]
    used = {s["device_id"] for s in last["plan"]["clusters"][0]["segments"]}
    assert used and used <= {"shed/board-0", "shed/board-1"} and not last["failures"]


def test_clusters_with_an_edge_each_train_in_one_run(tmp_path: Path) -> None:
    """One has an edge server, the control unit of the other is its edge, and labels stay there."""
    files = [tmp_path / "shed.toml", tmp_path / "barn.toml"]
    with daemons(2) as (shed, edge), daemons(2) as (barn, _):
        shed = replace(shed, edge=replace(shed.edge, address=edge))
        own = replace(barn.edge, name=barn.control_unit.name)
        for file, cluster in zip(files, (shed, replace(barn, id="barn", edge=own)), strict=True):
            file.write_text(format_cluster(cluster))
        given = {k: v for k, v in TINY.items() if not k.startswith("world.")}
        values = {**declared_config(ROOT), **given, **edge_of(files)}
        values |= {"output-dir": str(tmp_path / "runs"), "num-server-rounds": 2}
        run_locally(ROOT, values, files)
    folder = tmp_path / "runs" / "run"
    events = events_of(folder)
    rounds = [event for event in events if event.get("plan")]
    assert rounds
    for event in rounds:
        assert {plan["cluster_id"] for plan in event["plan"]["clusters"]} == {"shed", "barn"}
        assert not event["failures"]


def test_the_server_reaches_the_edge_as_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "shed.toml"
    text = 'id = "shed"\n[[device]]\nname = "d"\naddress = "h:1"\n[edge]\n{}\n[tls]\n'
    file.write_text(text.format(""))
    assert edge_of([file]) == {"clusters": 1, "edge.address": ""}
    file.write_text(text.format('address = "10.0.0.2:50061"'))
    launch = launch_of(ROOT, clusters=[file], output_dir=tmp_path)
    assert launch.clusters == (file,)
    assert launch.run_config["clusters"] == 1
    assert launch.run_config["edge.address"] == "10.0.0.2:50061"
    assert launch.run_config["edge.tls-key"] == str(tmp_path / "certs" / "server.key")
    own = launch_of(ROOT, ["edge.address=h:2"], clusters=[file])
    assert own.run_config["edge.address"] == "h:2"


def test_the_server_asks_the_edge_that_all_clusters_share(tmp_path: Path) -> None:
    text = 'id = "{0}"\n[[device]]\nname = "{0}-d"\naddress = "h:1"\n[edge]\naddress = "{1}"\n'

    def edge_of_run(**edges: str) -> object:
        files = [tmp_path / f"{name}.toml" for name in edges]
        for file, address in zip(files, edges.values(), strict=True):
            file.write_text(text.format(file.stem, address))
        return edge_of(files)["edge.address"]

    assert edge_of_run(shed="h:2", barn="h:2") == "h:2"
    assert edge_of_run(shed="", barn="h:2") == "h:2"
    assert edge_of_run(shed="", barn="") == ""
    assert edge_of_run(shed="h:2", attic="", barn="h:3") == ""


def test_the_error_of_an_app_that_logs_nothing_is_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("late must be 'drop' or 'join', got 'wait'")

    (tmp_path / "run-config.toml").touch()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["local_grid", str(tmp_path / "run-config.toml"), "shed.toml"])
    monkeypatch.setattr(local_grid, "run_locally", refuse)
    with pytest.raises(SystemExit) as ended:
        local_grid.main()
    (tmp_path / "log").write_text(f"{ended.value.code}\n")
    assert first_error(tmp_path / "log") == "late must be 'drop' or 'join', got 'wait'"
