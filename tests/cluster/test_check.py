"""`collapipe cluster check`: true figures of who answers, a sentence for who does not."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.cluster import check
from collapipe_flwr.cluster.check import (
    CheckSettings,
    check_cluster,
    choose_ways,
    fit_speed,
    list_ways,
)
from collapipe_flwr.cluster.profile import (
    Measured,
    MeasuredLink,
    Measurements,
    profile_cluster,
    read_measurements,
)
from collapipe_flwr.config.cluster_file import parse_cluster, read_cluster
from collapipe_flwr.core.errors import ConfigError, LinkTimeout, Unreachable
from collapipe_flwr.core.json_codec import to_json
from collapipe_flwr.core.memory import read_available_bytes
from collapipe_flwr.core.version import read_own_version
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.pipeline.benchmark import (
    BenchmarkAnswer,
    BenchmarkRequest,
    count_block_flop,
    run_benchmark,
)
from collapipe_flwr.pipeline.compute import describe_torch
from collapipe_flwr.transport.certificates import sign_all
from collapipe_flwr.transport.client import HostClient
from collapipe_flwr.transport.methods import ProbeAnswer
from collapipe_flwr.transport.relay import DialRelay
from tests.cluster.daemon_processes import Daemon, running
from tests.host.chain_to_edge import request, service


def _cluster(folder: Path, *devices: str, more: str = "") -> Path:
    tables = [f'[[device]]\nname = "pi-{i}"\naddress = "{a}"' for i, a in enumerate(devices, 1)]
    path = folder / "c.toml"
    path.write_text("\n".join(['id = "g"', more, *tables]))
    return path


def _words(path: Path, *options: str) -> list[str]:
    quick = ["--seconds", "0.2", "--width", "64", "--deadline-s", "30"]
    return ["cluster", "check", str(path), *quick, *options]


def _check(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, _words(path, *options), catch_exceptions=False)


def _free_address() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_members_are_measured_and_the_missing_one_is_named(tmp_path: Path) -> None:
    with running(Daemon("device", "--name", "pi-1", cold=True)) as (daemon,):
        silent = _free_address()
        path = _cluster(tmp_path, daemon.address, silent, more='measured = "found.json"')
        done = _check(path, "--json", str(tmp_path / "found.json"))
    assert done.exit_code == 1, done.stderr
    assert done.stderr.startswith("measuring cluster g\n")  # before libraries are loaded
    assert f"mend pi-2: no answer at {silent}" in " ".join(done.stdout.split())
    members = json.loads((tmp_path / "found.json").read_text())["members"]
    unit, first, second = members
    assert [m["name"] for m in members] == ["control-unit", "pi-1", "pi-2"]
    assert first["speed_flop_per_s"] > 1e7 and unit["speed_flop_per_s"] > 1e7
    assert 0 < first["memory_bytes"] <= 2 * read_available_bytes()
    assert first["rate_bit_per_s"] > 1e6 and 0 < first["delay_s"] < 1
    assert 10e6 < first["idle_bytes"] < 64 * 2**20
    assert second["speed_flop_per_s"] is None and "no answer" in second["fault"]
    profile = profile_cluster(read_cluster(path), examples=7)
    assert profile.devices[0].speed_flop_per_s == first["speed_flop_per_s"]
    assert profile.devices[0].overhead_s == first["overhead_s"] >= 0
    assert profile.devices[0].memory_bytes == first["memory_bytes"]
    assert profile.devices[1].speed_flop_per_s == 12e9  # nothing measured: that of its kind
    assert profile.devices[1].device_id == "g/pi-2"


def test_a_member_of_another_version_is_named_and_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Daemon("device", "--name", "pi-1", cold=True)) as (daemon,):
        theirs = read_own_version()
        monkeypatch.setattr("collapipe_flwr.__version__", "0.0.9")
        config = read_cluster(_cluster(tmp_path, daemon.address))
        block = BenchmarkRequest(width=32, tokens=4, examples=2, seconds=0.1)
        found = check_cluster(config, CheckSettings(block=block), lambda _: None).find("pi-1")
    assert f"version {theirs} of CollaPipe, and this machine version 0.0.9" in found.fault
    assert found.speed_flop_per_s is None


def test_a_members_sensor_of_energy_and_its_torch_are_found_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensor = tmp_path / "vcgencmd"
    sensor.write_text("#!/bin/sh\necho VDD_A 'current(0)=3.5A'\necho VDD_V 'volt(1)=2.0V'\n")
    sensor.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    plain = Daemon("device", "--name", "pi-2", "--energy-sensor", "none", "--compute", "cpu")
    with running(Daemon("device", "--name", "pi-1"), plain) as (first, second):
        path = _cluster(tmp_path, first.address, second.address)
        done = _check(path, "--json", str(tmp_path / "found.json"))
    assert done.exit_code == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "energy: pi-1 7.0 W (pi5-pmic); modelled for control-unit, pi-2" in told
    _, one, other = json.loads((tmp_path / "found.json").read_text())["members"]
    assert (one["energy_sensor"], one["power_w"]) == ("pi5-pmic", 7.0)
    assert (other["energy_sensor"], other["power_w"]) == ("", None)
    assert (other["computes"], other["torch"]) == ("cpu", describe_torch())
    assert f"pi-2 on cpu, torch {describe_torch()}" in told


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Path]:
    """The file of a cluster of pi-1 and pi-2 with an edge, which are there."""
    with ExitStack() as stack:
        first, second, edge = (
            stack.enter_context(HostServer("127.0.0.1:0", service())).address for _ in range(3)
        )
        more = f'measured = "found.json"\nedge.address = "{edge}"'
        yield _cluster(tmp_path, first, second, more=more)


def begin_to_train(path: Path) -> None:
    """A session on the first device."""
    with HostClient(read_cluster(path).devices[0].address) as client:
        client.open_session(request())


def measuring(name: str) -> Callable[..., object]:
    def measured(*_: object, **__: object) -> object:
        raise AssertionError(f"{name} disturbs who trains")

    return measured


def test_a_cluster_that_trains_is_busy_and_neither_broken_nor_disturbed(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("control-unit", "pi-1", "pi-2", "edge")
    known = [Measured(name=name, speed_flop_per_s=7e9, rate_bit_per_s=3e6) for name in names]
    link = MeasuredLink(source="pi-1", target="edge", rate_bit_per_s=5e6)
    figures = pair.with_name("found.json")
    before = Measurements(cluster_id="g", members=tuple(known), links=(link,))
    figures.write_text(to_json(before))
    begin_to_train(pair)
    for name in ("benchmark", "probe", "measure_way"):
        monkeypatch.setattr(HostClient, name, measuring(name))
    monkeypatch.setattr(check, "run_benchmark", measuring("the benchmark here"))
    done = _check(pair, "--json", str(figures))
    said = " ".join(done.stdout.split())
    assert done.exit_code == 0 and "mend" not in said, said
    assert f"at work, not measured: {', '.join(names)}" in said
    after = read_measurements(figures)  # plans go on with what was known
    assert after.links == before.links and after.busy == names
    assert [m.speed_flop_per_s for m in after.members] == [7e9] * 4
    assert after.find("pi-2").rate_bit_per_s == 3e6 and after.find("pi-2").clock_ahead_s is not None


def test_who_begins_to_train_during_the_check_is_busy(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = HostClient.measure_way

    def begin(client: HostClient, payload_bytes: int) -> ProbeAnswer:
        if client.peer.startswith("pi-1"):
            begin_to_train(pair)
        return measure(client, payload_bytes)

    monkeypatch.setattr(HostClient, "measure_way", begin)
    block = BenchmarkRequest(width=32, tokens=4, examples=2, seconds=0.05)
    found = check_cluster(read_cluster(pair), CheckSettings(block=block), lambda _: None)
    assert found.busy == ("pi-1",) and not found.find("pi-1").fault
    assert found.find("pi-2").speed_flop_per_s is not None


@pytest.mark.parametrize(
    ("host", "busy"), [("127.0.0.1", ("control-unit", "edge")), ("localhost", ("edge",))]
)
def test_an_edge_that_trains_another_cluster_is_busy_with_its_machine_alone(
    pair: Path, host: str, busy: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_cluster(pair)
    edge = replace(config.edge, address=config.edge.address.replace("127.0.0.1", host))
    status = HostClient.ask_status
    monkeypatch.setattr(
        HostClient, "ask_status", lambda c: replace(status(c), at_work=c.peer.startswith("edge"))
    )
    block = BenchmarkRequest(width=32, tokens=4, examples=2, seconds=0.05)
    found = check_cluster(replace(config, edge=edge), CheckSettings(block=block), lambda _: None)
    assert found.busy == busy
    assert all((m.speed_flop_per_s is None) == m.busy for m in found.members)
    assert {link.target for link in found.links} == {"pi-1", "pi-2"}


def test_members_that_do_not_answer_are_waited_for_together(tmp_path: Path, monkeypatch) -> None:
    addresses = [_free_address() for _ in range(3)]
    together = threading.Barrier(len(addresses), timeout=20)

    class Silent(HostClient):
        def echo(self) -> None:
            together.wait()
            raise LinkTimeout("no answer")

    monkeypatch.setattr(check, "HostClient", Silent)
    done: list[str] = []
    block = BenchmarkRequest(width=32, tokens=4, examples=2, seconds=0.1)
    config = read_cluster(_cluster(tmp_path, *addresses))
    found = check_cluster(config, CheckSettings(block=block), done.append)
    assert done[:4] == ["control-unit", "pi-1", "pi-2", "pi-3"]
    assert [m.name for m in found.members] == done[:4]
    for member, address in zip(found.members[1:], addresses, strict=True):
        assert f"no answer at {address}" in member.fault


def test_of_a_device_that_dials_it_is_said_who_passes_on_its_calls(tmp_path: Path) -> None:
    unit, devices = {"address": "127.0.0.1:1"}, [{"name": "phone", "dials": True}]
    values = {"id": "A", "control-unit": unit, "relay": "127.0.0.1:1", "device": devices}
    config = parse_cluster({**values, "tls": {}}, tmp_path)
    sign_all(tmp_path / "certs", {"control-unit": ()})
    with DialRelay("127.0.0.1:0", lambda: [config]) as relay:
        phone = replace(config.devices[0], address=relay.address)
        assert "has not dialled in" in check._advise(config, phone, Unreachable("gone"))
    said = check._advise(config, phone, Unreachable("gone"))
    assert f"no answer at {relay.address}, where its control unit relays" in said


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """Two devices and an edge with TLS, and the file of their cluster."""
    folder = tmp_path_factory.mktemp("secured")
    members = sign_all(
        folder / "certs", dict.fromkeys(("pi-1", "pi-2", "edge", "control-unit"), ())
    )
    file = _cluster(folder, "127.0.0.1:1", "127.0.0.1:2")
    file.write_text(file.read_text() + "\n[tls]\n")
    names = ("pi-1", "pi-2", "edge")
    daemons = [
        Daemon(
            "edge" if name == "edge" else "device",
            *("--name", name, "--cluster", str(file)),
            tls=members[name],
        )
        for name in names
    ]
    with running(*daemons) as hosts:
        addresses = [host.address for host in hosts]
        file = _cluster(folder, *addresses[:2], more="")
        file.write_text(file.read_text() + f'\n[edge]\naddress = "{addresses[2]}"\n[tls]\n')
        yield file


def test_a_whole_cluster_with_tls_ends_with_0_and_knows_every_link(secured: Path) -> None:
    found = secured.parent / "found.json"
    done = _check(secured, "--json", str(found))
    assert done.exit_code == 0, done.stdout + done.stderr
    values = json.loads(found.read_text())
    found_ways = {(link["source"], link["target"]) for link in values["links"]}
    assert found_ways == {("pi-1", "pi-2"), ("pi-2", "pi-1"), ("pi-1", "edge"), ("pi-2", "edge")}
    assert all(link["rate_bit_per_s"] > 1e6 and not link["fault"] for link in values["links"])
    assert all(abs(m["clock_ahead_s"]) < 5 for m in values["members"][1:])
    assert read_measurements(found).find("pi-1").speed_flop_per_s > 1e7


def _mends(path: Path) -> str:
    done = _check(path)
    assert done.exit_code == 1, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_certificates_that_do_not_fit_are_told_apart(secured: Path, tmp_path: Path) -> None:
    text = secured.read_text()
    certs = secured.parent / "certs"
    renamed = tmp_path / "renamed.toml"
    renamed.write_text(
        text.replace('"pi-2"', '"pi-3"') + f'ca = "{certs}/ca.pem"\n'
        f'certificate = "{certs}/{{name}}.pem"\nkey = "{certs}/{{name}}.key"\n'
    )
    assert "mend pi-3: its certificate names pi-2, not pi-3: give it pi-3.pem" in _mends(renamed)
    sign_all(tmp_path / "certs", dict.fromkeys(("pi-1", "pi-2", "edge", "control-unit"), ()))
    other = tmp_path / "other.toml"
    other.write_text(text)
    assert "mend pi-1: its certificate was signed by another CA" in _mends(other)
    plain = tmp_path / "plain.toml"
    plain.write_text(text.replace("[tls]", ""))
    assert "mend pi-1: it speaks TLS and the cluster file has no [tls]" in _mends(plain)


def test_a_clock_and_a_memory_to_mend_are_said_so(secured: Path) -> None:
    config = read_cluster(secured)
    block = BenchmarkRequest(width=32, tokens=4, examples=2, seconds=0.1)
    late = CheckSettings(block=block, clock=lambda: time.time() - 3600)
    found = check_cluster(config, late, lambda _: None)
    fault = found.find("pi-1").fault
    assert fault.startswith("its clock is 3600 s ahead of the one here: set both")
    small = replace(config.devices[0], memory_mb=1e9)
    found = check_cluster(
        replace(config, devices=(small,)), CheckSettings(block=block), lambda _: None
    )
    assert "the file lets training use 1e+09 MB" in found.find("pi-1").fault


def test_links_are_measured_although_members_get_longer_than_a_probe_may_take(
    secured: Path,
) -> None:
    block = BenchmarkRequest(width=32, tokens=4, examples=2, seconds=0.1)
    settings = CheckSettings(block=block, deadline_s=120.0, most_links=1)
    found = check_cluster(read_cluster(secured), settings, lambda _: None)
    assert [(link.source, link.target, link.fault) for link in found.links] == [
        ("pi-1", "edge", "")
    ]


def test_a_large_cluster_is_measured_round_by_round_and_the_rest_is_said(
    secured: Path, tmp_path: Path
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in range(1, 13)]
    large = read_cluster(_cluster(tmp_path, *addresses, more='edge.address = "127.0.0.1:20"'))
    everything = list_ways(large)
    assert len(everything) == len(set(everything)) == 12 + 12 * 11
    few = choose_ways(large, CheckSettings(most_links=24))
    assert len(few) == 24 and few == everything[:24]
    assert {source for source, _ in few} == set(large.devices)
    assert {target for _, target in few} == {*large.devices, large.edge}
    assert choose_ways(large, CheckSettings(most_links=0)) == everything
    done = _check(secured, "--most-links", "3")
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "1 more links between devices were not measured" in done.stdout


def test_declared_figures_win_over_those_of_the_kind(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        'id = "g"\n[links]\nbandwidth-mhz = 10\n[[device]]\nname = "a"\naddress = "h:1"\n'
        "speed-gflop-per-s = 2.5\nmemory-mb = 100\nenergy-per-gflop-j = 0.5\ntx-power-w = 0.2\n"
    )
    profile = profile_cluster(read_cluster(path), examples=7)
    device = profile.devices[0]
    assert (device.speed_flop_per_s, device.memory_bytes) == (2.5e9, 100_000_000)
    assert device.energy_per_flop_j == pytest.approx(0.5e-9)
    assert device.tx_power_max_w == 0.2
    assert profile.d2d_bandwidth_hz == 10e6


def test_measured_links_reach_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    devices = "".join(f'[[device]]\nname = "{n}"\naddress = "h:{n[-1]}"\n' for n in ("d1", "d2"))
    path.write_text(f'id = "g"\nmeasured = "found.json"\n{devices}')
    ways = (("d1", "d2", 2e6), ("d2", "d1", 6e6), ("d1", "edge", 5e6), ("d2", "edge", None))
    found = Measurements(
        cluster_id="g",
        members=(
            Measured(name="control-unit"),
            Measured(name="d1", rate_bit_per_s=9e6),
            Measured(name="gone", rate_bit_per_s=9e6),
        ),
        links=tuple(MeasuredLink(source=a, target=b, rate_bit_per_s=rate) for a, b, rate in ways),
    )
    (tmp_path / "found.json").write_text(to_json(found))
    rates = profile_cluster(read_cluster(path), examples=7).link_rates
    assert {link.ends: link.bit_per_s for link in rates} == {
        ("", "g/d1"): 5e6,
        ("g/control-unit", "g/d1"): 9e6,
        ("g/d1", "g/d2"): pytest.approx(3e6),
    }


def test_an_unknown_kind_is_blamed_on_its_member(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('id = "g"\n[[device]]\nname = "a"\naddress = "h:1"\nkind = "toaster"\n')
    with pytest.raises(ConfigError, match="kind of a in cluster g: unknown device kind 'toaster'"):
        profile_cluster(read_cluster(path), examples=7)


def test_the_benchmark_counts_its_matrix_products_and_takes_the_mean() -> None:
    ticks = iter([0, 1, 2, 3, 4, 5, 6, 7, 14, 15])  # the warm-up, its end, three passes, the end
    request = BenchmarkRequest(width=32, tokens=4, examples=2, seconds=4.0)
    found = run_benchmark(request, clock=lambda: float(next(ticks)))
    assert found.seconds == (1 + 1 + 7) / 3
    assert found.speed_flop_per_s == found.flop / 3 == count_block_flop(request) / 3
    projections, scores = 12 * 32 * 32 * 4, 2 * 4 * 4 * 32
    assert found.flop == 3 * 2 * 2 * (projections + scores)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"width": 8192}, {"seconds": 31.0}, {"width": 33}])
def test_a_benchmark_beyond_its_bounds_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        BenchmarkRequest(**wrong)  # type: ignore[arg-type]


def test_speed_and_overhead_are_told_apart_by_two_sizes() -> None:
    def answer(examples: int, seconds: float) -> BenchmarkAnswer:
        return BenchmarkAnswer(flop=2e9 * examples, seconds=seconds, memory_bytes=1)

    speed, overhead_s = fit_speed(answer(8, 1.6 + 0.3), answer(1, 0.2 + 0.3))
    assert (speed, overhead_s) == (pytest.approx(1e10), pytest.approx(0.3))
    slower_alone = fit_speed(answer(8, 1.6), answer(1, 1.7))  # noise: nothing can be told apart
    assert slower_alone == (pytest.approx(1e10), 0.0)
