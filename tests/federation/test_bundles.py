"""Small arrays travel together, and nobody but the two ends sees it."""

from __future__ import annotations

import json
import weakref

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.federation import bundles
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.bundles import Bundles, accept_bundles, unbundle, unbundle_mod
from collapipe_flwr.federation.client.cluster import Cluster, mods_of
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.records import ARRAYS, takes_bundles
from collapipe_flwr.federation.wrapped_grid import PollingGrid
from tests.federation.split_clusters import FixedPlanner, model, trainer, wrapped

LARGE = bundles.MOST_BYTES // 4  # so many floats are a bundle by themselves


def tensors() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.randn(3, 2),
        "embed.empty": torch.zeros(0, 5),
        "blocks.0.weight": torch.randn(4, 4).bfloat16(),
        "blocks.0.table": torch.randn(LARGE),
        "blocks.1.mask": torch.tensor([True, False]),
        "blocks.1.steps": torch.tensor(7),
    }


def content(record: ArrayRecord | None = None) -> RecordDict:
    arrays = encode_tensors(tensors()) if record is None else record
    return RecordDict({ARRAYS: arrays, "config": ConfigRecord({"lr": 0.1})})


def message(content: RecordDict) -> Message:
    about = Metadata(
        run_id=1,
        message_id="1",
        src_node_id=1,
        dst_node_id=2,
        reply_to_message_id="",
        group_id="1",
        created_at=0.0,
        ttl=9e9,
        message_type="train",
    )
    return Message(content, metadata=about)


def same(first: ArrayRecord, second: ArrayRecord) -> bool:
    def told(record: ArrayRecord) -> list[tuple[object, ...]]:
        return [(k, a.dtype, tuple(a.shape), a.stype, a.data) for k, a in record.items()]

    return told(first) == told(second)


def test_every_dtype_and_shape_comes_back_in_order() -> None:
    before = content()
    sent = Bundles().of(before)
    assert len(before[ARRAYS]) == 6  # they stay
    assert [name.partition(" of ")[2] or name for name in sent[ARRAYS]] == [
        "embed.weight",
        "blocks.0.table",
        "blocks.1.mask",
    ]
    assert sent["config"] == before["config"]
    assert unbundle(sent)
    assert same(sent[ARRAYS], before[ARRAYS])
    assert not unbundle(sent)  # a second time there are none


def test_bundles_stay_below_what_flower_cuts() -> None:
    many = {str(i): torch.randn(50_000) for i in range(100)}
    sent = Bundles().of(content(encode_tensors(many)))[ARRAYS]
    sizes = [len(array.data) for array in sent.values()]
    assert len(sizes) < 6 and sum(sizes) > 20_000_000
    assert all(size < 5 * 2**20 for size in sizes)
    assert all(len(list(array.slice_array())) == 1 for array in sent.values())


def test_messages_of_the_same_arrays_share_their_bundles() -> None:
    record, made = encode_tensors(tensors()), Bundles()
    first, second = (made.of(content(record.copy()))[ARRAYS] for _ in range(2))
    assert all(first[name] is second[name] for name in first)
    record["embed.weight"] = Array(np.zeros((3, 2), np.float32))
    third = made.of(content(record))[ARRAYS]
    assert [third[name] is first[name] for name in first] == [False, True, True]


def test_functions_and_mods_of_an_app_see_no_bundles() -> None:
    seen = []

    def mod(message, context, call_next):
        seen.append(set(message.content[ARRAYS]))
        reply = call_next(message, context)
        seen.append(set(reply.content[ARRAYS]))
        return reply

    mods = [mod]
    app = ClientApp(mods=mods)
    assert accept_bundles(app)
    assert mods == [mod]  # the caller's list

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        seen.append(set(message.content[ARRAYS]))
        arrays = {
            key: tensor + 1 for key, tensor in decode_tensors(message.content[ARRAYS]).items()
        }
        return Message(RecordDict({ARRAYS: encode_tensors(arrays)}), reply_to=message)

    def trained(sent: RecordDict) -> ArrayRecord:
        context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
        return app(message(sent), context).content[ARRAYS]

    plain = trained(content())
    assert set(plain) == set(tensors())
    before = content()
    reply = RecordDict({ARRAYS: trained(Bundles().of(before))})
    assert len(reply[ARRAYS]) == 3
    assert unbundle(reply)
    wanted = {key: tensor + 1 for key, tensor in decode_tensors(before[ARRAYS]).items()}
    assert all(torch.equal(decode_tensors(reply[ARRAYS])[key], wanted[key]) for key in wanted)
    assert seen == [set(tensors())] * 6
    assert mods_of(app) == [mod]


def echo(message: Message, context: Context) -> Message:
    del context
    return Message(message.content, reply_to=message)


def test_a_record_that_an_app_keeps_stays_as_it_was() -> None:
    kept = encode_tensors(tensors())
    weak = [weakref.ref(array) for array in kept.values()]
    reply = RecordDict({ARRAYS: kept})
    bundles.bundle(reply)
    assert set(kept) == set(tensors()) and len(reply[ARRAYS]) == 3
    del kept
    bundled = [ref() for ref in weak]
    assert sum(array is not None for array in bundled) == 1  # the large one, which is no bundle


def test_an_app_whose_functions_are_there_already_takes_none() -> None:
    app = ClientApp()
    app.train()(echo)
    assert not accept_bundles(app)
    assert unbundle_mod not in app._mods


def test_a_cluster_says_whether_it_takes_bundles() -> None:
    early, late = ClientApp(), ClientApp()
    late.train()(echo)
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
    first, second = Cluster(early), Cluster(late)
    assert first._build_profile(first._site_of(context), context).bundles
    assert not second._build_profile(second._site_of(context), context).bundles


def indexed(index: bytes) -> bytes:
    return len(index).to_bytes(4, "big") + index


@pytest.mark.parametrize("harm", ["short", "long", "index", "deep", "back", "twice"])
def test_a_malformed_bundle_is_refused(harm: str) -> None:
    sent = Bundles().of(content())
    name = next(iter(sent[ARRAYS]))
    data = sent[ARRAYS][name].data
    if harm == "twice":
        sent[ARRAYS]["again"] = sent[ARRAYS][name]
    else:
        back = [["a", "uint8", [9], "x", 9], ["b", "uint8", [0], "x", -9]]
        bad = {
            "short": data[:-1],
            "long": data + b"0",
            "index": b"\xff" * 8 + data,
            "deep": indexed(b"[" * 100_000),
            "back": indexed(json.dumps(back).encode()) + bytes(9),
        }[harm]
        sent[ARRAYS][name] = Array("uint8", (len(bad),), sent[ARRAYS][name].stype, bad)
    with pytest.raises(ProtocolError, match=r"bundle|twice"):
        unbundle(sent)


def bundled(train):
    return lambda message, context: unbundle_mod(message, context, train)


def rounds(planner: FixedPlanner, train) -> tuple[LocalGrid, dict[str, torch.Tensor]]:
    grid = LocalGrid({n: train(trainer(float(n), 10)) for n in (1, 2)})
    strategy = wrapped(planner, [], FedAvg(fraction_evaluate=0.0))
    result = strategy.start(PollingGrid(grid), encode_tensors(model()), num_rounds=2)
    return grid, decode_tensors(result.arrays)


def test_rounds_with_bundles_are_those_without() -> None:
    plain, wanted = rounds(FixedPlanner("c1", "c2"), lambda train: train)
    grid, found = rounds(FixedPlanner("c1", "c2", bundles=("c1",)), bundled)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert [len(m.content[ARRAYS]) for m in plain.sent] == [5] * 4
    for sent in grid.sent:
        first = sent.metadata.dst_node_id == 1
        assert takes_bundles(sent.content) == first
        assert len(sent.content[ARRAYS]) == (1 if first else 5)
