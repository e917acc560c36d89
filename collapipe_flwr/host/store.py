"""The tensors of the last segment that a device held, found again by their content."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from torch import Tensor

from collapipe_flwr.host.ledger import Account, Ledger, NoRoom
from collapipe_flwr.pipeline.digest import digest_of
from collapipe_flwr.pipeline.memory import bytes_of

_STORED = "last session"


class TensorStore:
    """Keeps one closed session's tensors until the next session asks what it may have of them.

    They are reserved in `ledger`, and not kept where there is no room. Digests are computed when
    somebody asks, not while a session closes.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._account = Account(ledger or Ledger())
        self._tensors: tuple[Tensor, ...] = ()
        self._lock = threading.Lock()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep these instead of the last ones, if there is room."""
        kept = tuple(tensor.detach() for tensor in tensors)
        with self._lock:
            self._tensors = ()
            try:
                self._account.reserve({_STORED: bytes_of(kept)})
            except NoRoom:
                self._account.reserve({_STORED: 0})
            else:
                self._tensors = kept

    def take(self, digests: Collection[str]) -> dict[str, Tensor]:
        """Hand over the tensors with these digests and forget the others."""
        with self._lock:
            tensors, self._tensors = self._tensors, ()
            self._account.reserve({_STORED: 0})
        held = {digest_of(tensor): tensor for tensor in tensors}
        return {digest: held[digest] for digest in digests if digest in held}

    @property
    def held_bytes(self) -> int:
        """What is kept now."""
        return self._account.size(_STORED)
