"""Checks of the numbers that a neighbour sends, and the blame for a failure.

The receiver refuses numbers that are not finite, or larger than any hidden state or gradient of a
model that still learns: they would spoil every weight behind it. For the same reason a stage checks
its own gradients before they are added to those of others. The control unit finds out whether the
sender computes wrongly or the training diverged: it replays the same steps elsewhere
(`cluster.suspects`). Wrong numbers of ordinary size are not noticed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from collapipe_flwr.core.errors import (
    Blame,
    CollaPipeError,
    LinkError,
    LinkTimeout,
    MemberFailed,
    MemberSilent,
    NotFinite,
    ProtocolError,
    Unreachable,
)
from collapipe_flwr.pipeline.gradient_sums import ROWS, SHARED, SUM
from collapipe_flwr.pipeline.link import GRAD, HIDDEN, Frame, Link

LARGEST = 1e9  # some 10,000 times more than in trained models
_NAMES = {HIDDEN: "hidden states", GRAD: "gradients"}
_PREFIXES = {SUM: "sums of gradients", SHARED: "sums of gradients", ROWS: "rows of a table"}


def describe_implausible(tensor: Tensor) -> str:
    """Describe numbers that cannot be right in a tensor, "" where there are none."""
    if not (tensor.is_floating_point() and tensor.numel()):
        return ""
    low, high = tensor.detach().aminmax()
    size = max(-float(low), float(high))
    if size <= LARGEST:
        return ""
    return f"numbers up to {size:.1e}" if size < float("inf") else "values that are not finite"


def check_sound(frame: Frame, witness: str, link: Link, side: int) -> None:
    """Raise MemberFailed if a hidden state or gradient that came over ``link`` cannot be right."""
    for name, tensor in frame.tensors.items():
        what = _NAMES.get(name) or _PREFIXES.get(name[: name.find("/") + 1])
        if what and (wrong := describe_implausible(tensor)):
            why = f"{link.peer} sent {what} of step {frame.step} with {wrong}"
            raise MemberFailed(witness, why, Blame.UNSOUND, side, link.peer_id)


def check_finite(
    what: str, frame: Frame, taken: Tensor | None, given: Tensor, *, clips: bool
) -> None:
    """Raise NotFinite if a pass made finite numbers infinite or NaN."""
    if not given.isfinite().all() and (taken is None or taken.isfinite().all()):
        raise NotFinite(
            f"{what} in step {frame.step}, micro-batch {frame.micro_batch}, made finite numbers "
            f"infinite or NaN: {advise(clips=clips, untrained=not frame.step)}"
        )


def advise(*, clips: bool, untrained: bool) -> str:
    """Say what to do about numbers that are not finite; ``untrained`` weights took no step yet."""
    if untrained:
        return "no step was taken yet, so look at the examples and at the weights to begin with"
    return "lower the learning rate" + (
        " or train.clip-norm" if clips else ", or bound gradients with train.clip-norm"
    )


def describe_odd(tensors: Mapping[str, Tensor]) -> str:
    """Describe the first tensor whose numbers make all others NaN; return "" if there is none.

    Zeros and minus infinities are no such numbers: they are a mask.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            fine = tensor[tensor.isfinite()]
            if fine.any() or not tensor[~tensor.isfinite()].eq(-math.inf).all():
                return f"{name!r} with values that are not finite"
    return ""


class blame:  # noqa: N801 - used like a function; a generator costs twice as much
    """Blame the neighbour on one side for errors in what it sends, and for not answering."""

    __slots__ = "_link", "_side", "_witness"

    def __init__(self, witness: str, link: Link, side: int) -> None:
        self._witness, self._link, self._side = witness, link, side

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        witness, link, side = self._witness, self._link, self._side
        if isinstance(error, MemberFailed):
            if not error.witness:
                raise _accept_blame(error, witness) from error
        elif isinstance(error, ProtocolError):
            why = str(error) if link.peer in str(error) else f"{link.peer} sent {error}"
            accused = _find_accused(error, link)
            raise MemberFailed(witness, why, Blame.MALFORMED, side, accused) from error
        elif isinstance(error, LinkTimeout):
            why, accused = str(error), _find_accused(error, link)
            raise MemberSilent(witness, why, Blame.SILENT, side, accused) from error
        elif isinstance(error, Unreachable):
            why, accused = str(error), _find_accused(error, link)
            raise MemberFailed(witness, why, Blame.UNREACHABLE, side, accused) from error


def _find_accused(error: LinkError, link: Link) -> str:
    """Return the neighbour that an error on ``link`` is about."""
    return error.peer_id or link.peer_id


def _accept_blame(error: MemberFailed, witness: str) -> MemberFailed:
    """Turn an error without a witness into one that blames the stage that received it."""
    return MemberFailed(witness, f"{witness} sent {error.why}", error.blame)


def make_neighbours_error(error: BaseException, witness: str) -> LinkError:
    """Return the error for a failed stage's neighbours: its own, or one it received."""
    if isinstance(error, MemberFailed) and not error.witness:
        return _accept_blame(error, witness)
    if isinstance(error, LinkError):
        return error
    words = str(error).strip()
    if not isinstance(error, CollaPipeError):
        words = f"{type(error).__name__}: {words}" if words else type(error).__name__
    blame = Blame.UNSOUND if isinstance(error, NotFinite) else Blame.RAISED
    return MemberFailed(witness, words, blame)
