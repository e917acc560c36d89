"""Every dtype and shape survives: the record, the wire, and a round of averaging."""

from __future__ import annotations

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian

from collapipe_flwr.core.errors import ProtocolError, RunError
from collapipe_flwr.federation.arrays import (
    RAW_TORCH,
    add_change,
    averaging_view,
    decode_tensors,
    encode_tensors,
    find_not_finite,
    inner_view,
    load_into,
    narrow_raw,
    take_record,
    take_tensors,
)
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.split import check_finite
from collapipe_flwr.federation.strategy import CollaPipe

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def tensors() -> dict[str, torch.Tensor]:
    values = torch.arange(6).reshape(2, 3)
    model = {f"matrix.{dtype}": values.to(dtype) for dtype in DTYPES}
    model |= {f"scalar.{dtype}": torch.tensor(1).to(dtype) for dtype in DTYPES}
    model["strided.bf16"] = values.to(torch.bfloat16).T
    model["empty.bf16"] = torch.empty(0, 3, dtype=torch.bfloat16)
    return model


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(left) == list(right)
    for key, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[key].dtype, right[key].shape), key
        assert torch.equal(tensor.float(), right[key].float()), key


def test_a_state_dict_survives_the_wire(wire):
    content = wire(RecordDict({"arrays": encode_tensors(tensors())}))
    assert_same(decode_tensors(content["arrays"]), tensors())


def test_tensors_after_decoding_own_their_memory():
    record = encode_tensors({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)})
    for tensor in decode_tensors(record).values():
        tensor += 1
    assert_same(decode_tensors(record), {"a": torch.zeros(2), "b": torch.zeros(2).bfloat16()})


def test_code_that_does_not_know_bfloat16_refuses_it_instead_of_misreading():
    array = encode_tensors({"a": torch.ones(2, dtype=torch.bfloat16)})["a"]
    with pytest.raises(TypeError, match="serialization type"):
        array.numpy()


def test_the_view_holds_what_numpy_has_and_loading_undoes_it():
    template = encode_tensors(tensors())
    view = inner_view(template)
    assert list(view) == list(template)
    assert {a.dtype for a in averaging_view(template).values()} == {"float64", "float32", "float16"}
    assert_same(decode_tensors(load_into(template, view)), tensors())
    assert_same(decode_tensors(narrow_raw(view, template)), tensors())


def test_a_record_that_numpy_can_hold_is_its_own_view():
    record = encode_tensors({"a": torch.zeros(2), "b": torch.zeros(2).half(), "n": torch.tensor(3)})
    assert inner_view(record) is record
    assert narrow_raw(record, record) is record


def test_hidden_arrays_come_from_the_model():
    record = encode_tensors({"a": torch.zeros(2), "b": torch.ones(2)})
    view = inner_view(record, {"b"})
    assert list(view) == ["a"]
    assert_same(decode_tensors(load_into(record, view)), decode_tensors(record))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loaded_arrays_are_those_of_load_state_dict(dtype):
    generator = torch.Generator().manual_seed(1)
    wide = 3 * torch.rand(50, generator=generator, dtype=torch.float64)
    template = torch.zeros(50, dtype=dtype)
    loaded = load_into(encode_tensors({"a": template}), encode_tensors({"a": wide}))
    module = torch.nn.Module()
    module.register_buffer("a", template.clone())
    module.load_state_dict({"a": wide})
    assert_same(decode_tensors(loaded), dict(module.state_dict()))


def counting_client(step: int, examples: int):
    """Adds ``step`` to everything, integers and bfloat16 included."""

    def train(message, context):
        del context
        sent = decode_tensors(message.content["arrays"])
        moved = {k: v.logical_not() if v.dtype == torch.bool else v + step for k, v in sent.items()}
        metrics = MetricRecord({"num-examples": examples})
        content = RecordDict({"arrays": encode_tensors(moved), "metrics": metrics})
        return Message(content, reply_to=message)

    return train


@pytest.mark.parametrize("inner", [FedAvg, FedAdam, FedMedian])
def test_what_numpy_lacks_survives_two_rounds_and_the_rest_is_the_inner_strategys(inner, wire):
    model = {
        "weight": torch.ones(2, 3, dtype=torch.bfloat16),
        "scale": torch.tensor(1.0),
        "half": torch.ones(3, dtype=torch.float16),
        "steps": torch.tensor(5),
        "mask": torch.tensor([True, False]),
    }

    def final(strategy, names):
        grid = LocalGrid({1: counting_client(1, 10), 2: counting_client(3, 30)}, wire=wire)
        start = encode_tensors({name: model[name] for name in names})
        return decode_tensors(strategy.start(grid, start, num_rounds=2).arrays)

    wrapped = final(CollaPipe(inner(fraction_evaluate=0.0)), model)
    plain = final(inner(fraction_evaluate=0.0), [name for name in model if name != "weight"])
    assert list(wrapped) == list(model)
    assert wrapped["weight"].dtype == torch.bfloat16
    if inner is FedAvg:
        assert torch.equal(wrapped.pop("weight"), torch.full((2, 3), 6.0).bfloat16())
    wrapped.pop("weight", None)
    assert_same(wrapped, plain)


def test_a_strategy_that_changes_a_shape_is_refused():
    template = encode_tensors({"a": torch.zeros(2, 3).bfloat16()})
    for restore in (load_into, lambda before, view: narrow_raw(view, before)):
        with pytest.raises(RunError, match=r"array a has shape \(3, 2\)"):
            restore(template, encode_tensors({"a": torch.zeros(3, 2)}))


@pytest.mark.parametrize(
    "array",
    [
        Array("bfloat16", (2,), RAW_TORCH, b"123"),
        Array("bfloat16", (3,), RAW_TORCH, b"1234"),
        Array("complex9", (2,), RAW_TORCH, b"1234"),
        Array("float32", (2,), "numpy.ndarray", b"no numpy header"),
        Array("float32", (2,), "numpy.ndarray", b""),
        Array("float32", (2,), "somebody.else", b""),
    ],
)
def test_a_malformed_array_is_named(array):
    with pytest.raises(ProtocolError, match=r"array lm\.weight"):
        decode_tensors(ArrayRecord({"lm.weight": array}))


def test_taking_gives_the_same_and_leaves_nothing() -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    held = dict(tensors)
    record = take_record(held)
    assert held == {}
    found = take_tensors(record)
    assert len(record) == 0
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())


def test_float64_keeps_its_digits_and_its_range() -> None:
    tiny = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)
    start, model = encode_tensors({"w": tiny}), encode_tensors({"w": tiny + 1.0})
    moved = decode_tensors(add_change(model, start, encode_tensors({"w": tiny + 2.0})))["w"]
    assert moved.dtype == torch.float64 and torch.equal(moved, tiny + 3.0)
    large = encode_tensors({"w": torch.tensor([1e300], dtype=torch.float64)})
    assert find_not_finite(large, start) is None
    check_finite(large, "c1")
