"""A page is told of a run as it is, and of rounds and clusters only when they have changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.core.incident import Incident
from collapipe_flwr.reporting.live.feed import Feed, newest_run
from collapipe_flwr.reporting.live.state import Place
from collapipe_flwr.reporting.progress import ClusterProgress, ProgressFile
from collapipe_flwr.reporting.run_directory import EVENTS
from collapipe_flwr.reporting.run_lock import lock_file
from tests.reporting.made_up_runs import MadeUpRun


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    return MadeUpRun(tmp_path / "run")


def _feed(path: Path) -> Feed:
    return Feed(lambda: path)


def _told(feed: Feed, known: Place) -> tuple[Place, dict[str, Any]]:
    while feed.look():
        pass
    found = feed.next(known, timeout_s=0.0)
    assert found is not None
    return found[0], json.loads(found[1])


def test_news_are_told_once(run: MadeUpRun) -> None:
    feed = _feed(run.path)
    run.end_round(incidents=(Incident(kind="remark", text="cluster-0: late"),))
    known, news = _told(feed, Place())
    assert (news["last"]["round"], len(news["clusters"])) == (1, 2)
    assert [each["text"] for each in news["incidents"]] == ["cluster-0: late"]
    assert feed.next(known, timeout_s=0.0) is None
    run.save("stopped")
    known, news = _told(feed, known)
    assert (news["head"]["status"], "clusters" in news, "incidents" in news) == (
        "stopped",
        False,
        False,
    )
    run.end_round(incidents=(Incident(kind="remark", text="cluster-0: later"),))
    known, news = _told(feed, known)
    assert (news["last"]["round"], len(news["clusters"])) == (2, 2)
    assert [each["text"] for each in news["incidents"]] == ["cluster-0: late", "cluster-0: later"]


def test_of_many_incidents_the_newest_are_told(run: MadeUpRun) -> None:
    told = [Incident(kind="remark", text=f"cluster-0: {number}") for number in range(99)]
    run.end_round(incidents=tuple(told))
    _, news = _told(_feed(run.path), Place())
    texts = [each["text"] for each in news["incidents"]]
    assert (texts[-1], len(texts)) == ("cluster-0: 98", 50)


def test_a_resumed_run_is_told_anew(run: MadeUpRun) -> None:
    feed = _feed(run.path)
    events = [run.end_round(), run.end_round(), run.end_round()]
    known, _ = _told(feed, Place())
    run.directory.rewrite_events([events[0].as_json()])
    known, news = _told(feed, known)
    assert (news["last"]["round"], news["rounds"]) == (1, 1)


def test_a_run_is_awaited_then_prepared_then_running(tmp_path: Path) -> None:
    feed = _feed(tmp_path / "run")
    known, news = _told(feed, Place())
    assert news["head"]["status"] == "waiting"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.log").touch()
    with lock_file(tmp_path / "run" / "run.log"):
        known, news = _told(feed, known)
    assert news["head"]["status"] == "starting"
    (tmp_path / "run" / "run.log").unlink()
    (tmp_path / "run").rmdir()
    run = MadeUpRun(tmp_path / "run")
    known, news = _told(feed, known)
    assert news["head"]["status"] == "running"
    run.save("failed", "no memory")
    known, news = _told(feed, known)
    assert (news["head"]["status"], news["head"]["reason"]) == ("failed", "no memory")


def test_a_run_that_was_killed_is_interrupted(run: MadeUpRun) -> None:
    feed = _feed(run.path)
    run.end_round()
    known, news = _told(feed, Place())
    assert news["head"]["status"] == "running"
    run.die()
    _, news = _told(feed, known)
    assert news["head"]["status"] == "interrupted"
    assert news["head"]["reason"]


def test_no_number_stands_on_the_page_twice(run: MadeUpRun) -> None:
    feed = _feed(run.path)
    run.end_round()
    _, news = _told(feed, Place())
    titles = [title for title, *_ in json.loads(feed.figures.text())["tiles"]]
    assert "Traffic" in titles and not {"Run", news["head"]["metric"]} & set(titles)


def test_before_the_first_round_a_page_knows_who_takes_part(run: MadeUpRun) -> None:
    feed = _feed(run.path)
    known, news = _told(feed, Place())
    members = news["head"]["members"]
    assert {name: len(devices) for name, devices in members.items()} == {
        "cluster-0": 4,
        "cluster-1": 4,
    }
    assert news["head"]["config"]["clusters"] == 2
    run.end_round()
    assert _told(feed, known)[1]["head"]["members"] == {}


def test_a_run_that_was_killed_before_its_first_summary_is_interrupted(run: MadeUpRun) -> None:
    (run.path / "summary.json").unlink()
    _, news = _told(_feed(run.path), Place())
    assert news["head"]["status"] == "starting"
    run.die()
    _, news = _told(_feed(run.path), Place())
    assert news["head"]["status"] == "interrupted"


def test_a_run_that_ended_before_it_began_is_interrupted(tmp_path: Path) -> None:
    feed, log = _feed(tmp_path), tmp_path / "run.log"
    log.touch()
    with lock_file(log):  # as by `collapipe run`
        known, news = _told(feed, Place())
        assert news["head"]["status"] == "starting"
    _, news = _told(feed, known)
    assert news["head"]["status"] == "interrupted"
    assert news["head"]["reason"] == "its process ended before the run began, see run.log"


def test_progress_inside_a_round_is_told(run: MadeUpRun) -> None:
    feed = _feed(run.path)
    known, news = _told(feed, Place())
    assert news["head"]["progress"] is None
    ProgressFile(run.path).enter(
        "training", round_index=1, look=lambda: {"cluster-0": ClusterProgress(trained=3, of=8)}
    )
    _, news = _told(feed, known)
    progress = news["head"]["progress"]
    assert (progress["phase"], progress["round_index"]) == ("training", 1)


def test_the_newest_round_of_a_long_file_is_shown_first(run: MadeUpRun) -> None:
    run.begin_long(20)
    path = run.path / EVENTS
    lines = path.read_bytes().splitlines(keepends=True)
    long = [line.replace(b", ", b", " + b" " * (9 << 20), 1) for line in lines[:2]]
    path.write_bytes(b"".join([*long, *lines[2:]]))
    feed = _feed(run.path)
    feed.look()
    found = feed.next(Place(), timeout_s=0.0)
    assert found is not None
    news = json.loads(found[1])
    assert (news["last"]["round"], news["rounds"]) == (20, 1)
    _, news = _told(feed, found[0])
    assert (news["last"]["round"], news["rounds"]) == (20, 20)


def test_damage_is_told_and_what_was_read_stays(run: MadeUpRun) -> None:
    feed = _feed(run.path)
    run.end_round()
    known, _ = _told(feed, Place())
    with (run.path / EVENTS).open("a") as file:
        file.write("{\n")
    known, news = _told(feed, known)
    assert "line 2: no event of a round" in news["head"]["broken"]
    assert news["last"]["round"] == 1


def test_a_lost_cluster_stays_as_it_was_seen(run: MadeUpRun) -> None:
    feed = _feed(run.path)
    event = run.end_round().as_json()
    known, _ = _told(feed, Place())
    event = {**event, "round_index": 2, "lost": ["cluster-1"], "clusters": {}, "plan": None}
    run.directory.append_event(event)
    _, news = _told(feed, known)
    cluster = next(each for each in news["clusters"] if each["id"] == "cluster-1")
    assert (cluster["lost"], cluster["round"], len(cluster["stages"])) == (True, 1, 5)


def test_the_report_grows_with_the_rounds(run: MadeUpRun) -> None:
    feed = _feed(run.path)
    run.end_round()
    feed.look()
    first = json.loads(feed.figures.text())
    assert {section["key"] for section in first["sections"]} >= {"learning", "energy", "links"}
    run.end_round()
    feed.look()
    learning = json.loads(feed.figures.text())["sections"][0]
    training = learning["charts"]["loss"]["figure"]["data"][0]
    assert training["x"] == [1, 2]
    run.path.joinpath("timeline-round2.json").write_text('{"traceEvents": []}')
    run.end_round()
    feed.look()
    timeline = json.loads(feed.figures.text())["sections"][-2]
    assert (timeline["key"], "Not recorded" in timeline["html"]) == ("timeline", False)


@pytest.mark.parametrize("module", ["jinja2", "plotly"])
def test_without_the_extra_the_page_says_how_to_get_charts(
    run: MadeUpRun, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    feed = _feed(run.path)
    run.end_round()
    feed.look()
    found = json.loads(feed.figures.text())
    assert "pip install 'collapipe-flwr[report]'" in found["missing"]


def test_a_newer_run_takes_the_page(tmp_path: Path) -> None:
    feed = Feed(lambda: newest_run(tmp_path))
    assert newest_run(tmp_path / "nowhere") is None
    (tmp_path / "no-run").mkdir()
    MadeUpRun(tmp_path / "first").end_round()
    known, news = _told(feed, Place())
    assert news["head"]["name"] == "first"
    second = MadeUpRun(tmp_path / "second")
    known, news = _told(feed, known)
    assert (news["head"]["name"], news["last"], news["clusters"]) == ("second", None, [])
    second.end_round()
    known, news = _told(feed, known)
    assert news["last"]["round"] == 1
