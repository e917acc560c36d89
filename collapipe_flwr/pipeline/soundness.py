"""Whether what a neighbour sent can be right, and whom a stage blames when it fails.

A number that is not finite, or larger than any hidden state or gradient of a model that still
learns, is refused by whoever receives it: it would spoil every weight behind. Whether the sender
computes wrongly or the training diverged is for the control unit to find out, which has the same
steps replayed elsewhere (`cluster.suspects`). Wrong numbers of ordinary size are not noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
from collapipe_flwr.pipeline.link import GRAD, HIDDEN, Frame

LARGEST = 1e9  # of what trained models have, some 10,000 times more
_NAMES = {HIDDEN: "hidden states", GRAD: "gradients"}


def oddity(tensor: Tensor) -> str:
    """What is wrong with the numbers of a tensor, "" where nothing is."""
    if not (tensor.is_floating_point() and tensor.numel()):
        return ""
    low, high = (float(end) for end in tensor.detach().aminmax())
    size = max(-low, high)
    if size <= LARGEST:
        return ""
    return f"numbers up to {size:.1e}" if size < float("inf") else "values that are not finite"


def check_sound(frame: Frame, witness: str, peer: str, side: int) -> None:
    """Raise MemberFailed if a hidden state or gradient that ``peer`` sent cannot be right."""
    for name, what in _NAMES.items():
        if name in frame.tensors and (odd := oddity(frame.tensors[name])):
            why = f"{peer} sent {what} of step {frame.step} with {odd}"
            raise MemberFailed(witness, why, Blame.UNSOUND, side)


def check_finite(what: str, frame: Frame, taken: Tensor | None, given: Tensor) -> None:
    """Raise NotFinite if a pass turned finite numbers into others."""
    if not given.isfinite().all() and (taken is None or taken.isfinite().all()):
        raise NotFinite(
            f"{what} in step {frame.step}, micro-batch {frame.micro_batch}, made finite numbers "
            "infinite or NaN: lower the learning rate, or bound gradients with train.clip-norm"
        )


@contextmanager
def blaming(witness: str, peer: str, side: int) -> Iterator[None]:
    """Blame the neighbour on one side for what it sends, and for not being there."""
    try:
        yield
    except MemberFailed as error:
        if error.witness:
            raise
        raise _accepted(error, witness) from error
    except ProtocolError as error:
        why = str(error) if peer in str(error) else f"{peer} sent {error}"
        raise MemberFailed(witness, why, Blame.MALFORMED, side) from error
    except LinkTimeout as error:
        raise MemberSilent(witness, str(error), Blame.SILENT, side) from error
    except Unreachable as error:
        raise MemberFailed(witness, str(error), Blame.UNREACHABLE, side) from error


def _accepted(error: MemberFailed, witness: str) -> MemberFailed:
    """The blame of a neighbour that named nobody: it meant the one that heard it."""
    return MemberFailed(witness, f"{witness} sent {error.why}", error.blame)


def told(error: BaseException, witness: str) -> LinkError:
    """What a stage that ``error`` ends tells its neighbours: its own failure, or what it heard."""
    if isinstance(error, MemberFailed) and not error.witness:
        return _accepted(error, witness)
    if isinstance(error, LinkError):
        return error
    words = str(error).strip()
    if not isinstance(error, CollaPipeError):
        words = f"{type(error).__name__}: {words}" if words else type(error).__name__
    blame = Blame.UNSOUND if isinstance(error, NotFinite) else Blame.RAISED
    return MemberFailed(witness, words, blame)
