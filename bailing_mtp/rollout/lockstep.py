"""Shapes that ranks must agree on before they run.

Replicas (tensor-parallel groups) of one expert-parallel group exchange tokens in every expert layer, so they make
the same calls with the same shapes; a replica with less to do pads, one without work runs padding only. All of
them stop together. Where ep <= tp a replica is alone and its own wishes are the answer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from bailing_mtp.parallel.context import ParallelContext

_SMALL_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


class Shapes(NamedTuple):
    """Sizes of one iteration: padded prefill tokens, starting rows, decoding rows."""

    prefill_tokens: int
    starters: int
    decode_rows: int

    @property
    def is_idle(self) -> bool:
        return self == (0, 0, 0)


class Lockstep:
    """Agreement of one expert-parallel group, by one small reduction per iteration."""

    def __init__(self, context: ParallelContext) -> None:
        self._group = context.ep_group if context.ep > context.tp else None
        self._device = context.device

    def agree(self, wanted: Shapes) -> Shapes:
        """The largest of each size over the group. Every rank must call it the same number of times."""
        if self._group is None:
            return wanted
        sizes = torch.tensor(wanted, device=self._device)
        dist.all_reduce(sizes, dist.ReduceOp.MAX, group=self._group)
        return Shapes(*sizes.tolist())


def bucket(rows: int) -> int:
    """Rows of a step that runs `rows` of them: the next of a few sizes, so that steps come in few shapes."""
    if rows <= 0:
        return 0
    if rows <= _SMALL_BUCKETS[-1]:
        return next(size for size in _SMALL_BUCKETS if size >= rows)
    return -(-rows // 32) * 32
