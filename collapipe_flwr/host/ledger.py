"""The memory that models hold on a host.

Memory that is needed for longer than one micro-batch is reserved here before it is taken: weights
that arrive, the state of a part (weights, gradients and optimizer slots, which `costs.work` prices
besides activations), and tensors kept for the next round. Activations, frames in a link and the
libraries are not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.memory import read_available_bytes

_MEGA = 1e6


class NoRoom(LinkError):
    """The host may not hold so many bytes."""


class Ledger:
    """The reservations of one host, up to `most_bytes` (None: what is free now); thread-safe."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes = read_available_bytes() if most_bytes is None else most_bytes
        self.peak_bytes = 0
        self.lock = threading.Lock()
        self.accounts: set[Account] = set()

    @property
    def held_bytes(self) -> int:
        """Bytes that are reserved now."""
        with self.lock:
            return self.sum_bytes(None)

    def sum_bytes(self, owner: str | None) -> int:
        """Sum the bytes reserved by one owner (None: by all); the caller holds the lock."""
        accounts = (a for a in self.accounts if owner in (None, a.owner))
        return sum(sum(account.entries.values()) for account in accounts)


class Account:
    """Reservations of one session, or of the store, by name.

    Sessions of one `owner` may reserve `most_bytes` together (None: as much as there is).
    """

    def __init__(self, ledger: Ledger, owner: str = "", most_bytes: int | None = None) -> None:
        self.owner = owner
        self.entries: dict[str, int] = {}
        self._ledger = ledger
        self._most_bytes = most_bytes
        self._closed = False
        self._arrivals = 0

    def find_size(self, name: str) -> int:
        """Return the bytes reserved under one name."""
        return self.entries.get(name, 0)

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Set the reservations under these names, all or none; 0 releases one.

        Raises NoRoom when the sum would grow beyond what the host, or the owner, may hold. A sum
        that does not grow is never refused.
        """
        with self._ledger.lock:
            self._change(sizes)

    def add(self, name: str, size: int) -> None:
        """Reserve ``size`` more bytes under one name; see `reserve`."""
        with self._ledger.lock:
            self._change({name: self.find_size(name) + size})

    @contextmanager
    def release_after(self, *names: str) -> Iterator[None]:
        """Release, after the body, the reservations under these names."""
        try:
            yield
        finally:
            self.reserve(dict.fromkeys(names, 0))

    @contextmanager
    def name_arrival(self) -> Iterator[str]:
        """Yield a new name for tensors that arrive in the body; see `release_after`."""
        with self._ledger.lock:
            self._arrivals += 1
            name = f"arrival {self._arrivals}"
        with self.release_after(name):
            yield name

    def close(self) -> None:
        """Release everything; nothing can be reserved here any more."""
        with self._ledger.lock:
            self._closed = True
            self._book({})

    def _change(self, sizes: Mapping[str, int]) -> None:
        after = {name: size for name, size in {**self.entries, **sizes}.items() if size}
        more = sum(after.values()) - sum(self.entries.values())
        if more > 0:
            self._check(more)
        if not self._closed:
            self._book(after)

    def _book(self, entries: dict[str, int]) -> None:
        self.entries = entries
        self._ledger.accounts.add(self)
        if not entries:
            self._ledger.accounts.discard(self)
        self._ledger.peak_bytes = max(self._ledger.peak_bytes, self._ledger.sum_bytes(None))

    def _check(self, more: int) -> None:
        if self._closed:
            raise NoRoom("the session was closed, so nothing more can be pushed into it")
        most, held = self._ledger.most_bytes, self._ledger.sum_bytes(None)
        if self._most_bytes is not None:
            own = self._ledger.sum_bytes(self.owner)
            if self._most_bytes - own < most - held:
                most, held = self._most_bytes, own
        if more > most - held:
            raise NoRoom(
                f"no room: {more / _MEGA:.3g} MB more are needed, and {held / _MEGA:.3g} MB of the "
                f"{most / _MEGA:.3g} MB that may be held here are taken; close sessions, or start "
                "the host with a larger --memory-mb"
            )
