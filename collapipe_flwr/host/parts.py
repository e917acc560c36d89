"""The parts of sessions: built, and replaced as a whole.

Callers keep the session at rest. An error leaves it as it was. Memory is reserved in the session's
account before it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import CheckpointMissing
from collapipe_flwr.host.session import HostSession, SessionRefused
from collapipe_flwr.host.stores import WeightCache
from collapipe_flwr.pipeline.compute import CPU, bring_home, hold
from collapipe_flwr.pipeline.config import SessionRequest
from collapipe_flwr.pipeline.meter import count_bytes
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.state import (
    PartState,
    count_state_bytes,
    load_optimizer_state,
    view_state,
)

BuildPart = Callable[[SessionRequest, Mapping[str, Tensor]], nn.Module]

# Names in the account of a session, besides those for what arrives.
PART = "part"  # weights, gradients and optimizer slots
FOUND = "found"  # for the next push
_NEW = "new part"


class Parts:
    """Builds parts by `build`, to `compute` on a device; frozen weights go to `cache`."""

    def __init__(
        self,
        build: BuildPart,
        cache: WeightCache | None = None,
        compute: torch.device = CPU,
    ) -> None:
        self._build_here = build
        self._compute = compute
        self._cache = cache

    def replace(self, session: HostSession, tensors: Mapping[str, Tensor], arrived: str) -> None:
        """Build the session's part from `tensors`, reserved as `arrived`, and those found here.

        Optimizer slots are taken over, not copied, and there are no gradients yet, so that a part
        is built within the memory that it needs later.
        """
        with session.account.release_after(_NEW):
            brought = {**_assign_found(session), **tensors}
            state = PartState.from_tensors(brought)
            given = session.account.find_size(FOUND) + session.account.find_size(arrived)
            copied = count_bytes(state.weights.values()) + max(
                count_bytes(brought.values()) - given, 0
            )
            session.account.reserve({_NEW: copied})
            part = self._build_first(session, state.weights, tensors)
            optimizer = Optimizer(session.request.optimizer, part.named_parameters())
            needed = count_state_bytes(part, optimizer)
            session.account.reserve({_NEW: max(needed - given, copied)})
            load_optimizer_state(optimizer, state.optimizer, copy=False)
            session.part, session.optimizer = part, optimizer
            session.steps, session.tested, session.report = 0, 0, None
            session.found, session.wanted = {}, {}
            session.account.reserve({PART: needed, FOUND: 0, _NEW: 0, arrived: 0})

    def require_part(self, session: HostSession) -> tuple[nn.Module, Optimizer]:
        """Return the part and its optimizer; raises SessionRefused before they are there."""
        if session.part is None or session.optimizer is None:
            raise SessionRefused("the session has no weights yet: push them first")
        return session.part, session.optimizer

    def _build(self, request: SessionRequest, weights: Mapping[str, Tensor]) -> nn.Module:
        return hold(self._build_here(request, weights), self._compute)

    def _build_first(
        self, session: HostSession, weights: Mapping[str, Tensor], pushed: Mapping[str, Tensor]
    ) -> nn.Module:
        """Build the part, and cache frozen weights that had to be pushed."""
        try:
            part = self._build(session.request, weights)
        except CheckpointMissing:
            session.lacks_checkpoint = True
            raise
        if session.lacks_checkpoint and self._cache is not None:
            trained = {name for name, p in part.named_parameters() if p.requires_grad}
            others = trained.union(part.state_dict())
            frozen = [key for key in weights if key in pushed and key not in others]
            self._cache.keep({key: pushed[key] for key in frozen})
        return part


def collect_tensors(session: HostSession, with_optimizer: bool) -> dict[str, Tensor]:
    """Return a part's tensors, and on request its optimizer's; copied only from accelerators."""
    assert session.part is not None and session.optimizer is not None
    weights = session.part.state_dict()
    if not with_optimizer:
        return dict(bring_home(weights))
    slots = view_state(session.part, session.optimizer).optimizer
    return dict(bring_home(PartState(weights=weights, optimizer=slots).flatten()))


def list_trained_keys(session: HostSession) -> frozenset[str]:
    """Return the keys of `collect_tensors`, slots included, that the session's steps changed."""
    if not session.steps:
        return frozenset()
    assert session.part is not None and session.optimizer is not None
    names = [name for name, p in session.part.named_parameters() if p.requires_grad]
    slots = session.optimizer.collect_state()
    of_them = PartState(
        weights={}, optimizer={name: slots[name] for name in names if name in slots}
    )
    return frozenset(names) | of_them.flatten().keys()


def _assign_found(session: HostSession) -> dict[str, Tensor]:
    """Give every key that `find_missing` found a tensor of its own, also for the same content."""
    by_key: dict[str, Tensor] = {}
    used: set[str] = set()
    for key, digest in session.wanted.items():
        if digest in session.found:
            tensor = session.found[digest]
            by_key[key] = tensor.clone() if digest in used else tensor
            used.add(digest)
    return by_key
