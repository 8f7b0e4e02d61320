"""RMSNorm, alone and fused with a residual addition: one program per row.

Shape legend: R rows, H channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(
    out,
    sum_out,
    x,
    delta,
    weight,
    x_stride,
    delta_stride,
    eps,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids_H = tl.arange(0, H_PAD)
    in_H = ids_H < H
    x_H = tl.load(x + row * x_stride + ids_H, mask=in_H, other=0.0).to(tl.float32)
    weight_H = tl.load(weight + ids_H, mask=in_H, other=0.0).to(tl.float32)
    if ADD:
        x_H += tl.load(delta + row * delta_stride + ids_H, mask=in_H, other=0.0).to(tl.float32)
        rounded_H = x_H.to(sum_out.dtype.element_ty)
        tl.store(sum_out + row * H + ids_H, rounded_H, mask=in_H)
        x_H = rounded_H.to(tl.float32)
    normed_H = x_H * tl.rsqrt(tl.sum(x_H * x_H, axis=0) / H + eps) * weight_H
    tl.store(out + row * H + ids_H, normed_H.to(out.dtype.element_ty), mask=in_H)


def _launch(x_RH: Tensor, delta_RH: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    H, delta = weight_H.shape[0], x_RH if delta_RH is None else delta_RH
    x_RH, delta = x_RH.reshape(-1, H), delta.reshape(-1, H)
    assert x_RH.stride(1) == 1 and delta.stride(1) == 1
    out_RH = torch.empty(x_RH.shape[0], H, dtype=x_RH.dtype, device=x_RH.device)
    sum_RH = out_RH
    if delta_RH is not None:
        sum_RH = torch.empty(x_RH.shape[0], H, dtype=x_RH.dtype, device=x_RH.device)
    h_pad = triton.next_power_of_2(H)
    if x_RH.shape[0]:
        _rms_norm[(x_RH.shape[0],)](
            out_RH,
            sum_RH,
            x_RH,
            delta,
            weight_H,
            x_RH.stride(0),
            delta.stride(0),
            eps,
            H=H,
            H_PAD=h_pad,
            ADD=delta_RH is not None,
            num_warps=max(1, min(8, h_pad // 256)),
        )
    return sum_RH, out_RH


def rms_norm(x_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """As kernels.reference.norm.rms_norm; any leading dimensions."""
    return _launch(x_RH, None, weight_H, eps)[1].view(x_RH.shape)


def add_rms_norm(x_RH: Tensor, delta_RH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As kernels.reference.norm.add_rms_norm."""
    assert x_RH.shape == delta_RH.shape and x_RH.dtype == delta_RH.dtype
    sum_RH, out_RH = _launch(x_RH, delta_RH, weight_H, eps)
    return sum_RH.view(x_RH.shape), out_RH.view(x_RH.shape)
