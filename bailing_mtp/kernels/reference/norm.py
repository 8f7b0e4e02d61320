"""RMSNorm, alone and fused with a residual addition, in plain torch.

Shape legend: R rows, H channels.
"""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; reduced in fp32, in x's dtype."""
    return F.rms_norm(x_RH, weight_H.shape, weight_H, eps)


def add_rms_norm(x_RH: Tensor, delta_RH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum x + delta in x's dtype, and its RMSNorm."""
    sum_RH = x_RH + delta_RH
    return sum_RH, rms_norm(sum_RH, weight_H, eps)
