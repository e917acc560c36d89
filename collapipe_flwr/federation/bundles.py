"""A record's small arrays as few large ones, since each array costs Flower two requests per hop.

A model of a hundred tensors takes about 1,200 requests in a round, from the ServerApp to the
ClientApp and back, which last longer than the transfer itself. A bundle is an array whose bytes are
an index and then the unchanged bytes of its members; large arrays stay as they are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from collapipe_flwr.core.errors import ProtocolError

MOST_BYTES = 2**22  # of a bundle's members: with their index, below Flower's chunk size
_STYPE = "collapipe.bundle"
_INDEX = struct.Struct("!I")


@dataclass(slots=True)
class Bundles:
    """Builds bundles; a bundle of the same arrays is built once and shared by all messages."""

    _made: dict[tuple[object, ...], tuple[dict[str, Array], Array]] = field(default_factory=dict)

    def of(self, content: RecordDict) -> RecordDict:
        """Copy ``content`` into a new RecordDict with bundles."""
        found = RecordDict(dict(content))
        for name, record in array_records(content).items():
            found[name] = _bundle_small(record, record.__getitem__, self._bundle_once)
        return found

    def _bundle_once(self, members: dict[str, Array]) -> Array:
        held = tuple(
            (key, id(a.data), a.dtype, tuple(a.shape), a.stype) for key, a in members.items()
        )
        if held not in self._made:
            self._made[held] = members, _bundle(members)  # kept alive, so that ids stay unique
        return self._made[held][1]


def bundle(content: RecordDict) -> None:
    """Replace small arrays by bundles, without a second copy of the model.

    A record that the app keeps a reference to stays unchanged.
    """
    records = array_records(content)
    for name in list(records):
        content[name] = record = records.pop(name).copy()
        record.update(_bundle_small(record, record.pop, _bundle))


def unbundle(content: RecordDict) -> bool:
    """Replace bundles by their members; False if there were none.

    Raises ProtocolError for a malformed bundle.
    """
    found = array_records(content).values()
    records = [record for record in found if any(map(_is_bundle, record.values()))]
    for record in records:
        arrays = {name: record.pop(name) for name in list(record)}
        for name in list(arrays):
            array = arrays.pop(name)
            for key, member in _read_members(array) if _is_bundle(array) else [(name, array)]:
                if key in record:
                    raise ProtocolError(f"a message holds the array {key} twice")
                record[key] = member
    return bool(records)


def unbundle_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Unpack bundles for the app, and bundle its reply to a bundled message: a mod."""
    asked = message.has_content() and unbundle(message.content)
    reply = call_next(message, context)
    if asked and reply.has_content():
        bundle(reply.content)
    return reply


def accept_bundles(app: ClientApp, *outer: Mod) -> bool:
    """Unpack bundles, for the ``outer`` mods, before all mods and functions that ``app`` gets.

    False if some functions were registered before.
    """
    if app._registered_funcs or app._call is not None:
        return False
    app._mods = [unbundle_mod, *outer, *app._mods]
    return True


def array_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return the ArrayRecords by name.

    `RecordDict.array_records` would keep them alive until the garbage collector runs.
    """
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def _bundle_small(
    record: ArrayRecord, get: Callable[[str], Array], join: Callable[[dict[str, Array]], Array]
) -> ArrayRecord:
    """Return the arrays of ``record`` in order, small ones bundled by ``join``."""
    found = ArrayRecord()
    for keys in list(_group_keys(record)):
        members = {key: get(key) for key in keys}
        if len(keys) == 1:
            found.update(members)
        else:
            found[f"bundle {len(found)} of {keys[0]}"] = join(members)
    return found


def _group_keys(record: ArrayRecord) -> Iterator[list[str]]:
    """Yield the keys of consecutive arrays that share a bundle."""
    keys: list[str] = []
    size = 0
    for key, array in record.items():
        if keys and size + len(array.data) > MOST_BYTES:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += len(array.data)
    if keys:
        yield keys


def _is_bundle(array: Array) -> bool:
    return array.stype == _STYPE


def _bundle(members: Mapping[str, Array]) -> Array:
    entries = [[key, a.dtype, a.shape, a.stype, len(a.data)] for key, a in members.items()]
    index = json.dumps(entries).encode()
    data = b"".join([_INDEX.pack(len(index)), index, *(a.data for a in members.values())])
    return Array("uint8", (len(data),), _STYPE, data)


def _read_members(joined: Array) -> Iterator[tuple[str, Array]]:
    data = memoryview(joined.data)
    try:
        begin = _INDEX.size + _INDEX.unpack_from(data)[0]
        for key, dtype, shape, stype, size in json.loads(bytes(data[_INDEX.size : begin])):
            if not 0 <= size <= len(data) - begin:
                raise ValueError(f"{key} has {size} bytes")
            yield str(key), Array(dtype, tuple(shape), stype, bytes(data[begin : begin + size]))
            begin += size
    except (struct.error, ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"a bundle of arrays is malformed: {error!r}") from error
    if begin != len(data):
        raise ProtocolError(f"a bundle of arrays has {len(data)} bytes, its index says {begin}")
