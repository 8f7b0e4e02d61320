"""A step's packed output, one tensor for one transfer, as what each row gained.

Shapes: n rows, S tokens of a row, W = 4 * S + 4 words of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowResult:
    """What one row gained, on the host."""

    tokens: list[int]
    n_accepted: int
    state: int
    error: bool
    raw: list[float]
    processed: list[float]
    kept_logmass: list[float]


def packed_words(S: int) -> int:
    """Words of one row (W)."""
    return 4 * S + 4


def unpack(packed: Tensor, S: int, n_rows: int) -> list[RowResult]:
    """The first `n_rows` rows of a packed output on the host, whatever its shape; kernels.reference.settle packs it."""
    packed_nW = packed.view(-1, packed_words(S))[:n_rows]
    log_probs = packed_nW[:, S + 4 :].contiguous().view(torch.float32).view(-1, 3, S)
    results = []
    for numbers, (raw, processed, mass) in zip(packed_nW[:, : S + 4].tolist(), log_probs.tolist(), strict=True):
        kept, n_accepted, state, error = numbers[S:]
        results.append(
            RowResult(
                numbers[:kept], n_accepted, state, bool(error), raw[:kept], processed[:kept], mass[:kept]
            )
        )
    return results
