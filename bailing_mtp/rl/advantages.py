"""From the rewards of a prompt's samples to their advantages.

Sources: group normalisation as in GRPO (arXiv 2402.03300); leave-one-out as in RLOO (arXiv 2402.14740). A group
whose rewards are all equal teaches nothing and is dropped, as in DAPO (arXiv 2503.14476).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EPS = 1e-6


@dataclass(frozen=True)
class Advantages:
    """One entry per group: an advantage per sample, or None for a group that is dropped."""

    groups: tuple[tuple[float, ...] | None, ...]

    @property
    def n_dropped(self) -> int:
        return sum(group is None for group in self.groups)


def advantages(rewards: Sequence[Sequence[float]], kind: Literal["group", "rloo"]) -> Advantages:
    """Per group: (r - mean) / (population std + 1e-6), or r minus the mean of the other samples' rewards.

    Groups of one sample, or of equal rewards, are dropped. Raises ValueError for a reward that is not finite.
    """
    return Advantages(tuple(_of_group(group, kind) for group in rewards))


def _of_group(rewards: Sequence[float], kind: str) -> tuple[float, ...] | None:
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards {tuple(rewards)} must be finite")
    if len(set(rewards)) < 2:
        return None
    n, total = len(rewards), math.fsum(rewards)
    if kind == "rloo":
        return tuple(reward - (total - reward) / (n - 1) for reward in rewards)
    assert kind == "group", kind
    mean = total / n
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / n)
    return tuple((reward - mean) / (std + EPS) for reward in rewards)
