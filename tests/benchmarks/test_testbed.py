"""The bench that runs policies on real daemons: slow processes, fair tables, and a run of it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import child_environment
from benchmarks.data_plane.crew import BenchError
from benchmarks.results_testbed import least_within, quickest_cut
from benchmarks.testbed import brake
from benchmarks.testbed.bed import Told
from benchmarks.testbed.boards import boards, cluster_toml, read_clusters, slowness
from benchmarks.testbed.brake import SHARE_FILE, _duty_cycle, pay_for_passes, slowed
from benchmarks.testbed.results import censored, spread
from benchmarks.testbed.runs import read_run
from benchmarks.testbed.training import Training, read_policies, turns
from collapipe_flwr.config.cluster_file import read_cluster
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.pipeline.meter import Recorder

ROOT = Path(__file__).parents[2]
SPIN = "print('up', flush=True)\nwhile True: pass"
SMALL = "raspberry-pi-5,jetson-nano;phone,jetson-nano"


@contextmanager
def spinning() -> Iterator[int]:
    command = [sys.executable, "-c", SPIN]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def used_s(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)


@pytest.mark.parametrize("brake", [slowed, _duty_cycle])
def test_a_slowed_process_gets_its_share_and_no_more(brake) -> None:
    shares = {0.1: 0.0, 0.3: 0.0}
    with spinning() as slow, spinning() as fast:
        pids = dict(zip(shares, (slow, fast), strict=True))
        by_pid: Mapping[int, float] = {pid: share for share, pid in pids.items()}
        braked: AbstractContextManager[object] = brake(by_pid)
        with braked:
            start_s, before = time.monotonic(), {s: used_s(pid) for s, pid in pids.items()}
            time.sleep(1.5)
            seconds = time.monotonic() - start_s
            shares = {s: (used_s(pid) - before[s]) / seconds for s, pid in pids.items()}
        for share, seen in shares.items():
            assert 0.0 < seen < 1.5 * share
        before_s = used_s(slow)
        while used_s(slow) - before_s < 0.05:  # it runs again; else the test's clock ends it
            time.sleep(0.01)


def test_a_pass_takes_what_the_share_makes_it_once_that_holds(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SHARE_FILE, str(tmp_path / "share"))
    monkeypatch.setattr(Recorder, "record", Recorder.record)  # put back after the test
    slept: list[str] = []
    clocks = {"perf_counter": time.perf_counter, "thread_time": time.thread_time}

    def sleep(seconds: float) -> None:
        slept.append(work)
        time.sleep(seconds)

    monkeypatch.setattr(brake, "time", SimpleNamespace(**clocks, sleep=sleep))
    pay_for_passes()
    recorder = Recorder()
    for work in ("fast", "slow"):
        with recorder.record(work, 0):
            before_s = time.thread_time()
            while time.thread_time() - before_s < 0.01:
                pass
        (tmp_path / "share").write_text("0.1")
    assert slept == ["slow"]
    assert recorder.sum_seconds("slow") > 9.9 * 0.01
    assert recorder.count("slow") == recorder.count("fast") == 1


def test_boards_take_a_part_of_the_host_that_can_be_asked_for() -> None:
    clusters = read_clusters(SMALL)
    slow = slowness(clusters, 40e9, 2, 0.0)
    assert sum(slow.share(b) for b in boards(clusters)) == pytest.approx(1.8)
    assert max(slow.share(b) for b in boards(clusters)) <= 0.9
    with pytest.raises(ConfigError, match="--slow-down 1: these boards need more"):
        slowness(clusters, 40e9, 2, 1.0)


def test_all_figures_of_a_board_are_slowed_down_by_one_factor(tmp_path: Path) -> None:
    cluster = read_clusters(SMALL)[0]
    slow = slowness([cluster], 40e9, 2, 8.0)
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_toml(cluster, slow, ["10.0.0.1:1", "10.0.0.2:1"], "10.0.0.3:1", ""))
    found = read_cluster(file)
    for member, board in zip(found.devices, cluster.devices, strict=True):
        assert member.tx_power_w == board.preset.tx_power_max_w / 8
        assert member.energy_per_gflop_j == pytest.approx(1e9 * board.preset.energy_per_flop_j)
        assert slow.share(board) * 40e9 == pytest.approx(board.preset.speed_flop_per_s / 8)
    assert found.links.server_mbit_per_s == pytest.approx(900 / 8)


def test_every_policy_runs_once_with_every_seed_and_none_is_always_first() -> None:
    training = Training(policies=("dssda", "fedavg", "uniform"), repetitions=3, seed=4)
    found = list(turns(training))
    assert sorted(found) == sorted((p, s) for p in training.policies for s in (4, 5, 6))
    assert {found[0][0], found[3][0], found[6][0]} == set(training.policies)


def test_policies_differ_in_nothing_but_their_name_and_options(tmp_path: Path) -> None:
    training = Training()
    names = ("dssda", "uniform", "dssda links.codec=int8 cache.max-gb=1")
    ours, theirs, more = (training.run_config(p, 3, tmp_path / "run") for p in names)
    assert {k for k in ours if ours[k] != theirs[k]} == {"scheduler.policy"}
    found = {k: more[k] for k in ours if ours[k] != more[k]}
    assert found == {"links.codec": "int8", "cache.max-gb": 1}


def test_an_unknown_policy_and_a_wrong_option_are_refused() -> None:
    with pytest.raises(ConfigError, match="--policies: unknown policy 'best', choose some of"):
        read_policies("dssda,best")
    with pytest.raises(ConfigError, match="must be one of fp32, fp16"):
        read_policies("dssda,dssda links.codec=int9")


def test_a_run_that_never_arrives_counts_as_later_than_all_others() -> None:
    assert censored([1.0, 3.0, 2.0]) == spread([1.0, 2.0, 3.0])
    assert censored([4.0, None, 2.0]) == {"median": 4.0, "q1": 3.0, "q3": None}
    assert censored([None, None]) == {"median": None, "q1": None, "q3": None}


def test_the_document_is_what_its_own_command_writes() -> None:
    page = (ROOT / "docs/results-testbed.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if line.startswith("python "))
    _, *words = command.removesuffix(" > docs/results-testbed.md").split()
    recorded = {str(path.relative_to(ROOT)) for path in (ROOT / "docs/results").glob("testbed*")}
    assert set(words[1:]) == recorded
    written = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    assert page == written.stdout


def test_the_page_on_slow_links_quotes_the_recorded_rounds() -> None:
    page = " ".join((ROOT / "docs/slow-links.md").read_text(encoding="utf-8").split())
    result = json.loads((ROOT / "docs/results/testbed-wifi.json").read_text(encoding="utf-8"))
    ours, coarse, alone = (p["round_s"]["median"] for p in result["policies"].values())
    assert f"took {ours:.0f} s, {coarse:.0f} s with `int4`, and {alone:.0f} s where" in page


def event(**more: object) -> dict[str, object]:
    """Of a round of 4 steps of 3 micro-batches, in which a and b share the blocks."""
    segment = {"device_id": "c/a", "first_block": 0, "stop_block": 6, "replicas": ["c/b"]}
    plan = {"cluster_id": "c", "micro_batches": 3, "local_steps": 4, "segments": [segment]}
    stages = {name: {"measured_s": 0.5} for name in ("c/a", "c/b")}
    return {
        "wall_s": 9.0,
        "evaluation_s": 1.0,
        "predicted_wall_s": 7.0,
        "plan": {"clusters": [plan]},
        "clusters": {"c": {"predicted_s": 7.0, "latency_s": 6.0, "stages": stages}},
        "energy_j": {"c/a": 3.0, "c/b": 1.0},
        "metrics": {"accuracy": 0.25},
        "failures": [],
        **more,
    }


def written(folder: Path, *events: dict[str, object]) -> Path:
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    budget_j = {"c/a": 4.0, "c/b": 1.0, "c/idle": 1.0}
    (folder / "summary.json").write_text(json.dumps({"energy": {"budget_j": budget_j}}))
    (folder / "run-config.json").write_text(json.dumps({"world.energy-share": 0.5}))
    return folder


def test_a_round_is_read_without_its_evaluation_and_replicas_take_turns(tmp_path: Path) -> None:
    told = Told(useful_flop=1.0, memory={})
    late = event(wall_s=5.0, metrics={"accuracy": 0.9})
    run = read_run("dssda", 1, written(tmp_path, event(), late), told, 0.5)
    assert [done.round_s for done in run.rounds] == [8.0, 4.0]
    assert run.rounds[0].busy_s == {"c/a": 4 * 2 * 0.5, "c/b": 4 * 1 * 0.5}
    assert run.energy_over_budget == 1.0
    assert run.alone_over_model == 0.5 * (3 / 4 + 1) / 2
    assert (run.time_to(0.9), run.time_to(0.95)) == (12.0, None)


def test_a_run_in_which_somebody_failed_is_no_measurement(tmp_path: Path) -> None:
    path = written(tmp_path, event(failures=["c: gone"]))
    with pytest.raises(BenchError, match="dssda with seed 1: c: gone"):
        read_run("dssda", 1, path, Told(useful_flop=1.0, memory={}), 0.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_policies_are_measured_on_real_daemons(tmp_path: Path) -> None:
    if not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter"))):
        pytest.skip("iproute2 or util-linux is missing")
    path = tmp_path / "testbed.json"
    options = ["--devices", SMALL, "--policies", "dssda,uniform", "--rounds", "4"]
    options += ["--repetitions", "1", "--examples", "64", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "testbed", *options],
        capture_output=True,
        text=True,
        env=child_environment(),
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert set(result["policies"]) == {"dssda", "uniform"}
    for policy in result["policies"].values():
        assert {"median", "q1", "q3", "mean"} <= set(policy["round_s"])
        assert {"median", "q1", "q3"} <= set(policy["time_to_target_s"])
        assert policy["peak_rss_bytes"] > policy["peak_rss_over_idle_bytes"] > 0
        assert policy["energy_over_budget_max"] > 0
        assert policy["prediction_error"] >= 0
        assert 0 < policy["capacity_used"] < 1
    settings = result["settings"]
    assert [len(cluster["boards"]) for cluster in settings["clusters"]] == [3, 3]
    assert settings["slow_down"] >= 1 and settings["shaping"]["brake"]
    for run in result["runs"]:
        assert len(run["rounds"]) == 4
        slowest = [max(s for _, s in done["clusters"]) for done in run["rounds"]]
        walls = [done["round_s"] for done in run["rounds"]]
        assert all(wall > 0.5 * cluster for wall, cluster in zip(walls, slowest, strict=True))


def test_whole_blocks_are_shared_out_so_that_the_slowest_stage_is_quickest() -> None:
    assert quickest_cut([6.0], 6) == 1.0  # six blocks on one device
    assert quickest_cut([3.0, 3.0], 6) == 1.0
    assert quickest_cut([4.0, 1.0], 6) == 1.25  # five blocks and one
    assert quickest_cut([9.0, 1.0], 6) == 6 / 9  # the other device would only hold up


def test_budgets_bound_the_seconds_of_a_pipeline() -> None:
    assert least_within([3.0, 1.0], 4.0, 4.0) == 1.0  # no budget binds
    assert least_within([3.0, 1.0], 4.0, 2.0) == 2.0  # half of it each
    assert least_within([8.0, 2.0, 1.0], 4.0, 2.5) == 0.5  # 2.5 on the first, the rest by speed
    assert least_within([3.0, 1.0], 4.0, 1.9) == math.inf
