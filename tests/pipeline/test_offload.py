"""What waits in a file comes back bit for bit, and takes no memory meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.pipeline.offload import (
    OFFLOAD_BYTES,
    LazyMapping,
    Offload,
    find_scratch_folder,
    offload,
    read_tensors,
    write_tensors,
)

LARGE = OFFLOAD_BYTES // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(LARGE,), (4, LARGE), (3,), (), (0, 2)])
def test_every_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 9).to(dtype)
    found = offload({"a": tensor, "b": tensor})
    for key in found:
        assert found[key].dtype == dtype and found[key].shape == tensor.shape
        assert torch.equal(found[key], tensor)


def test_a_part_of_a_tensor_and_a_turned_one_come_back_as_they_were() -> None:
    square = torch.randn(LARGE // 64, 128)
    found = offload({"part": square[1:], "turned": square.t()})
    assert torch.equal(found["part"], square[1:]) and torch.equal(found["turned"], square.t())


def test_what_is_read_is_a_copy() -> None:
    found = offload({"a": torch.zeros(LARGE)})
    found["a"].add_(1)
    assert not found["a"].any()


def test_its_file_has_no_name_and_ends_with_the_last_reader(tmp_path: Path) -> None:
    stow = Offload(tmp_path)
    read = stow.put(torch.ones(LARGE))
    assert list(tmp_path.iterdir()) == []
    open_now = set(os.listdir("/proc/self/fd"))
    del stow
    assert read().sum() == LARGE
    del read
    assert len(open_now - set(os.listdir("/proc/self/fd"))) == 1


def test_where_nothing_can_be_written_tensors_stay_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stow = Offload(tmp_path / "missing")
    tensor = torch.ones(LARGE)
    assert torch.equal(stow.put(tensor)(), tensor) and torch.equal(stow.put(tensor)(), tensor)
    assert [record.getMessage() for record in caplog.records] == [
        f"weights stay in memory: they cannot be written to {tmp_path}/missing "
        "(No such file or directory); TMPDIR may name another folder"
    ]


def test_a_disk_that_loses_them_is_named(tmp_path: Path) -> None:
    stow = Offload(tmp_path)
    read = stow.put(torch.ones(LARGE))
    assert stow._file is not None
    os.truncate(stow._file.descriptor, 10)
    with pytest.raises(RunError, match=rf"weights in a file in {tmp_path} cannot be read"):
        read()


def test_a_folder_that_the_user_names_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    assert find_scratch_folder() == Path("/var/tmp")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert find_scratch_folder() == tmp_path


def test_a_lookup_gives_what_the_last_mapping_holds_and_forgets_what_is_taken() -> None:
    first = LazyMapping.join({"a": 1, "b": 2}, {"b": 3})
    assert dict(first) == {"a": 1, "b": 3}
    assert dict(first.select(["b"])) == {"b": 3}
    assert first.pop("a") == 1 and dict(first) == {"b": 3}
    with pytest.raises(KeyError):
        first.select(["a"])


MIXED = {
    "flags": torch.tensor([True, False, True]),
    "counter": torch.tensor(3.0),
    "empty": torch.zeros(0, 2),
    "large": torch.randn(3, LARGE).bfloat16(),
    "rows": torch.arange(6).reshape(2, 3).t(),
}


def test_a_written_file_is_one_of_safetensors(tmp_path: Path) -> None:
    write_tensors(MIXED, tmp_path / "ours")
    found = load_file(tmp_path / "ours")
    assert found.keys() == MIXED.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in MIXED.items())


def test_a_file_of_safetensors_is_read_tensor_by_tensor_also_without_its_name(
    tmp_path: Path,
) -> None:
    path = tmp_path / "theirs"
    save_file({key: t.contiguous() for key, t in MIXED.items()}, path, metadata={"a": "b"})
    found = read_tensors(path)
    path.unlink()
    assert found.keys() == MIXED.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in MIXED.items())
