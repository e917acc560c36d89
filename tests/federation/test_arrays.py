"""Every dtype and shape survives: the record, the wire, and a round of averaging."""

from __future__ import annotations

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian

from collapipe_flwr.core.errors import ProtocolError, RunError
from collapipe_flwr.federation.arrays import (
    RAW_TORCH,
    averaging_view,
    decode_tensors,
    encode_tensors,
    restore,
    take_record,
    take_tensors,
)
from collapipe_flwr.federation.local_grid import LocalGrid
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


def test_the_view_holds_floats_that_numpy_has_and_restoring_undoes_it():
    template = encode_tensors(tensors())
    view = averaging_view(template)
    assert {a.dtype for a in view.values()} == {"float64", "float32", "float16"}
    assert_same(decode_tensors(restore(view, template, template)), tensors())


def test_a_record_of_plain_floats_is_its_own_view():
    record = encode_tensors({"a": torch.zeros(2), "b": torch.zeros(2).half()})
    assert averaging_view(record) is record
    assert list(restore(record, record, record).values()) == list(record.values())


def test_strictly_restored_arrays_have_the_models_dtypes():
    template = encode_tensors({"a": torch.ones(3), "b": torch.ones(3).bfloat16()})
    wide = encode_tensors({"a": torch.ones(3).double(), "b": torch.ones(3).double()})
    assert_same(
        decode_tensors(restore(wide, template, template, strict=True)), decode_tensors(template)
    )


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
def test_dtypes_and_shapes_survive_two_rounds(inner, wire):
    model = {
        "weight": torch.ones(2, 3, dtype=torch.bfloat16),
        "scale": torch.tensor(1.0),
        "half": torch.ones(3, dtype=torch.float16),
        "steps": torch.tensor(5),
        "mask": torch.tensor([True, False]),
    }
    grid = LocalGrid({1: counting_client(1, 10), 2: counting_client(3, 30)}, wire=wire)
    strategy = CollaPipe(inner(fraction_evaluate=0.0))
    final = decode_tensors(strategy.start(grid, encode_tensors(model), num_rounds=2).arrays)
    own = ("scale",) if inner is FedAdam else ()  # Flower's FedAdam itself makes float64 of float32
    own += ("half",) if inner is FedAdam else ()
    for key, tensor in model.items():
        assert final[key].shape == tensor.shape
        assert key in own or final[key].dtype == tensor.dtype
    assert final["steps"] == 5 + 3 + 3  # the client with the most examples, twice
    assert final["mask"].tolist() == [True, False]
    if inner is FedAvg:
        assert torch.equal(final["weight"], torch.full((2, 3), 6.0).bfloat16())  # +2.5 a round


def test_a_strategy_that_changes_a_shape_is_refused():
    template = encode_tensors({"a": torch.zeros(2, 3)})
    with pytest.raises(RunError, match=r"array a has shape \(3, 2\)"):
        restore(encode_tensors({"a": torch.zeros(3, 2)}), template, template, strict=True)


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
