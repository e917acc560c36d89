"""Where a process computes: what names stand for, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.memory import read_available_bytes, read_group_limits
from collapipe_flwr.host import daemon
from collapipe_flwr.host.daemon import HostSettings, serve
from collapipe_flwr.pipeline import compute
from collapipe_flwr.pipeline.benchmark import BenchmarkRequest
from collapipe_flwr.pipeline.benchmark import run_benchmark as benchmark
from collapipe_flwr.pipeline.compute import CPU, hold, measure_free_bytes, resolve
from tests.accelerators import NO_PRETENCE, accelerator  # noqa: F401
from tests.pretend import NAME, pretend_device

GPU = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    resolve.cache_clear()


def with_gpus(monkeypatch: pytest.MonkeyPatch, fault: str = "") -> None:
    """Two CUDA devices, on which a product raises ``fault`` if there is one."""
    there = (CPU, torch.device("cuda", 0), GPU)
    resolve.cache_clear()
    monkeypatch.setattr(compute, "list_devices", lambda: there)
    monkeypatch.setattr(compute, "_find_fault", lambda _, **__: fault)
    monkeypatch.setattr(compute, "_switch_off_tf32", lambda device: device)


def test_names_stand_for_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    names = {"cpu": CPU, "auto": torch.device("cuda", 0), "cuda": torch.device("cuda", 0)}
    assert {name: resolve(name) for name in names} == names
    assert resolve("cuda:1") == GPU


def test_what_is_not_there_is_one_sentence_that_names_what_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch)
    with pytest.raises(ConfigError, match=r"^--compute is 'cuda:2'.* only cpu, cuda:0, cuda:1 "):
        resolve("cuda:2", "--compute")
    with pytest.raises(ConfigError, match=r"'mps'.*choose one of these, or auto$"):
        resolve("mps")


def test_a_device_that_cannot_compute_is_left_alone_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch, fault="no kernel image is available")
    assert resolve("auto") == CPU
    with pytest.raises(ConfigError, match=r"no kernel image.*install a torch"):
        resolve("cuda")


def test_auto_never_takes_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "list_devices", lambda: (CPU, torch.device("mps", 0)))
    resolve.cache_clear()
    assert resolve("auto") == CPU


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:1", "", "cuda:-1"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(ConfigError, match="must be auto, cpu, cuda"):
        resolve(name)
    with pytest.raises(ConfigError, match="--compute must be auto"):
        HostSettings(listen="127.0.0.1:0", name="d", compute=name)


def test_a_host_refuses_what_is_not_there_before_it_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for of_the_process in ("configure_malloc", "hide_unused_libraries"):
        monkeypatch.setattr(daemon, of_the_process, lambda: None)
    settings = HostSettings(listen="127.0.0.1:0", name="d", compute="cuda:99")
    with pytest.raises(ConfigError, match=r"^--compute is 'cuda:99', but torch"):
        serve(settings, passes_on=True, announce=pytest.fail)


@pytest.mark.skipif(bool(NO_PRETENCE), reason=NO_PRETENCE)
def test_the_pretended_accelerator_mixes_no_places() -> None:
    """Else the laws would hold on it whatever stays behind."""
    there, here = torch.ones(2, 2).to(pretend_device()), torch.ones(2, 2)
    assert there.device.type == NAME
    for mixed in (
        lambda: there + here,
        lambda: there @ here,
        lambda: torch.cat([there, here]),
        lambda: torch.where(there > 0, here, there),
        lambda: there[here.long()],
        lambda: torch.nn.functional.linear(here, there),
        lambda: here.add_(there),
    ):
        with pytest.raises(RuntimeError):
            mixed()
    with pytest.raises((RuntimeError, TypeError)):
        there.numpy()
    assert torch.equal((there + 1).cpu(), here + 1)


def test_the_benchmark_runs_there(accelerator: torch.device) -> None:  # noqa: F811
    small = BenchmarkRequest(width=32, tokens=4, examples=1, seconds=0.01)
    found = benchmark(small, accelerator)
    assert str(accelerator) in found.computes
    assert torch.__version__.startswith(found.torch.partition(" ")[0])
    assert found.memory_bytes == pytest.approx(measure_free_bytes(accelerator), rel=0.2)
    assert benchmark(small).computes == "cpu"


def test_on_a_cpu_nothing_is_copied() -> None:
    part = torch.nn.Linear(2, 2)
    tensors = {"weight": part.weight}
    assert hold(part, CPU).weight is tensors["weight"]
    assert compute.bring(tensors, CPU) is tensors and compute.bring_home(tensors) is tensors
    assert measure_free_bytes(CPU) == pytest.approx(read_available_bytes(), rel=0.2)


def test_a_service_has_what_its_groups_leave(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("1:memory:/old\n0::/system.slice/a.service\n")
    service = tmp_path / "system.slice" / "a.service"
    service.mkdir(parents=True)
    for folder, most, used in ((service, "1000", 700), (service.parent, "max", 900)):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 600\ninactive_file 50\n")
    assert list(read_group_limits(tmp_path, tmp_path / "own")) == [350]
    assert list(read_group_limits(tmp_path, tmp_path / "nowhere")) == []


@pytest.mark.parametrize("name", ["/jobs/a", "/seen/from/outside"])
def test_limits_of_groups_of_version_1_count_too(tmp_path: Path, name: str) -> None:
    own = tmp_path / "own"
    own.write_text(f"9:name=systemd:/\n4:cpu,memory:{name}\n3:cpuset:/jobs\n0::/\n")
    group = tmp_path / "memory" / "jobs" / "a"
    group.mkdir(parents=True)
    for folder, most, used in ((group, 1000, 700), (tmp_path / "memory", 3000, 900)):
        (folder / "memory.limit_in_bytes").write_text(f"{most}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("inactive_file 10\ntotal_inactive_file 50\n")
    left = [350, 2150] if name == "/jobs/a" else [2150]
    assert list(read_group_limits(tmp_path, own)) == left
