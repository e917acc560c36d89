"""Whatever bytes a client sends as an array: its values, or one sentence; never more memory."""

from __future__ import annotations

import zipfile
from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.federation.array_format import RAW_TORCH
from collapipe_flwr.federation.arrays import (
    decode_tensors,
    encode_tensors,
    find_not_finite,
    offload_tensors,
)
from tests.thorough import examples

NUMPY = "numpy.ndarray"
READERS = (
    decode_tensors,
    lambda record: find_not_finite(record, encode_tensors({"w": torch.ones(2)})),
    lambda record: dict(offload_tensors(record.copy()).items()),
)


def saved(array: np.ndarray, **options: bool) -> bytes:
    file = BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def with_head(text: str, data: bytes = b"", version: int = 1) -> bytes:
    """A file with any head."""
    head = text.encode() + b"\n"
    size = len(head).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes((version, 0)) + size + head + data


def archive() -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("w.npy", saved(np.zeros(10**6, np.float32)))
    return file.getvalue()


def head(descr: str = "'<f4'", order: str = "False", shape: str = "(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


PAIR = saved(np.ones(2, np.float32))
MALFORMED = {
    "an open bracket": with_head("{'descr': '<f4', 'shape': (2L, (", b"\0" * 8),
    "36 TiB": with_head(head(shape="(9895604649984,)"), b"\0" * 8),
    "a size beyond 64 bits": with_head(head(shape=f"({10**30},)"), b"\0" * 8),
    "a negative size": with_head(head(shape="(-2,)"), b"\0" * 8),
    "a true size": with_head(head(shape="(True, 2)"), b"\0" * 8),
    "no shape": with_head(head(shape="2"), b"\0" * 8),
    "many dimensions": with_head(head(shape=f"({'1, ' * 40})"), b"\0" * 4),
    "nothing of much": with_head(head(shape=f"(0, {2**62})")),
    "a pickle": saved(np.array([{}, 1], dtype=object), allow_pickle=True),
    "records": saved(np.zeros(1, dtype=[("a", "<f4"), ("b", "<f4")])),
    "text": saved(np.array(["ab", "cd"])),
    "dates": saved(np.zeros(1, "datetime64[s]")),
    "the other order of bytes": saved(np.ones(2, np.dtype(">f4"))),
    "an unknown dtype": with_head(head(descr="'<f3'"), b"\0" * 8),
    "nested brackets": with_head("(" * 3000, b"\0" * 8),
    "signs": with_head("-" * 3000 + "1", b"\0" * 8),
    "a long head": with_head(head() + " " * 60_000, b"\0" * 8),
    "a head of 4 GiB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + head().encode(),
    "an unknown version": b"\x93NUMPY\x09\x00" + PAIR[8:],
    "cut off": PAIR[:-1],
    "a byte too many": PAIR + b"\0",
    "another shape": saved(np.ones(3, np.float32)),
    "another dtype": saved(np.ones(1, np.float64)),
    "an archive": archive(),
    "the head of an archive": b"PK\x03\x04" + b"\0" * 40,
    "half a magic word": b"\x93NUM",
    "nothing": b"",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_array_is_one_sentence_that_names_it(data: bytes) -> None:
    for read in READERS:
        record = ArrayRecord({"w": Array("float32", (2,), NUMPY, data)})
        with pytest.raises(ProtocolError, match=r"array w .*cannot be read"):
            read(record)


@pytest.mark.parametrize(
    ("dtype", "shape", "stype", "data"),
    [
        ("bfloat16", (-1, 2), RAW_TORCH, b"1234"),
        ("bfloat16", (True, 2), RAW_TORCH, b"1234"),
        ("bfloat16", (2**40, 2**40), RAW_TORCH, b"1234"),
        ("float32", (1,), RAW_TORCH, b"1234"),
        ("bool", (2,), NUMPY, saved(np.array([True, False]))[:-1] + b"\7"),
        ("a" * 10**6, (2,), "b" * 10**6, PAIR),
        ("\x1b[2J\n", (2,), NUMPY, PAIR),
    ],
)
def test_metadata_that_lies_is_one_short_line(dtype, shape, stype, data) -> None:
    key = "\x1b]0;\u202e" + "k" * 10_000
    with pytest.raises(ProtocolError) as refused:
        decode_tensors(ArrayRecord({key: Array(dtype, shape, stype, data)}))
    assert str(refused.value).isprintable() and len(str(refused.value)) < 600


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_versions_and_orders_of_numpys_files_are_read(version: tuple[int, int]) -> None:
    values = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    file = BytesIO()
    np.lib.format.write_array(file, values, version=version)
    record = ArrayRecord({"w": Array("float32", (2, 3), NUMPY, file.getvalue())})
    assert torch.equal(decode_tensors(record)["w"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(offload_tensors(record)["w"], torch.arange(6.0).reshape(2, 3))


words = st.sampled_from(["'<f4'", "'>f8'", "'|O'", "'|b1'", "True", "False", "None", "()", "(0,)"])
numbers = st.integers(-2, 2**70).map(str) | st.integers(0, 4).map(str)
shapes = st.lists(numbers, max_size=4).map(lambda sizes: f"({' '.join(f'{s},' for s in sizes)})")
heads = st.builds(head, words | shapes, words | numbers, shapes | words) | st.text(max_size=60)
files = (
    st.binary(max_size=200)
    | st.builds(with_head, heads, st.binary(max_size=40), st.sampled_from([1, 2, 3]))
    | st.integers(0, len(PAIR)).map(lambda n: PAIR[:n])
    | st.tuples(st.integers(0, len(PAIR) - 1), st.binary(min_size=1, max_size=9)).map(
        lambda change: PAIR[: change[0]] + change[1] + PAIR[change[0] + len(change[1]) :]
    )
)
arrays = st.builds(
    Array,
    st.sampled_from(["float32", "bfloat16", "bool", "object", "int64", ""]),
    st.lists(st.integers(-1, 3) | st.integers(-(2**70), 2**70), max_size=4).map(tuple),
    st.sampled_from([NUMPY, NUMPY, RAW_TORCH, "collapipe.bundle", ""]),
    files,
)


@examples(100, 600, derandomize=True)
@given(arrays)
def test_any_bytes_are_values_of_their_own_size_or_one_sentence(array: Array) -> None:
    try:
        tensor = decode_tensors(ArrayRecord({"w": array}))["w"]
    except ProtocolError as error:
        assert str(error).isprintable() and len(str(error)) < 600
    else:
        assert tuple(tensor.shape) == array.shape
        assert tensor.numel() * tensor.element_size() <= len(array.data)
