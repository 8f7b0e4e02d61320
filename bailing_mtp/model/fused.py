"""Autograd over the element-wise training kernels: one pass forward, one backward, and only inputs are kept.

`kernels` is kernels.reference.train or kernels.triton.train. Shape legend: as there.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def swiglu(kernels: ModuleType, gate_up_R2F: Tensor, limit: float | None) -> Tensor:
    """SwiGLU of the two halves of the last dimension; any leading dimensions."""
    return _Swiglu.apply(kernels, limit, gate_up_R2F)


def gated_norm(kernels: ModuleType, x_ThV: Tensor, gate_ThV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """RMSNorm over each head's channels, times sigmoid(gate)."""
    return _GatedNorm.apply(kernels, eps, x_ThV, gate_ThV, weight_V)


class _Swiglu(Function):
    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, limit: float | None, gate_up_R2F: Tensor) -> Tensor:
        ctx.kernels, ctx.limit = kernels, limit
        ctx.save_for_backward(gate_up_R2F)
        return kernels.weighted_swiglu(gate_up_R2F, None, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up_R2F,) = ctx.saved_tensors
        return None, None, ctx.kernels.weighted_swiglu_grad(grad_RF, gate_up_R2F, None, ctx.limit)[0]


class _GatedNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: ModuleType, eps: float, x_ThV: Tensor, gate_ThV: Tensor, weight_V: Tensor
    ) -> Tensor:
        ctx.kernels, ctx.eps = kernels, eps
        ctx.save_for_backward(x_ThV, gate_ThV, weight_V)
        return kernels.gated_norm(x_ThV, gate_ThV, weight_V, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ThV: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.kernels.gated_norm_grad(grad_ThV, *ctx.saved_tensors, ctx.eps)
