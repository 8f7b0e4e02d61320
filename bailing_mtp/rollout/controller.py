"""How many drafts the next step takes, from what steps cost and how often drafts are accepted.

Host logic alone: what it says follows from what it was told. A step of n rows and k drafts takes cost(n, k) seconds
and brings 1 + a_1 + a_1 a_2 + ... tokens a row, a_d being the chance that draft d is accepted after those before it;
the k of the largest ratio runs. Costs are averages per (bucket, k) of measured times; what was not measured is
estimated from the other k of its bucket and from the nearest bucket. What is not run is not learned of, so now and
then another k is tried, within an allowance: a few steps at the start and then one for each 133 (a costlier one
for more of them), so that the time lost to trials stays below one in a hundred. With a margin of one in a hundred
for leaving the k that runs, which keeps a batch between two buckets from flapping, a rollout stays within two in a
hundred of its own k = 0, and of its best k.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_ALLOWANCE = 4.0
"""Steps that may be given to trials from the first one on."""
_ALLOWANCE_PER_STEP = 0.0075
_MARGIN = 1.01
"""How much better another k must be than the one that runs."""
_REST_STEPS = 4
"""Steps between two trials of one k: what was launched must have been read."""
_FADE, _FLOOR = 1 - 1 / 64, 16.0
"""What a step leaves of the weight of older tests of drafts, and the number of tests that age does not touch."""
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0
"""Acceptance before anything is known, and the observations that it counts for."""
_COST_OF_DRAFT = 0.15
"""Of a step, where nothing of the kind was measured."""
_MEMORY_STEPS = 16
_OUTLIER, _OUTLIERS_BELIEVED = 3.0, 3
"""A time so many times the average is dropped, unless it comes so many times in a row."""


@dataclass
class _Arm:
    """One k in one bucket."""

    cost_s: float | None = None
    n_timed: int = 0
    n_dropped: int = 0
    """Times that were dropped, in a row."""
    n_launched: int = 0
    last_step: int = -_REST_STEPS

    def add(self, seconds: float) -> None:
        if self.cost_s is not None and seconds > _OUTLIER * self.cost_s:
            self.n_dropped += 1
            if self.n_dropped < _OUTLIERS_BELIEVED:
                return
        if self.cost_s is None or self.n_dropped or seconds * _OUTLIER < self.cost_s:
            # The first, or the machine has changed: nothing runs faster than it can.
            self.cost_s, self.n_timed = seconds, 0
        self.n_timed, self.n_dropped = min(self.n_timed + 1, _MEMORY_STEPS), 0
        self.cost_s += (seconds - self.cost_s) / self.n_timed


class Controller:
    """Chooses k in 0..K for one rollout replica; lives through all rollouts of an engine."""

    def __init__(self, most: int) -> None:
        """most: K."""
        self._most, self._drafts = most, most
        self._arms: dict[int, list[_Arm]] = {}
        self._reached, self._accepted = [0.0] * most, [0.0] * most
        self._warm: set[Hashable] = set()
        self._tested = [0] * most
        """Step of the last test at each depth."""
        self._step, self._allowance = 0, _ALLOWANCE

    def begin(self) -> None:
        """A rollout begins: its graphs may have to be captured again."""
        self._warm.clear()

    def choose(self, rows: int, may_try: bool = True) -> int:
        """Drafts of the next step of this bucket. Changes nothing: `launched` is told what runs in the end.

        may_try: whether the step will be timed, without which a trial tells little.
        """
        if not rows:
            return self._drafts
        best = self._best(rows)
        tried = self._trial(rows, best) if may_try else None
        return best if tried is None else tried

    def launched(self, rows: int, drafts: int) -> None:
        """A step was launched, by this replica's choice or by another's."""
        self._step += 1
        self._allowance += _ALLOWANCE_PER_STEP
        self._drafts = self._best(rows)
        if drafts != self._drafts:
            self._allowance -= max(1.0, self._loss(rows, drafts, self._drafts))
        arm = self._bucket(rows)[drafts]
        arm.n_launched += 1
        arm.last_step = self._step

    def timed(self, rows: int, drafts: int, shape: Hashable, seconds: float | None) -> None:
        """A step took so long, None where that is not known. The first of a shape captures or compiles: it says
        nothing of the next, and where it was a trial the allowance pays for it."""
        is_first = shape not in self._warm
        self._warm.add(shape)
        if seconds is None:
            return
        if not is_first:
            self._bucket(rows)[drafts].add(seconds)
        elif drafts != self._drafts and self._known(rows):
            self._allowance -= max(0.0, seconds / self._cost_s(rows, self._drafts) - 1)

    def tested(self, reached: Sequence[int], accepted: Sequence[int]) -> None:
        """Of one step: rows that tested a draft at each depth, and those of them that accepted it."""
        for index, (tests, passes) in enumerate(zip(reached, accepted, strict=True)):
            if not tests:
                continue
            age, old = self._step - self._tested[index], self._reached[index]
            kept = max(_FADE**age, min(1.0, _FLOOR / old)) if old else 0.0
            self._reached[index] = old * kept + tests
            self._accepted[index] = self._accepted[index] * kept + passes
            self._tested[index] = self._step

    def tokens(self, drafts: int) -> float:
        """Expected tokens of a row in a step."""
        total = chance = 1.0
        for reached, accepted in zip(self._reached[:drafts], self._accepted[:drafts], strict=True):
            chance *= (accepted + _PRIOR * _PRIOR_WEIGHT) / (reached + _PRIOR_WEIGHT)
            total += chance
        return total

    def _best(self, rows: int) -> int:
        rates = [self.tokens(k) / self._cost_s(rows, k) for k in range(self._most + 1)]
        best = max(range(self._most + 1), key=rates.__getitem__)
        return best if rates[best] > _MARGIN * rates[self._drafts] else self._drafts

    def _loss(self, rows: int, drafts: int, best: int) -> float:
        """What a step of `drafts` loses against the best one, in steps of the best."""
        cost_s, best_s = self._cost_s(rows, drafts), self._cost_s(rows, best)
        return cost_s / best_s - self.tokens(drafts) / self.tokens(best)

    def _trial(self, rows: int, best: int) -> int | None:
        """Another k that is worth a step now: one that was begun and not timed, else the one not run for longest."""
        if not any(map(self._known, self._arms)):
            return None
        arms = self._bucket(rows)
        others = [k for k in range(self._most + 1) if k != best]
        begun = [k for k in others if arms[k].cost_s is None and arms[k].n_launched == 1]
        if begun:
            return begun[0]
        rested = [k for k in others if self._step - arms[k].last_step >= _REST_STEPS]
        tried = min(rested, key=lambda k: (arms[k].cost_s is not None, arms[k].last_step, k), default=None)
        if tried is None or self._allowance < max(1.0, self._loss(rows, tried, best)):
            return None
        return tried

    def _cost_s(self, rows: int, drafts: int) -> float:
        """Seconds of a step: measured, or estimated; only the ratios within a bucket matter."""
        own = self._known(rows)
        near = sorted((other for other in self._arms if other != rows), key=lambda other: _distance(other, rows))
        known = [costs for costs in map(self._known, near) if costs]
        if not own:
            if not known:
                return 1 + _COST_OF_DRAFT * drafts
            own, known = known[0], known[1:]
        if drafts in own:
            return own[drafts]
        for costs in known:
            shared = [k for k in own if k in costs]
            if drafts in costs and shared:
                anchor = min(shared, key=lambda k: abs(k - drafts))
                return own[anchor] * costs[drafts] / costs[anchor]
        return _between(own, drafts)

    def _known(self, rows: int) -> dict[int, float]:
        return {k: arm.cost_s for k, arm in enumerate(self._arms.get(rows, ())) if arm.cost_s is not None}

    def _bucket(self, rows: int) -> list[_Arm]:
        return self._arms.setdefault(rows, [_Arm() for _ in range(self._most + 1)])


def _distance(a: int, b: int) -> float:
    return abs(math.log(a / b))


def _between(costs: dict[int, float], drafts: int) -> float:
    """Of a bucket's measured costs: on the line between two of them, else from the nearest."""
    below = max((k for k in costs if k < drafts), default=None)
    above = min((k for k in costs if k > drafts), default=None)
    if below is None or above is None:
        nearest = above if below is None else below
        assert nearest is not None, "a bucket without costs"
        return costs[nearest] * (1 + _COST_OF_DRAFT * drafts) / (1 + _COST_OF_DRAFT * nearest)
    return costs[below] + (costs[above] - costs[below]) * (drafts - below) / (above - below)
