"""Records on the local socket between a ClientApp and its control unit."""

from __future__ import annotations

import socket
import threading
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from collapipe_flwr.core.errors import LinkTimeout
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.client.local_socket import open_connection, read_parcel, write_parcel

END_S = 30.0


def carried(*contents: RecordDict) -> tuple[dict[str, Any], list[RecordDict]]:
    here, there = socket.socketpair()
    with here, there, there.makefile("rb") as file:
        there.settimeout(END_S)
        writing = threading.Thread(target=write_parcel, args=(here, {"a": 1}, *contents))
        writing.start()
        found = read_parcel(file)
        writing.join(END_S)
    return found


def test_a_control_unit_that_accepts_nobody_is_not_waited_for_without_end(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as waiting:
        listener.bind(str(path))
        listener.listen(0)
        with pytest.raises(LinkTimeout, match="has accepted nobody"):
            for _ in range(9):
                peer = open_connection(path, within_s=0.05)
                assert peer is not None
                waiting.enter_context(peer)
    assert open_connection(path) is None


def arrays() -> ArrayRecord:
    return encode_tensors({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0)})


def test_a_record_that_is_sent_twice_arrives_twice_and_stays_where_it_is_kept() -> None:
    kept = arrays()
    metrics, config = MetricRecord({"loss": 0.5}), ConfigRecord({"key": b"\0", "more": [1, 2]})
    head, contents = carried(
        RecordDict({"arrays": kept, "metrics": metrics}), RecordDict({"last": kept, "c": config})
    )
    assert head == {"a": 1}
    content, state = contents
    assert content["metrics"] == metrics and state["c"] == config
    for record in (kept, content["arrays"], state["last"]):
        assert isinstance(record, ArrayRecord)
        found, wanted = decode_tensors(record), decode_tensors(arrays())
        assert list(found) == list(wanted)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_what_was_sent_is_held_no_longer() -> None:
    content = RecordDict({"arrays": arrays()})
    array = content["arrays"]["a"]
    gone = weakref.ref(array)
    del array
    carried(content)
    assert gone() is None and not content["arrays"]
