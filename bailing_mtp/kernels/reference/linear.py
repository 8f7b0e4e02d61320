"""Projections of a decode step, in plain torch.

Shape legend: R rows, H inputs, N outputs.
"""

import torch.nn.functional as F
from torch import Tensor


def linear(x_RH: Tensor, weight_NH: Tensor) -> Tensor:
    """x @ weight^T, [R, N] in x's dtype, summed in fp32 or wider."""
    return F.linear(x_RH, weight_NH)


def linears(x_RH: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`linear` with each of several weights [N, H]; the results' rows may be strided."""
    return tuple(F.linear(x_RH, weight_NH) for weight_NH in weights)
