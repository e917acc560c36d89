"""The links from which a session's stage takes its work, as they are established one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from collapipe_flwr.core.schedule import ALONE, Turn
from collapipe_flwr.pipeline.link import Link, fan_of


class Lane(NamedTuple):
    """One of the links from the replicas of the stage ahead; 0 of 0 is from the next replica."""

    number: int = 0
    of: int = 1


ONLY, SIBLING = Lane(), Lane(0, 0)


@dataclass(slots=True)
class Lanes:
    """The lanes that were claimed, with their links once they are there; `turn` is the stage's."""

    turn: Turn = ALONE
    links: dict[Lane, Link | None] = field(default_factory=dict)

    def accepts(self, lane: Lane) -> bool:
        """Whether this one is missing. All lanes must give the same number of lanes."""
        if lane == SIBLING:
            return self._has_next and lane not in self.links
        fits = 0 <= lane.number < lane.of
        return fits and lane not in self.links and all(lane.of == known.of for known in self._ahead)

    @property
    def complete(self) -> bool:
        """Whether all links are there."""
        there = {lane for lane, link in self.links.items() if link is not None}
        ahead = there - {SIBLING}
        has_all = bool(ahead) and len(ahead) == next(iter(ahead)).of
        return has_all and (SIBLING in there or not self._has_next)

    @property
    def are_several(self) -> bool:
        """Whether more than one link is needed."""
        return self._has_next or any(lane.of > 1 for lane in self._ahead)

    @property
    def upstream(self) -> Link:
        """All links from the stage ahead as one."""
        found = (self.links[lane] for lane in sorted(self._ahead))
        return fan_of([link for link in found if link is not None], self.turn)

    @property
    def behind(self) -> Link | None:
        """The link from the next replica."""
        return self.links.get(SIBLING)

    @property
    def _ahead(self) -> set[Lane]:
        return self.links.keys() - {SIBLING}

    @property
    def _has_next(self) -> bool:
        return self.turn.replica < self.turn.replicas - 1
