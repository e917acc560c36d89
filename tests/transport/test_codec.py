"""Laws of the codec: what goes in comes out, and nonsense is a ProtocolError, never a crash."""

from __future__ import annotations

import json
import math
import struct
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.costs.radio import ROUNDING
from collapipe_flwr.pipeline.link import GRAD, HIDDEN, Frame, FrameKind
from collapipe_flwr.transport.codec import WIRE_CODECS, decode_frame, encode_frame
from collapipe_flwr.transport.methods import FrameLimits
from tests.thorough import examples

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32]
DTYPES += [torch.int16, torch.int8, torch.uint8, torch.bool]
ERRORS = {"fp32": 0.0, "fp16": 2**-10, "bf16": 2**-8, "int8": 1 / 254}


def sample() -> Frame:
    return Frame(
        kind=FrameKind.ACTIVATION,
        step=3,
        micro_batch=2,
        tensors={HIDDEN: torch.randn(2, 3, 4), "attention_mask": torch.ones(2, 3).long()},
        scalars={"scale": 0.25},
        text="é",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7), (1, 2, 3, 4)])
def test_every_dtype_and_shape_comes_back_bit_by_bit(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    back = decode_frame(encode_frame(Frame(kind=FrameKind.WEIGHTS, tensors={"w": tensor})))
    assert back.tensors["w"].dtype == dtype
    assert torch.equal(back.tensors["w"], tensor)
    assert back.tensors["w"].shape == shape


@given(
    kind=st.sampled_from(FrameKind),
    numbers=st.tuples(st.integers(0, 2**40), st.integers(0, 2**20)),
    scalars=st.dictionaries(st.text(max_size=9), st.floats(), max_size=4),
    text=st.text(max_size=99),
)
def test_everything_but_tensors_comes_back(kind, numbers, scalars, text):
    sent = Frame(kind=kind, step=numbers[0], micro_batch=numbers[1], scalars=scalars, text=text)
    back = decode_frame(encode_frame(sent))
    assert (back.kind, back.step, back.micro_batch, back.text) == (kind, *numbers, text)
    assert back.scalars.keys() == scalars.keys()
    for name, value in scalars.items():
        assert back.scalars[name] == value or math.isnan(value)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("elements", [0, 1, 127, 128, 129, 1000])
def test_lossy_codecs_stay_within_their_bound(codec, elements):
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    data = encode_frame(Frame(kind=FrameKind.GRADIENT, tensors={GRAD: tensor}), codec)
    back = decode_frame(data).tensors[GRAD]
    assert back.dtype == torch.float32
    largest = tensor.abs().max().item() if elements else 0.0
    assert (
        (back - tensor).abs().max().item() <= ERRORS[codec] * largest * 1.001 if elements else True
    )


def test_lossy_codecs_are_smaller_and_touch_only_hidden_states_and_gradients():
    hidden, mask = torch.randn(64, 64), torch.randn(64)
    frame = Frame(kind=FrameKind.ACTIVATION, tensors={HIDDEN: hidden, "grad": mask})
    sizes = {codec: len(encode_frame(frame, codec)) for codec in WIRE_CODECS}
    assert sizes["int4"] < sizes["int8"] < sizes["bf16"] < sizes["fp16"] < sizes["fp32"]
    back = decode_frame(encode_frame(frame, "int8"))
    assert torch.equal(back.tensors["grad"], mask)  # a batch may have such a name
    assert not torch.equal(back.tensors[HIDDEN], hidden)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_overflow_stays_visible(codec, bad):
    tensor = torch.ones(300)
    tensor[200] = bad
    frame = Frame(kind=FrameKind.ACTIVATION, tensors={HIDDEN: tensor})
    back = decode_frame(encode_frame(frame, codec)).tensors[HIDDEN]
    assert not back[200].isfinite()
    error = (back[:128] - 1).square().mean().sqrt()
    assert error <= ERRORS.get(codec, 1.5 * ROUNDING[codec])


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-39, 1e-30, 1e-8, 7e4, 1e30, 3e38])
def test_lossy_codecs_take_any_magnitude(codec, magnitude):
    """Gradients of a mean over many labels are below the smallest number of half precision."""
    tensor = torch.linspace(-1, 1, 300) * magnitude
    data = encode_frame(Frame(kind=FrameKind.GRADIENT, tensors={GRAD: tensor}), codec)
    error = (decode_frame(data).tensors[GRAD] - tensor).abs().max().item()
    assert error <= max(magnitude * ERRORS[codec] * 1.001, 2e-36)


def test_fp16_rounds_what_half_precision_holds_as_half_precision_does():
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 8
    plain = tensor.half()
    data = encode_frame(Frame(kind=FrameKind.GRADIENT, tensors={GRAD: tensor}), "fp16")
    back = decode_frame(data).tensors[GRAD]
    normal = plain.abs() >= torch.finfo(torch.float16).smallest_normal
    assert normal.sum() > 990
    assert torch.equal(back[normal], plain[normal].float())


def test_fp16_keeps_small_gradients_beside_large_ones():
    tensor = torch.tensor([1.0, 2.0**-28, 2.0**-38, 2.0**-40])
    data = encode_frame(Frame(kind=FrameKind.GRADIENT, tensors={GRAD: tensor}), "fp16")
    assert decode_frame(data).tensors[GRAD].tolist() == [1.0, 2.0**-28, 2.0**-38, 0.0]


def test_decoded_tensors_own_their_memory():
    data = encode_frame(sample())
    first, second = decode_frame(data), decode_frame(data)
    first.tensors[HIDDEN].zero_()
    assert second.tensors[HIDDEN].abs().sum() > 0


def test_a_tensor_that_cannot_travel_is_refused():
    with pytest.raises(ProtocolError, match="complex64"):
        encode_frame(
            Frame(kind=FrameKind.WEIGHTS, tensors={"w": torch.ones(1, dtype=torch.complex64)})
        )


@given(st.binary(max_size=300))
def test_garbage_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        decode_frame(data)


@given(cut=st.integers(0, 10_000))
def test_a_truncated_frame_is_a_protocol_error(cut):
    data = encode_frame(sample())
    with pytest.raises(ProtocolError):
        decode_frame(data[: cut % len(data)])


@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_flipped_byte_is_a_protocol_error_or_another_frame(position, byte):
    data = bytearray(encode_frame(sample()))
    data[position % len(data)] = byte
    try:
        frame = decode_frame(bytes(data))
    except ProtocolError:
        return
    assert sum(t.numel() for t in frame.tensors.values()) <= len(data)


def forged(
    listed: object,
    body: bytes = b"",
    *,
    kind: int = 2,
    step: int = 0,
    micro_batch: int = 0,
    scalars: int = 0,
    text: bytes = b"",
) -> bytes:
    """A frame with this list, which may be JSON already, and so many scalars."""
    line = listed if isinstance(listed, bytes) else json.dumps(listed).encode()
    head = struct.pack("<4sIIIqq", b"CPF2", kind, len(line), len(text), step, micro_batch)
    head += line + bytes(8 * scalars) + text
    return head + bytes(-len(head) % 16) + body


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


@examples(30, 100)
@given(
    numbers=st.fixed_dictionaries(
        {
            "kind": st.integers(0, 16) | st.integers(0, 2**32 - 1),
            "step": st.integers(-(2**63), 2**63 - 1),
            "micro_batch": st.integers(-1, 3),
            "scalars": st.integers(0, 2),
            "text": st.binary(max_size=3),
        }
    ),
    names=json_values | st.lists(st.text(max_size=2), max_size=2),
    tensors=json_values
    | st.lists(
        st.tuples(
            st.text(max_size=3),
            st.sampled_from(["float32", "bool", "int64"]) | json_values,
            st.lists(st.integers(-2, 2**70), max_size=9) | json_values,
            st.sampled_from(["fp32", "int8"]) | json_values,
        ),
        max_size=3,
    ),
    body=st.binary(max_size=64),
)
def test_a_forged_header_is_a_protocol_error_or_an_honest_frame(numbers, names, tensors, body):
    data = forged([names, tensors], body, **numbers)
    try:
        frame = decode_frame(data)
    except ProtocolError:
        return
    assert frame.tensor_bytes <= 8 * len(data)
    assert min(frame.step, frame.micro_batch) >= 0


@pytest.mark.parametrize(
    "entry",
    [
        ["w", "float32", [2**40], "fp32"],
        ["w", "float32", [2**62, 4], "fp32"],
        ["w", "float32", [5], "fp32"],
        ["w", "float32", [2**63, 0], "fp32"],
        ["w", "float32", [2**61, 2**61, 0], "fp32"],
        ["w", "float32", [1] * 9, "fp32"],
        ["w", "int64", [2], "int8"],
        ["w", "object", [2], "fp32"],
        ["w", "float32", [-1], "fp32"],
        ["w", "float32", [True], "fp32"],
    ],
)
def test_impossible_tensors_are_refused_before_allocation(entry):
    for body in (b"", bytes(16)):
        with pytest.raises(ProtocolError):
            decode_frame(forged([[], [entry]], body))


@pytest.mark.parametrize(
    "odd",
    [
        {"kind": 99},
        {"kind": 2**32 - 1},
        {"step": -1},
        {"micro_batch": -1},
        {"text": b"\xff"},
        {"text": "\ud800".encode(errors="surrogatepass")},
        {"scalars": 2},
    ],
)
def test_an_odd_header_is_refused(odd):
    assert decode_frame(forged([[], []], kind=1)).kind is FrameKind.BEGIN
    with pytest.raises(ProtocolError):
        decode_frame(forged([[], []], **odd))


@pytest.mark.parametrize("names", [["a", "a"], [1], "ab", {"a": 1}, None, [None]])
def test_scalars_have_a_name_each(names):
    assert decode_frame(forged([["a", "b"], []], scalars=2)).scalars == {"a": 0.0, "b": 0.0}
    for count in range(3):
        with pytest.raises(ProtocolError):
            decode_frame(forged([names, []], scalars=count))


@pytest.mark.parametrize("bad", [[1.0], [True], ["1"]])
def test_what_was_read_once_excuses_no_lookalike(bad):
    honest = ["w", "float32", [1], "fp32"]
    body = b"\0" * 16
    assert decode_frame(forged([[], [honest]], body)).tensors["w"].shape == (1,)
    with pytest.raises(ProtocolError):
        decode_frame(forged([[], [[*honest[:2], bad, *honest[3:]]]], body))


def test_frames_that_follow_each_other_keep_their_own_tensors():
    sent = [
        Frame(kind=FrameKind.ACTIVATION, micro_batch=n, tensors={HIDDEN: torch.full((n, 2), n)})
        for n in (2, 2, 1, 2)
    ]
    for frame in sent:
        back = decode_frame(encode_frame(frame))
        assert back.micro_batch == frame.micro_batch
        assert torch.equal(back.tensors[HIDDEN], frame.tensors[HIDDEN])


def test_a_limit_holds_for_tensors_that_were_read_under_a_wider_one():
    data = encode_frame(sample())
    assert decode_frame(data).tensors
    with pytest.raises(ProtocolError):
        decode_frame(data, FrameLimits(tensors=1))


def test_limits():
    data = encode_frame(sample())
    for limits in (
        FrameLimits(frame_bytes=len(data) - 1),
        FrameLimits(header_bytes=10),
        FrameLimits(tensors=1),
        FrameLimits(dimensions=2),
    ):
        with pytest.raises(ProtocolError):
            decode_frame(data, limits)


def test_deep_nesting_is_a_protocol_error():
    with pytest.raises(ProtocolError):
        decode_frame(forged(b"[" * 100_000))


@pytest.mark.parametrize(
    "listed", ["%s", "[[], %s]", "[%s, []]", '[[], [["w", "float32", [%s], "fp32"]]]']
)
def test_nesting_of_any_depth_is_a_protocol_error(listed):
    """Also the deepest that json reads, which no sentence can show."""
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit()):
        with pytest.raises(ProtocolError):
            decode_frame(forged((listed % ("[" * depth + "]" * depth)).encode()))


def test_tensors_that_grow_beyond_the_limit_together_are_refused_before_they_are_made():
    hidden = {name: torch.zeros(1000, dtype=torch.float64) for name in (HIDDEN, GRAD)}
    data = encode_frame(Frame(kind=FrameKind.ACTIVATION, tensors=hidden), "int4")
    assert decode_frame(data, FrameLimits(frame_bytes=2000)).tensor_bytes == 16_000
    with pytest.raises(ProtocolError, match="whose tensors take 16000 bytes is beyond the limit"):
        decode_frame(data, FrameLimits(frame_bytes=1999))


def _tile_errors(tensor: torch.Tensor) -> torch.Tensor:
    """Error over norm of every tile of 64 that comes back from 4 bits."""
    data = encode_frame(Frame(kind=FrameKind.GRADIENT, tensors={GRAD: tensor}), "int4")
    back = decode_frame(data).tensors[GRAD]
    missing = -tensor.numel() % 64
    ours, theirs = (
        torch.nn.functional.pad(each.reshape(-1).double(), (0, missing)).view(-1, 64)
        for each in (back, tensor)
    )
    assert (ours[theirs.norm(dim=1) == 0] == 0).all()
    return (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-300)


@given(
    shape=st.lists(st.integers(1, 90), min_size=1, max_size=3).filter(lambda s: math.prod(s) < 4e4),
    seed=st.integers(0, 2**31),
    outlier=st.sampled_from([0.0, 10.0, 1e4]),
    zeros=st.sampled_from([0.0, 0.5, 0.98]),
    magnitude=st.sampled_from([1e-25, 1e-9, 1.0, 1e30]),
)
def test_four_bits_lose_about_a_tenth_of_whatever_a_tile_holds(
    shape: list[int], seed: int, outlier: float, zeros: float, magnitude: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=draw)
    tensor[torch.rand(shape, generator=draw) < zeros] = 0.0
    tensor[torch.rand(shape, generator=draw) < 0.01] *= 1.0 + outlier
    errors = _tile_errors(tensor * magnitude)
    assert errors.max() < 0.35 and errors.mean() < 0.12 + 0.2 / len(errors) ** 0.5


def test_four_bits_are_the_same_bits_whenever_they_are_written() -> None:
    tensor = torch.randn(3, 1000, 70, generator=torch.Generator().manual_seed(2))
    first, again = (bytes(WIRE_CODECS["int4"].pack(tensor)) for _ in range(2))
    alone = bytes(WIRE_CODECS["int4"].pack(tensor.clone()))
    assert first == again == alone
