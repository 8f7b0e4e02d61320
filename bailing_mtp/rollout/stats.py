"""What a rollout counts: accept lengths, acceptance by depth, occupancy, tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class RolloutStats:
    """Counters of one replica. A row-step is one running row in one decode step."""

    depths: int
    """Largest number of drafts."""
    samples: int = 0
    tokens: int = 0
    """Response tokens kept, first tokens included."""
    prefilled_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    step_tokens: int = 0
    """Response tokens kept in decode steps."""
    row_capacity: int = 0
    """Rows that the decode steps had room for."""
    preemptions: int = 0
    reached: list[int] = field(default_factory=list)
    """Row-steps that tested a draft at each depth, counted only where its token could be kept."""
    accepted: list[int] = field(default_factory=list)
    """Those of them that accepted it."""
    steps_by_drafts: list[int] = field(default_factory=list)
    """Decode steps by their number of drafts, 0 .. depths."""
    rows_by_kept: list[int] = field(default_factory=list)
    """Row-steps by the tokens that they kept, 0 .. depths + 1."""
    started_s: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.reached = self.reached or [0] * self.depths
        self.accepted = self.accepted or [0] * self.depths
        self.steps_by_drafts = self.steps_by_drafts or [0] * (self.depths + 1)
        self.rows_by_kept = self.rows_by_kept or [0] * (self.depths + 2)

    def add_step(self, n_rows: int, capacity: int, drafts: int) -> None:
        self.steps += 1
        self.row_steps += n_rows
        self.row_capacity += capacity
        self.steps_by_drafts[drafts] += 1

    def add_row(self, kept: int, n_accepted: int, drafts: int) -> None:
        """One row of a decode step. Draft d stands in column d - 1, so it counts where that many were kept."""
        self.step_tokens += kept
        self.rows_by_kept[kept] += 1
        for index in range(min(drafts, kept)):
            if n_accepted < index:
                break
            self.reached[index] += 1
            self.accepted[index] += n_accepted > index

    def stop_clock(self) -> None:
        self.seconds = time.monotonic() - self.started_s

    def joined(self, add_up: Callable[[Sequence[float]], Sequence[float]]) -> RolloutStats:
        """The counters of all replicas, `add_up` being their element-wise sum over them."""
        total = [round(value) for value in add_up(self._counters())]
        joined = RolloutStats(self.depths, started_s=self.started_s, seconds=self.seconds)
        for name, value in zip(_SUMMED, total, strict=False):
            setattr(joined, name, value)
        rest, k = total[len(_SUMMED) :], self.depths
        joined.reached, joined.accepted = rest[:k], rest[k : 2 * k]
        joined.steps_by_drafts, joined.rows_by_kept = rest[2 * k : 3 * k + 1], rest[3 * k + 1 :]
        return joined

    def plus(self, other: RolloutStats) -> RolloutStats:
        """Two rollouts, one after the other."""
        total = self.joined(lambda mine: [a + b for a, b in zip(mine, other._counters(), strict=True)])
        total.seconds = self.seconds + other.seconds
        return total

    def _counters(self) -> list[int]:
        scalars = [getattr(self, name) for name in _SUMMED]
        return [*scalars, *self.reached, *self.accepted, *self.steps_by_drafts, *self.rows_by_kept]

    def summary(self) -> dict[str, float | int | list[float | None] | list[int] | None]:
        """As written to <output>.stats.json; a ratio without observations is null."""
        depths = zip(self.accepted, self.reached, strict=True)
        return {
            "accept_length": _ratio(self.step_tokens, self.row_steps),
            "accept_depth": [_ratio(accepted, reached) for accepted, reached in depths],
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "samples": self.samples,
            "prefilled_tokens": self.prefilled_tokens,
            "row_steps": self.row_steps,
            "occupancy": _ratio(self.row_steps, self.row_capacity),
            "preemptions": self.preemptions,
            "steps_by_drafts": self.steps_by_drafts,
            "rows_by_kept": self.rows_by_kept,
        }

    def shares(self) -> dict[str, float | None]:
        """accept_depth{d}, and accept_share{n}: the share of row-steps that kept n tokens; None without any."""
        depths = zip(self.accepted, self.reached, strict=True)
        found = {f"accept_depth{d}": _ratio(*pair) for d, pair in enumerate(depths, start=1)}
        counts = enumerate(self.rows_by_kept[1:], start=1)
        return found | {f"accept_share{n}": _ratio(count, self.row_steps) for n, count in counts}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


_SUMMED = (
    "samples",
    "tokens",
    "prefilled_tokens",
    "steps",
    "row_steps",
    "step_tokens",
    "row_capacity",
    "preemptions",
)
