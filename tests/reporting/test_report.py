"""Reports say what the events say, of any run, and let no name become markup."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.incident import Incident
from collapipe_flwr.reporting.report.charts import COLOURS, bars, plot_by_row
from collapipe_flwr.reporting.report.page import (
    balance_columns,
    run_page,
    write_closing_report,
    write_reports,
    write_run_report,
)
from collapipe_flwr.reporting.report.template import SCRIPT
from collapipe_flwr.reporting.run_data import read_run
from collapipe_flwr.reporting.run_directory import read_events, read_summary
from tests.reporting.made_up_runs import MadeUpRun

SECTIONS = ["learning", "placement", "time", "energy", "links", "memory", "incidents", "timeline"]
INJECTION = "<img src=x onerror=alert(1)>&'\""
RESULTS = Path("docs/results")


def made_up(path: Path, rounds: int = 4, **options: Any) -> MadeUpRun:
    run = MadeUpRun(path / "run", **options)
    for _ in range(rounds):
        run.end_round()
    run.save("completed")
    return run


def charts(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.S)
    assert found is not None
    parsed: dict[str, Any] = json.loads(found[1])
    return parsed


def trace(figure: Mapping[str, Any], name: str) -> dict[str, Any]:
    (found,) = [trace for trace in figure["data"] if trace["name"] == name]
    return dict(found)


def table(page: str, title: str) -> list[list[str]]:
    """The cells of one table."""
    _, _, behind = page.partition(f"{title}</")
    rows = re.findall(r"<tr>(.*?)</tr>", behind.partition("</table>")[0], re.S)
    cells = (re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in rows)
    return [[unescape(cell) for cell in row] for row in cells]


def close(numbers: Any) -> Any:
    return pytest.approx(numbers, rel=1e-4)


def test_the_page_is_one_file_with_every_section(tmp_path: Path) -> None:
    run = made_up(tmp_path)
    page = write_run_report(run.path).read_text()
    assert re.findall(r'<section id="(\w+)"', page) == [*SECTIONS, "settings"]
    before, _, after = page.partition("<script>")
    ours = before + after[after.rindex("<script>") :]
    assert not re.findall(r'(?:src|href)="(?!#|data:)', ours)  # nothing is loaded from elsewhere
    assert "@import" not in ours and "url(" not in ours
    assert {"loss", "placement", "round-time", "energy", "queues", "bytes", "rates", "memory"} <= (
        charts(page).keys()
    )


def test_curves_are_those_of_the_events(tmp_path: Path) -> None:
    run = made_up(tmp_path)
    events, found = read_events(run.path), charts(run_page(read_run(run.path)).html())
    rounds = [event["round_index"] for event in events]
    loss = trace(found["loss"]["figure"], "training, all clusters")
    assert (loss["x"], loss["y"]) == (rounds, close([event["loss"] for event in events]))
    accuracy = trace(found["metric-accuracy"]["figure"], "test, by the server")
    assert accuracy["x"] == [0, *rounds]
    assert accuracy["y"] == close([0.01, *(event["metrics"]["accuracy"] for event in events)])
    time = found["round-time"]["figure"]
    assert trace(time, "measured")["y"] == close([event["latency_s"] for event in events])
    assert trace(time, "predicted")["y"] == close(
        [event["predicted_latency_s"] for event in events]
    )


def test_each_cluster_has_its_curve_and_many_have_a_band(tmp_path: Path) -> None:
    few, many = made_up(tmp_path / "few"), made_up(tmp_path / "many", clusters=9)
    events = read_events(few.path)
    figure = run_page(read_run(few.path)).charts["loss"]["figure"]
    curve = trace(figure, "training, cluster-1")
    assert curve["y"] == close([event["clusters"]["cluster-1"]["loss"] for event in events])
    events = read_events(many.path)
    figure = run_page(read_run(many.path)).charts["loss"]["figure"]
    highest = [max(told["loss"] for told in e["clusters"].values()) for e in events]
    assert trace(figure, "training, range of 9 clusters")["y"] == close(highest)


def test_epsilon_is_that_of_the_events_and_a_run_without_has_none(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run")
    run.directory.write_config({"privacy.delta": 1e-5, "privacy.max-epsilon": 4.0})
    spent = [{"cluster-0": 0.5}, {"cluster-0": 0.7, "cluster-1": 1.25}, {"cluster-1": 1.5}]
    for told in spent:
        run.end_round(epsilon=told)
    run.save("completed")
    page = run_page(read_run(run.path))
    figure = page.charts["epsilon"]["figure"]
    assert trace(figure, "cluster-0")["y"] == [0.5, 0.7, None]
    assert trace(figure, "cluster-1")["y"] == [None, 1.25, 1.5]
    assert "Epsilon of a cluster&#39;s examples at delta 1e-05, spent so far" in page.html()
    (tile,) = [each for each in page.tiles if each.title.startswith("Epsilon")]
    assert (tile.value, tile.note) == ("1.5", "cluster-1, of 4 allowed")
    bare = run_page(read_run(made_up(tmp_path / "bare").path))
    assert "epsilon" not in bare.charts
    assert not any(tile.title.startswith("Epsilon") for tile in bare.tiles)


def test_devices_hold_the_blocks_of_the_plan(tmp_path: Path) -> None:
    run = made_up(tmp_path)
    figure = run_page(read_run(run.path)).charts["placement"]["choices"]["cluster-0"]
    (picture,) = figure["data"]
    for place, event in enumerate(read_events(run.path)):
        plan = next(p for p in event["plan"]["clusters"] if p["cluster_id"] == "cluster-0")
        for segment in plan["segments"]:
            row = picture["y"].index(segment["device_id"].rpartition("/")[2])
            first, stop = segment["first_block"], segment["stop_block"]
            assert picture["text"][row][place] == f"{first}-{stop - 1}"
            assert picture["z"][row][place] == (first + stop) / 2


def test_energy_links_and_memory_are_those_of_the_events(tmp_path: Path) -> None:
    run = made_up(tmp_path)
    events, summary = read_events(run.path), read_summary(run.path)
    page = run_page(read_run(run.path)).html()
    assert summary is not None
    energy = {row[0]: row for row in table(page, "Devices")[1:]}
    for key, mean_j in summary["energy"]["mean_j"].items():
        device = key.replace("/cu", "/control-unit")
        assert float(energy[device][1]) == pytest.approx(mean_j, rel=1e-3)
        share = round(100 * mean_j / summary["energy"]["budget_j"][key])
        assert energy[device][4].startswith(f"{share} %")
        assert ("▲" in energy[device][4]) == (mean_j > summary["energy"]["budget_j"][key])
        queue_j = events[-1]["queues_j"][key]
        assert float(energy[device][5]) == pytest.approx(queue_j, rel=1e-2)
    assert len(energy) == len(summary["energy"]["budget_j"])
    hops = table(page, "Hops")[1:]
    assert len(hops) == len({(k["cluster"], k["sender"], k["receiver"]) for k in summary["links"]})
    reached = sorted(link["forward"]["bit_per_s"] / 1e6 for link in summary["links"])
    assert sorted(float(row[4].split()[0]) for row in hops) == pytest.approx(reached, rel=1e-3)
    traffic = charts(page)["bytes"]["figure"]["data"]
    assert sum(sum(kind["y"]) for kind in traffic) * 1e6 == close(sum(summary["bytes"].values()))
    members = {row[0]: row for row in table(page, "Members")[1:]}
    for role, peak in summary["peak_memory_bytes"].items():
        assert float(members[role][1].split()[0]) * 1e6 == pytest.approx(peak, rel=1e-2)
        assert members[role][3] == "120 MB"


def test_every_chart_has_a_table_and_every_table_scrolls_by_keys(tmp_path: Path) -> None:
    page = run_page(read_run(made_up(tmp_path).path)).html()
    assert set(re.findall(r'<details class="values" data-values="([^"]+)"', page)) == (
        set(charts(page))
    )
    shown = page.partition("</main>")[0]
    assert shown.count("<table") == len(
        re.findall(
            r'<div class="scroll" role="region" aria-label="[^"]+" tabindex="0"><table', shown
        )
    )


@pytest.mark.parametrize("tiles", range(1, 20))
def test_tiles_stand_in_rows_of_about_one_length(tiles: int) -> None:
    columns = balance_columns(tiles)
    rows = -(-tiles // columns)
    assert columns <= 7 and rows == -(-tiles // 7)
    assert rows * columns - tiles < rows  # no row lacks more than the others together have


def test_colours_of_curves_differ_in_light_and_dark() -> None:
    for theme in ("light", "dark"):
        found = re.search(theme + r": \{(.*?)muted", SCRIPT, re.S)
        assert found is not None
        colours = dict(re.findall(r'(c\d): "(#\w+)"', found[1]))
        assert [f"@{name}" for name in colours] == list(COLOURS)
        assert len(set(colours.values())) == len(COLOURS)


def test_few_rounds_break_no_budget_that_is_paid_back(tmp_path: Path) -> None:
    short, long = (run_page(read_run(made_up(tmp_path / str(n), rounds=n).path)) for n in (4, 12))
    few, many = (next(t for t in page.tiles if "Energy" in t.title) for page in (short, long))
    assert "so far: 10 rounds keep budgets" in few.note and not few.warning
    assert "over budget" in many.note and many.warning


def test_a_control_unit_has_one_name_on_the_page(tmp_path: Path) -> None:
    page = run_page(read_run(made_up(tmp_path).path)).html()
    said = json.dumps(charts(page)) + "".join(re.findall(r"<td[^>]*>(.*?)</td>", page))
    assert "cluster-0/control-unit" in said and "/cu" not in said


def test_memory_is_said_alike_on_tiles_charts_and_tables(tmp_path: Path) -> None:
    page = run_page(read_run(made_up(tmp_path).path))
    tile = next(each for each in page.tiles if each.title.startswith("Memory"))
    head, fullest, *_ = table(page.html(), "Members")
    assert head == ["member", "measured peak", "planned peak", "allowed", "measured", "planned"]
    assert tile.title == "Memory, measured peak" and tile.value == f"{fullest[4]} of allowed"
    assert fullest[0] in tile.note
    figure = page.charts["memory"]["figure"]
    assert [each["name"] for each in figure["data"]] == ["measured peak", "planned peak"]


def test_incidents_are_listed_by_kind(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run")
    told = [
        Incident(kind="quarantined", text="cluster-0/2-jetson-nano: sent NaN", cluster="cluster-0"),
        Incident(kind="lost", text="no reply before the round's timeout", cluster="cluster-1"),
        Incident(kind="retry", text="all 2 clusters failed"),
    ]
    run.end_round(incidents=tuple(told), lost=("cluster-1",))
    run.end_round(lost=("cluster-0",))
    run.save("failed", "no power")
    page = run_page(read_run(run.path)).html()
    rows = table(page, "What happened, newest first")[1:]
    assert [row[:3] for row in rows] == [
        ["2", "cluster lost", "cluster-0"],
        ["1", "round repeated", ""],
        ["1", "cluster lost", "cluster-1"],
        ["1", "device quarantined", "cluster-0"],
    ]
    figure = charts(page)["incidents"]["figure"]
    assert trace(figure, "cluster lost")["y"] == [1, 1]
    assert "failed: no power" in page


def test_names_never_become_markup(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run", name=INJECTION)
    run.story = replace(run.story, notes=(INJECTION,))
    told = Incident(kind=INJECTION, text=INJECTION, cluster=INJECTION)
    run.end_round(incidents=(told,), metrics={INJECTION: 0.5, "accuracy": 0.1})
    run.save("failed", f"</script>{INJECTION}")
    run.directory.write_config({INJECTION: f"</td>{INJECTION}"})
    page = write_run_report(run.path, name=f"</title>{INJECTION}").read_text()
    before, _, after = page.partition('id="charts">')
    data, _, rest = after.partition("</script>")
    assert "<" not in data  # not even inside JSON
    ours = before + rest[rest.rindex("<script>") :]
    assert "<img" not in ours and "&lt;img" in ours

    def texts(value: Any) -> list[str]:
        if isinstance(value, Mapping):
            inner = {k: v for k, v in value.items() if k != "choices"}.values()
            return [t for v in (*inner, *value.get("choices", {}).values()) for t in texts(v)]
        if isinstance(value, list):
            return [t for v in value for t in texts(v)]
        return [value] if isinstance(value, str) else []

    # plotly.js reads tags in the texts that it draws; a label in two lines is all that we use
    tags = {t for text in texts(charts(page)) for t in re.findall(r"<[^>]*>", text)}
    assert tags <= {"<br>", "<extra>", "</extra>"}


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    run = made_up(tmp_path, rounds=3)
    with (run.path / "events.jsonl").open("ab") as file:
        file.write(b'{"round_index": 4, "wall_s"')
    assert read_run(run.path).rounds == [1, 2, 3]
    assert "3 rounds" in write_run_report(run.path).read_text()


def test_a_run_without_rounds_has_a_report(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run")
    run.save("stopped", "stopped by a signal")
    page = write_run_report(run.path).read_text()
    assert re.findall(r'<section id="(\w+)"', page) == [*SECTIONS, "settings"]
    assert "stopped by a signal" in page and "0 of 50 rounds" in page


@pytest.mark.parametrize("name", sorted(p.name for p in RESULTS.iterdir() if p.is_dir()))
def test_recorded_runs_of_all_ages_have_reports(name: str, tmp_path: Path) -> None:
    summary = read_summary(RESULTS / name)
    if summary is None:
        return  # other results
    path = write_run_report(RESULTS / name, tmp_path / "report.html")
    figure, told = charts(path.read_text())["loss"]["figure"], "training, all clusters"
    losses = [value for value in summary["loss"] if value is not None]
    if not losses:  # private training tells none
        assert told not in {each["name"] for each in figure["data"]}
        return
    assert [y for y in trace(figure, told)["y"] if y is not None] == close(losses)


def test_a_timeline_shows_one_step(tmp_path: Path) -> None:
    run = made_up(tmp_path)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "attic"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "attic/1-pi"}},
    ]
    for step in range(3):
        for work, start in (("forward", 10), ("backward", 20)):
            where = {"pid": 0, "tid": 0, "args": {"step": step, "micro_batch": 0}}
            span = {"ts": 1e6 * step + 1e3 * start, "dur": 5e3, "name": f"{work[0].upper()}0"}
            events.append({"ph": "X", "cat": work, **span, **where})
    run.directory.timeline_path(4).write_text(json.dumps({"traceEvents": events}))
    chart = run_page(read_run(run.path), run.path).charts["timeline"]
    forward, backward = chart["choices"]["attic"]["data"]
    assert (forward["base"], forward["x"], forward["y"]) == ([0], [5], ["1-pi"])
    assert (backward["base"], backward["x"]) == ([10], [5])


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    first, second = made_up(tmp_path / "a"), made_up(tmp_path / "b", rounds=6, seed=1)
    second.directory.write_config({"num-server-rounds": 6, "clusters": 2})
    sources = [f"ours={first.path}", f"theirs={second.path}"]
    page = write_reports(sources, tmp_path / "both.html").read_text()
    figure = charts(page)["compared-test-accuracy"]["figure"]
    for run, name in ((first, "ours"), (second, "theirs")):
        curve = trace(figure, name)
        expected = [event["metrics"]["accuracy"] for event in read_events(run.path)]
        assert curve["y"] == close(expected)
    assert table(page, "Run-config")[1:] == [["num-server-rounds", "50", "6"]]


def test_runs_that_are_identical_are_said_to_be(tmp_path: Path) -> None:
    first, other = made_up(tmp_path / "a"), made_up(tmp_path / "b", rounds=6)
    sources = [f"one={first.path}", f"two={first.path}", f"three={other.path}"]
    page = write_reports(sources, tmp_path / "all.html").read_text()
    assert "two: identical to one in all metrics of all rounds: accuracy, loss." in page
    assert "three: identical" not in page


def test_what_a_run_did_not_measure_is_no_zero(tmp_path: Path) -> None:
    run, bare = made_up(tmp_path / "a"), MadeUpRun(tmp_path / "b" / "run")
    plain = {"plan": None, "clusters": {}, "energy_j": {}, "queues_j": {}, "latency_s": None}
    bare.end_round(**plain)
    bare.story = replace(bare.story, energy_budget_j={})
    bare.save("completed")
    page = write_reports([f"one={run.path}", f"two={bare.path}"], tmp_path / "both.html")
    found = charts(page.read_text())
    for key in ("energy", "worst"):
        (bar,) = found[key]["figure"]["data"]
        assert bar["text"] == ["", "not measured"]
    assert "Not measured: two." in page.read_text()


def test_runs_of_one_name_and_other_folders_are_refused(tmp_path: Path) -> None:
    first, second = made_up(tmp_path / "a"), made_up(tmp_path / "b")
    with pytest.raises(ConfigError, match="two runs are called 'run': name them apart"):
        write_reports([str(first.path), str(second.path)], tmp_path / "both.html")
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it has no summary\.json"):
        write_reports([str(tmp_path)], None)


def test_without_the_extra_a_run_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_up(tmp_path)
    monkeypatch.setattr("collapipe_flwr.core.errors.find_spec", lambda _: None)
    said = write_closing_report(run.path, "runs/one")
    assert "pip install 'collapipe-flwr[report]'" in said
    assert said.endswith("`collapipe report runs/one` makes it")
    assert not (run.path / "report.html").exists()


def test_damage_never_keeps_a_run_from_ending(tmp_path: Path) -> None:
    run = made_up(tmp_path)
    (run.path / "events.jsonl").write_text('{"no": "event of a round"}\n' * 2)
    assert "line 1: no event of a round (round_index is no whole" in write_closing_report(run.path)
    (run.path / "events.jsonl").write_text('{"round_index": 1, "plan": {"clusters": [1]}}\n')
    assert "line 1: no event of a round (TypeError" in write_closing_report(run.path)


def test_a_report_is_made_once_after_the_last_word(tmp_path: Path) -> None:
    run = made_up(tmp_path)
    report = run.path / "report.html"
    assert write_closing_report(run.path) == f"report: {report}"
    made = report.stat().st_mtime_ns
    write_closing_report(run.path)
    assert report.stat().st_mtime_ns == made
    run.save("failed", "no power")
    write_closing_report(run.path)
    assert "no power" in report.read_text()


@pytest.mark.slow
def test_a_large_and_long_run_has_a_page_that_opens(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run", clusters=100, devices=10, rounds_asked=1000)
    run.begin_long(1000)
    path = write_run_report(run.path)
    assert path.stat().st_size < 15e6
    assert len(charts(path.read_text())["placement"]["choices"]) == 100


def test_rows_with_long_names_stay_apart() -> None:
    names = [f"{letter}{'x' * 40}/1-pi" for letter in "ab"]
    figure = plot_by_row([bars("joules", names, [1.0, 2.0])], "J")
    axis = figure["layout"]["yaxis"]
    assert axis["tickvals"] == figure["data"][0]["y"] == names
    assert all(text.startswith("…") and len(text) <= 30 for text in axis["ticktext"])


def test_legends_show_short_names_as_they_are(tmp_path: Path) -> None:
    name = "a&b-" + "x" * 60
    page = run_page(read_run(made_up(tmp_path, rounds=2, name=name).path))
    legends = [t["name"] for key in ("loss", "queues") for t in page.charts[key]["figure"]["data"]]
    assert all(len(text) <= 45 for text in legends)
    assert "&amp;amp;" not in json.dumps(page.charts)
