"""A run resumes as itself: its run-config counts, not how its values were written."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from collapipe_flwr.config.schema import parse
from collapipe_flwr.core import durable
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.run.recorder import check_same_run, open_run
from collapipe_flwr.reporting.run_lock import is_written


def saved(folder: Path, **values: object) -> Path:
    text = json.dumps({key.replace("__", ".").replace("_", "-"): v for key, v in values.items()})
    (folder / "run-config.json").write_text(text)
    return folder


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_is_locked_as_soon_as_it_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    config, path = {"output-dir": str(tmp_path), "run-name": "run"}, tmp_path / "run"
    if resume:
        with ExitStack() as lock:
            open_run(parse(config), lock)
        config["resume"] = str(path)
    publish, seen = durable.publish, []

    def published(written: Path, place: Path) -> None:
        publish(written, place)
        seen.append(is_written(path))

    monkeypatch.setattr(durable, "publish", published)
    with ExitStack() as lock:
        open_run(parse(config), lock)
        seen.append(is_written(path))
    assert all(seen) and is_written(path) is False


def test_runs_without_a_name_that_begin_in_one_second_have_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    for _ in range(3):
        with ExitStack() as lock:
            open_run(parse({"output-dir": str(tmp_path)}), lock)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["now", "now-2", "now-3"]


def test_a_list_may_be_written_in_another_way(tmp_path: Path) -> None:
    path = saved(tmp_path, scheduler__micro_batches="2, 4", data__image_mean="0.50")
    check_same_run(parse({"scheduler.micro-batches": "2,4"}), path)


def test_the_first_key_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    path = saved(tmp_path, scheduler__micro_batches="2, 4", seed=7)
    with pytest.raises(ConfigError, match=r"scheduler\.micro-batches is '2,8', but .* '2,4'"):
        check_same_run(parse({"scheduler.micro-batches": "2,8"}), path)
