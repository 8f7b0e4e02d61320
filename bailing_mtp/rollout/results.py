"""A step's packed output, one tensor for one transfer, as what each row gained.

Shapes: n rows, S tokens of a row, W words of a row: 4 * S + 4, and those of routes where they are recorded;
L expert layers, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bailing_mtp.rollout.routes import RouteFormat


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
    routes: np.ndarray | None = None
    """[n_accepted + 1, L, k], of the tokens that the step committed; None where nothing is recorded."""


def packed_words(S: int, routes: RouteFormat | None = None) -> int:
    """Words of one row (W)."""
    return 4 * S + 4 + (0 if routes is None else routes.words(S))


def unpack(packed: Tensor, S: int, n_rows: int, routes: RouteFormat | None = None) -> list[RowResult]:
    """The first `n_rows` rows of a packed output on the host, whatever its shape.

    A row: as kernels.reference.settle.settle packs it, then the bits of the routes.
    """
    packed_nW = packed.view(-1, packed_words(S, routes))[:n_rows]
    log_probs = packed_nW[:, S + 4 : 4 * S + 4].contiguous().view(torch.float32).view(-1, 3, S)
    fed = None if routes is None else routes.unpack(packed_nW[:, 4 * S + 4 :], S)
    results = []
    for row, (numbers, (raw, processed, mass)) in enumerate(
        zip(packed_nW[:, : S + 4].tolist(), log_probs.tolist(), strict=True)
    ):
        kept, n_accepted, state, error = numbers[S:]
        # A copy, so that no row keeps the rejected tokens of all rows alive.
        committed = None if fed is None else fed[row, : n_accepted + 1].copy()
        results.append(
            RowResult(
                numbers[:kept], n_accepted, state, bool(error), raw[:kept], processed[:kept], mass[:kept], committed
            )
        )
    return results
