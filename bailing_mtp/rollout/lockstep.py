"""Shapes that ranks must agree on before they run.

Replicas (tensor-parallel groups) of one expert-parallel group exchange tokens in every expert layer, so they make
the same calls with the same shapes; a replica with less to do pads, one without work runs padding only. All of
them stop together. Where ep <= tp a replica is alone and its own wishes are the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import NamedTuple

import torch
import torch.distributed as dist

from bailing_mtp.parallel.context import ParallelContext, host_group
from bailing_mtp.rollout.distribution import StepRules

_SMALL_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_VOTE = 1 << 16


class Shapes(NamedTuple):
    """Sizes of one iteration (padded prefill tokens, starting rows, decoding rows), and what its rows ask for."""

    prefill_tokens: int
    starters: int
    decode_rows: int
    rules: StepRules
    drafts: int = 0
    """Of the decode step. The first rank that decodes any row decides: what ranks have measured differs."""

    @property
    def is_idle(self) -> bool:
        return self[:3] == (0, 0, 0)


class Lockstep:
    """Agreement of the ranks that communicate inside a step, by small reductions on the host."""

    def __init__(self, context: ParallelContext, adaptive: bool = False) -> None:
        """adaptive: ranks may wish for different drafts. Collective."""
        self._replicas_agree = context.ep > context.tp
        self._agree = self._replicas_agree or (adaptive and context.tp > 1)
        self._group = host_group(context.ep_group if self._replicas_agree else context.tp_group, context.device)

    def agree(self, wanted: Shapes) -> Shapes:
        """The largest of each size over the group. Every rank must call it the same number of times."""
        if not self._agree:
            return wanted
        # A vote weighs more than any number of drafts, and more on an earlier rank; none without rows.
        weight = 0 if self._group is None or not wanted.decode_rows else self._group.size() - self._group.rank()
        vote = weight * _VOTE + wanted.drafts
        prefill, starters, decode, vote, *flags = self._largest([*wanted[:3], vote, *astuple(wanted.rules)])
        return Shapes(prefill, starters, decode, StepRules(*map(bool, flags)), vote % _VOTE)

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return bool(self._largest([flag])[0])

    def _largest(self, values: Sequence[int]) -> list[int]:
        numbers = torch.tensor([int(value) for value in values])
        if self._group is not None:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return numbers.tolist()


def bucket(rows: int) -> int:
    """Rows of a step that runs `rows` of them: the next of a few sizes, so that steps come in few shapes."""
    if rows <= 0:
        return 0
    if rows <= _SMALL_BUCKETS[-1]:
        return next(size for size in _SMALL_BUCKETS if size >= rows)
    return -(-rows // 32) * 32


def buckets(rows: int) -> tuple[int, ...]:
    """All sizes of steps of up to `rows` rows."""
    return tuple(sorted({bucket(count) for count in range(1, rows + 1)}))
