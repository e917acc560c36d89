"""Many steps of 1F1B played side by side, with the results of `warm_up` for each, bit by bit.

Suffixes: ``_k`` stage (control unit, slots, edge), ``_r`` row. Unused slots lie between the last
device and the edge. They compute nothing, send nothing, and like the edge hold one micro-batch, so
they change no times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.warm_up import AS_GOOD

AT_A_TIME = 4  # depths of a row that are played together


@dataclass(frozen=True, slots=True, kw_only=True)
class ManySteps:
    """Steps, side by side."""

    ahead_kr: Array  # seconds per micro-batch
    back_kr: Array
    there_kr: Array  # of the hop behind each stage; 0 behind the edge
    home_kr: Array
    used_kr: Mask
    micro_batches_r: Ints

    def take(self, rows: Ints) -> ManySteps:
        """Take the chosen rows."""
        return ManySteps(
            ahead_kr=self.ahead_kr[:, rows],
            back_kr=self.back_kr[:, rows],
            there_kr=self.there_kr[:, rows],
            home_kr=self.home_kr[:, rows],
            used_kr=self.used_kr[:, rows],
            micro_batches_r=self.micro_batches_r[rows],
        )

    def choose_warm_up(self, limit_kr: Ints, least_r: Array) -> tuple[Ints, Array]:
        """Choose depths, (K, R), and seconds, (R,), as `warm_up.choose_warm_up` does."""
        depth_kr, found_r = self._search(limit_kr, least_r)
        depth_kr, found_r = self._trim(
            depth_kr, found_r, np.flatnonzero(~_are_near(found_r, least_r))
        )
        return self._raise_depths(depth_kr, found_r, limit_kr, least_r)

    def _search(self, limit_kr: Ints, least_r: Array) -> tuple[Ints, Array]:
        depth_kr, found_r = self._deepen(limit_kr, least_r)
        if len(slow := np.flatnonzero(~_are_near(found_r, least_r))):
            falling = self._let_fall(limit_kr)[:, slow]
            other_kr, other_r = self.take(slow)._deepen(falling, least_r[slow])
            better = other_r < found_r[slow]
            depth_kr[:, slow[better]], found_r[slow[better]] = other_kr[:, better], other_r[better]
        return depth_kr, found_r

    def _let_fall(self, limit_kr: Ints) -> Ints:
        """Let every stage have less in flight than the one ahead of it."""
        falling = limit_kr.copy()
        for k in range(1, len(limit_kr)):
            less = np.maximum(np.minimum(limit_kr[k], falling[k - 1] - 1), 1)
            falling[k] = np.where(self.used_kr[k], less, falling[k - 1])
        return falling

    def _deepen(self, limit_kr: Ints, least_r: Array) -> tuple[Ints, Array]:
        depth_kr, found_r = np.ones_like(limit_kr), np.full(limit_kr.shape[1], np.inf)
        open_r, most = np.arange(len(found_r)), int(self.micro_batches_r.max())
        for first in range(0, most, AT_A_TIME):
            slacks = range(first, min(first + AT_A_TIME, most))
            trials = [self._add_slack(limit_kr, slack)[:, open_r] for slack in slacks]
            again = self.take(np.tile(open_r, len(trials)))
            played = again.play(np.concatenate(trials, axis=1)).reshape(len(trials), -1)
            going = np.ones(len(open_r), bool)
            for slack, trial_kr, seconds_r in zip(slacks, trials, played, strict=True):
                going &= slack < self.micro_batches_r[open_r]
                going &= ~_are_near(found_r[open_r], least_r[open_r])
                going &= ~_are_near(found_r[open_r], seconds_r)
                found_r[open_r[going]] = seconds_r[going]
                depth_kr[:, open_r[going]] = trial_kr[:, going]
            open_r = open_r[going]
            if not len(open_r):
                break
        return depth_kr, found_r

    def _add_slack(self, limit_kr: Ints, slack: int) -> Ints:
        depth_kr = np.ones_like(limit_kr)
        for k in range(len(limit_kr) - 2, -1, -1):
            behind = depth_kr[k + 1]
            depth = np.maximum(np.minimum(limit_kr[k], behind + 1 + slack), behind)
            depth_kr[k] = np.where(self.used_kr[k], depth, 1)
        return depth_kr

    def _trim(self, depth_kr: Ints, found_r: Array, rows: Ints) -> tuple[Ints, Array]:
        """Trim these rows; all depths of a stage are played at once, then searched."""
        shortest_r = found_r.copy()
        for k in range(len(depth_kr) - 2, -1, -1):
            fewer = depth_kr[k, rows] - depth_kr[k + 1, rows]
            open_r = rows[self.used_kr[k, rows] & (fewer > 0)]
            if not len(open_r):
                continue
            low, high = depth_kr[k + 1, open_r], depth_kr[k, open_r]
            places, first = np.repeat(np.arange(len(open_r)), high - low), low.copy()
            starts = np.cumsum(high - low) - (high - low)
            trial_kr = depth_kr[:, open_r[places]]
            trial_kr[k] = first[places] + np.arange(len(places)) - starts[places]
            played = self.take(open_r[places]).play(trial_kr)
            while len(going := np.flatnonzero(low < high)):
                middle, row = (low[going] + high[going]) // 2, open_r[going]
                seconds_r = played[starts[going] + middle - first[going]]
                slow = seconds_r > shortest_r[row] * (1.0 + AS_GOOD)
                low[going] = np.where(slow, middle + 1, low[going])
                high[going] = np.where(slow, high[going], middle)
                found_r[row] = np.where(slow, found_r[row], seconds_r)
                shortest_r[row] = np.where(
                    slow, shortest_r[row], np.minimum(shortest_r[row], seconds_r)
                )
            depth_kr[k, open_r] = high
        return depth_kr, found_r

    def _raise_depths(
        self, depth_kr: Ints, found_r: Array, limit_kr: Ints, least_r: Array
    ) -> tuple[Ints, Array]:
        """Raise the depth of a stage, or of all down to it; all stages are tried at once."""
        most_kr = np.where(self.used_kr, np.minimum(limit_kr, self.micro_batches_r), 1)
        most_kr[-1] = 1
        stages, every = len(depth_kr), np.arange(len(depth_kr))[:, None]
        open_r = np.flatnonzero(~_are_near(found_r, least_r))
        while len(open_r):
            now_kr = depth_kr[:, open_r]
            room = now_kr < most_kr[:, open_r]
            alone = room & np.insert(now_kr[:-1] > now_kr[1:], 0, False, axis=0)
            trial, place = np.nonzero(np.concatenate([room, alone]))
            if not len(trial):
                break
            more = np.where(trial < stages, every <= trial, every == trial - stages)
            trial_kr = np.minimum(now_kr[:, place] + more, most_kr[:, open_r[place]])
            played = np.full((2 * stages, len(open_r)), np.inf)
            played[trial, place] = self.take(open_r[place]).play(trial_kr)
            which = np.zeros(played.shape, np.int64)
            which[trial, place] = np.arange(len(place))
            best, at = played.argmin(0), np.arange(len(open_r))
            seconds = played[best, at]
            going = np.flatnonzero(~_are_near(found_r[open_r], seconds))
            open_r = open_r[going]
            depth_kr[:, open_r] = trial_kr[:, which[best, at][going]]
            found_r[open_r] = seconds[going]
            open_r = open_r[~_are_near(found_r[open_r], least_r[open_r])]
        return depth_kr, found_r

    def play(self, depth_kr: Ints) -> Array:
        """Play every step with depths that do not rise, (R,) seconds; see `warm_up`.

        On every stage, rows with fewer forward passes than others before their first gradient skip
        the first lines, so that all rows do their last ones together and then one per gradient.
        """
        stages, rows = depth_kr.shape
        count_r, every = self.micro_batches_r, range(stages)
        fewest, count = int(count_r.min()), int(count_r.max())
        flight_kr = np.minimum(depth_kr, count_r)
        most_k = flight_kr.max(1)
        late_kr, deepest = most_k[:, None] - flight_kr, int(most_k.max())
        # Line by line, when the passes of a stage reach the next one; what no pass wrote is 0.
        sent = [np.zeros((2 * deepest + count, rows)) for _ in every]
        flat = [lines.ravel() for lines in sent]
        links = [lines[deepest - 1] for lines in sent]  # until when they work
        free, up = list(np.zeros((stages, rows))), list(np.zeros((stages, rows)))
        shift_kr = late_kr[:-1] - late_kr[1:]  # lines between a pass and its arrival
        least_k = shift_kr.min(1)
        first_k = [deepest, *(deepest + least_k).tolist()]
        reads = [None, *((shift_kr - least_k[:, None]) * rows + np.arange(rows))]
        ahead, back = list(self.ahead_kr), list(self.back_kr)
        there, home = list(self.there_kr), list(self.home_kr)

        def forward(k: int, line: int, ahead: Array, there: Array, works: Mask | None) -> None:
            end, link = free[k], sent[k][deepest + line]
            if k:
                arrived = flat[k - 1][(first_k[k] + line) * rows :].take(reads[k])
                if works is not None:  # where no pass is left, what is read means nothing
                    arrived *= works
                np.maximum(arrived, end, out=end)
            end += ahead
            np.maximum(end, links[k], out=link)
            link += there
            links[k] = link

        for k in every:  # what needs no gradient
            for line in range(int(most_k[k])):
                works = line >= late_kr[k]
                forward(k, line, ahead[k] * works, there[k] * works, None)
        least, most = flight_kr.min(1).tolist(), most_k.tolist()
        works_kr: Mask | None = None
        for wave in range(count):
            if wave >= fewest:  # what has ended takes no more time, which changes no end
                going_r = wave < count_r
                back, home = list(self.back_kr * going_r), list(self.home_kr * going_r)
            gradient = np.zeros(rows)
            for k in range(stages - 1, 0, -1):
                end, link = free[k], up[k]
                np.maximum(gradient, end, out=end)
                end += back[k]
                np.maximum(end, link, out=link)
                link += home[k - 1]
                gradient = link
            np.maximum(gradient, free[0], out=free[0])
            free[0] += back[0]
            if wave + deepest >= fewest:
                works_kr = wave + flight_kr < count_r
                ahead = list(self.ahead_kr * works_kr)
                there = list(self.there_kr * works_kr)
            for k in every:
                if wave + least[k] < count:
                    works = None if works_kr is None else works_kr[k]
                    forward(k, most[k] + wave, ahead[k], there[k], works)
        return np.asarray(free[0])


def _are_near(found_r: Array, other_r: Array) -> Mask:
    """Compare as `WarmUp.is_near` does."""
    return np.asarray(other_r >= found_r * (1.0 - AS_GOOD))
