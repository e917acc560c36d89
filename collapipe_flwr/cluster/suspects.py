"""Fault attribution: devices and edges that answer and yet fail are quarantined for the round.

A device with a broken installation raises when it gets its segment or computes; one with broken
memory returns numbers that cannot be right; one behind a firewall cannot be reached by its
neighbour. The stage that notices blames itself or a neighbour (`MemberFailed`). The steps are
replayed without the blamed device, which is also the test: if they succeed, it was at fault. If
another device fails in the same way, neither is: all share the error, or the training diverges, and
the round ends with a message that says so.
"""

from __future__ import annotations

import re

from collapipe_flwr.cluster.order import CONTROL_UNIT, EDGE
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import (
    Blame,
    CollaPipeError,
    Diverged,
    LinkError,
    MemberFailed,
    ModelError,
)
from collapipe_flwr.pipeline.soundness import advise

_SPECIFIC = re.compile(r"\(blocks [\d, -]+\)|[\w.:\[\]-]*\d[\w.:\[\]-]*")  # besides the name


class Suspects:
    """The quarantined devices and edges of one round, each with the reason."""

    def __init__(self, *, clips: bool = False) -> None:
        self.quarantined: dict[str, str] = {}
        self._clips = clips  # gradients are bounded already
        self._failures: list[tuple[str, MemberFailed]] = []  # of the interval that is replayed

    def clear(self) -> None:
        """Forget the failures of an interval that has succeeded without the suspects."""
        self._failures = []

    def quarantine(
        self, error: LinkError, plan: ClusterPlan, *, last: bool, untrained: bool = False
    ) -> str:
        """Return the device to continue without, or `EDGE`; "" where none is to blame.

        ``last`` says that the interval has been replayed often enough to blame a link,
        ``untrained`` that the round has not taken a step yet. Raises Diverged or ModelError where
        it is not the fault of one device.
        """
        if not isinstance(error, MemberFailed):
            return ""
        if error.blame is Blame.UNREACHABLE and not last:
            return ""
        blamed = _find_blamed(error, plan)
        is_edge = blamed == EDGE
        blamed = f"the edge {plan.edge}" if is_edge and plan.edge else blamed
        for before in self._failures:
            if _are_alike(before[1], error):
                cause = "the model fails on this input" if untrained else "the training diverged"
                told = advise(clips=self._clips, untrained=untrained)
                raise _make_shared_failure(before, (blamed, error), cause, told)
        self._failures.append((blamed, error))
        if is_edge or blamed in ("", CONTROL_UNIT):
            return EDGE if is_edge else ""
        self.quarantined[blamed] = _name_reason(blamed, error)
        return blamed

    def explain(self, refusal: str) -> str:
        """Add to the ``refusal`` of a plan the reason why the suspects are left out."""
        if not self._failures:
            return refusal
        blamed, error = self._failures[-1]
        doubt = (
            "; whether it computes wrongly or the training diverges shows only where another "
            f"device can hold its blocks: add one, or {advise(clips=self._clips, untrained=False)}"
        )
        why = _name_reason(blamed, error)
        return f"{why}; {refusal}{doubt if error.blame is Blame.UNSOUND else ''}"


def _find_blamed(error: MemberFailed, plan: ClusterPlan) -> str:
    """Find the blamed device, control unit or edge; "" if the witness is none of these."""
    stages = [(CONTROL_UNIT,), *(segment.device_ids for segment in plan.segments), (EDGE,)]
    here = next((n for n, members in enumerate(stages) if error.witness in members), None)
    if here is None or not error.side:
        return error.witness if here is not None else ""
    place = min(max(here + error.side, 0), len(stages) - 1)
    beside = {*stages[here], *stages[place]} - {error.witness, CONTROL_UNIT, EDGE}
    named = [name for name in beside if error.accused in (name, name.rpartition("/")[2])]
    if len(named) == 1:
        return named[0]
    if error.blame is Blame.UNREACHABLE and place in (0, len(stages) - 1):
        return error.witness  # the two ends can be reached by all others
    return stages[place][0] if len(stages[place]) == 1 else ""


def _name_reason(blamed: str, error: MemberFailed) -> str:
    """Put the member's own name before the reason, since neighbours may call it otherwise."""
    return error.why if blamed in error.why.split() else f"{blamed}: {error.why}"


def _are_alike(before: MemberFailed, now: MemberFailed) -> bool:
    """Return whether two members failed in the same way, apart from names and numbers."""
    if Blame.UNSOUND in (before.blame, now.blame):
        return before.blame is now.blame
    return before.blame is now.blame is Blame.RAISED and _strip_specifics(
        before
    ) == _strip_specifics(now)


def _strip_specifics(error: MemberFailed) -> str:
    """Strip from a sentence what is specific to one device."""
    return _SPECIFIC.sub("", error.why.replace(error.witness, ""))


def _make_shared_failure(
    before: tuple[str, MemberFailed], now: tuple[str, MemberFailed], cause: str, told: str
) -> CollaPipeError:
    (first, error), (second, again) = before, now
    if error.blame is not Blame.UNSOUND:
        if first == second:
            return ModelError(f"{first} fails in a replay, too: {error.why}")
        return ModelError(f"{first} and {second} fail alike, so no device is to blame: {error.why}")
    if first == second == EDGE:
        return Diverged(
            f"{again.why}, in a replay, too: {cause}, or the edge computes wrongly; {told}"
        )
    without = f"without {first}" if first not in ("", CONTROL_UNIT, EDGE) else "again"
    return Diverged(
        f"{_name_reason(first, error)}; replayed {without}, {_name_reason(second, again)}: no "
        f"device is to blame, {cause}; {told}"
    )
