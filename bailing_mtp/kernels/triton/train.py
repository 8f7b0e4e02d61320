"""Element-wise pieces of a training layer with their gradients, each in one pass.

Shape legend: as kernels.reference.train; r rows of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.triton.router import choose
from bailing_mtp.kernels.triton.swiglu import act

__all__ = ["choose", "gated_norm", "gated_norm_grad", "sum_choices", "weighted_swiglu", "weighted_swiglu_grad"]

SWIGLU_TILE = 1024
CHOICES_TILE = 512
NORM_ROWS = 32


@triton.jit
def _weighted_swiglu(
    out, gate_up, weights, limit, F: tl.constexpr, TILE: tl.constexpr, LIMITED: tl.constexpr, WEIGHTED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    gates = gate_up + row * (2 * F)
    for start in range(0, F, TILE):
        ids = start + tl.arange(0, TILE)
        gate_F = tl.load(gates + ids, mask=ids < F, other=0.0).to(tl.float32)
        up_F = tl.load(gates + F + ids, mask=ids < F, other=0.0).to(tl.float32)
        act_F = act(gate_F, up_F, limit, LIMITED)
        if WEIGHTED:
            act_F *= tl.load(weights + row).to(tl.float32)
        tl.store(out + row * F + ids, act_F.to(out.dtype.element_ty), mask=ids < F)


@triton.jit
def _weighted_swiglu_grad(
    gate_up_grad,
    weights_grad,
    grad,
    gate_up,
    weights,
    limit,
    F: tl.constexpr,
    TILE: tl.constexpr,
    LIMITED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gates, grads = gate_up + row * (2 * F), gate_up_grad + row * (2 * F)
    weight_sum = tl.zeros([TILE], tl.float32)
    for start in range(0, F, TILE):
        ids = start + tl.arange(0, TILE)
        in_F = ids < F
        gate_F = tl.load(gates + ids, mask=in_F, other=0.0).to(tl.float32)
        up_F = tl.load(gates + F + ids, mask=in_F, other=0.0).to(tl.float32)
        grad_F = tl.load(grad + row * F + ids, mask=in_F, other=0.0).to(tl.float32)
        sigmoid_F = tl.sigmoid(gate_F)
        silu_F = gate_F * sigmoid_F
        slope_F = sigmoid_F * (1.0 + gate_F * (1.0 - sigmoid_F))
        passes_F = in_F
        if LIMITED:
            slope_F = tl.where(silu_F <= limit, slope_F, 0.0)
            passes_F = tl.abs(up_F) <= limit
            silu_F = tl.minimum(silu_F, limit)
            up_F = tl.minimum(tl.maximum(up_F, -limit), limit)
        if WEIGHTED:
            weight_sum += grad_F * silu_F * up_F
            grad_F *= tl.load(weights + row).to(tl.float32)
        up_grad_F = tl.where(passes_F, grad_F * silu_F, 0.0)
        tl.store(grads + ids, (grad_F * up_F * slope_F).to(gate_up_grad.dtype.element_ty), mask=in_F)
        tl.store(grads + F + ids, up_grad_F.to(gate_up_grad.dtype.element_ty), mask=in_F)
    if WEIGHTED:
        tl.store(weights_grad + row, tl.sum(weight_sum, axis=0))


def _swiglu_tile(F: int) -> dict[str, int]:
    tile = min(SWIGLU_TILE, triton.next_power_of_2(F))
    return {"F": F, "TILE": tile, "num_warps": max(1, tile // 256)}


def weighted_swiglu(gate_up_R2F: Tensor, weights_R: Tensor | None, limit: float | None) -> Tensor:
    """As kernels.reference.train.weighted_swiglu; any leading dimensions where there are no weights."""
    gate_up_R2F, F = gate_up_R2F.contiguous(), gate_up_R2F.shape[-1] // 2
    out_RF = torch.empty(*gate_up_R2F.shape[:-1], F, dtype=gate_up_R2F.dtype, device=gate_up_R2F.device)
    if out_RF.numel():
        _weighted_swiglu[(out_RF.numel() // F,)](
            out_RF,
            gate_up_R2F,
            out_RF if weights_R is None else weights_R.contiguous(),
            0.0 if limit is None else limit,
            LIMITED=limit is not None,
            WEIGHTED=weights_R is not None,
            **_swiglu_tile(F),
        )
    return out_RF


def weighted_swiglu_grad(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None, limit: float | None
) -> tuple[Tensor, Tensor | None]:
    """As kernels.reference.train.weighted_swiglu_grad."""
    grad_RF, gate_up_R2F, F = grad_RF.contiguous(), gate_up_R2F.contiguous(), grad_RF.shape[-1]
    gate_up_grad = torch.empty(gate_up_R2F.shape, dtype=gate_up_R2F.dtype, device=gate_up_R2F.device)
    weights_grad_R = None
    if weights_R is not None:
        weights_grad_R = torch.empty(weights_R.shape[0], dtype=torch.float32, device=weights_R.device)
    if grad_RF.numel():
        _weighted_swiglu_grad[(grad_RF.numel() // F,)](
            gate_up_grad,
            gate_up_grad if weights_grad_R is None else weights_grad_R,
            grad_RF,
            gate_up_R2F,
            grad_RF if weights_R is None else weights_R.contiguous(),
            0.0 if limit is None else limit,
            LIMITED=limit is not None,
            WEIGHTED=weights_R is not None,
            **_swiglu_tile(F),
        )
    return gate_up_grad, weights_grad_R


@triton.jit
def _gated_norm(
    out,
    x,
    gate,
    weight,
    rows,
    gate_stride,
    eps,
    h: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    ids_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ids_V = tl.arange(0, V_PAD)
    mask_rV = (ids_r < rows)[:, None] & (ids_V < V)[None, :]
    at_rV = ids_r[:, None] * V + ids_V[None, :]
    gate_at_rV = (ids_r // h)[:, None] * gate_stride + (ids_r % h)[:, None] * V + ids_V[None, :]
    x_rV = tl.load(x + at_rV, mask=mask_rV, other=0.0).to(tl.float32)
    gate_rV = tl.load(gate + gate_at_rV, mask=mask_rV, other=0.0).to(tl.float32)
    weight_V = tl.load(weight + ids_V, mask=ids_V < V, other=0.0).to(tl.float32)
    inverse_r = tl.rsqrt(tl.sum(x_rV * x_rV, axis=1) / V + eps)
    out_rV = x_rV * inverse_r[:, None] * weight_V[None, :] * tl.sigmoid(gate_rV)
    tl.store(out + at_rV, out_rV.to(out.dtype.element_ty), mask=mask_rV)


@triton.jit
def _gated_norm_grad(
    x_grad,
    gate_grad,
    weight_grads,
    grad,
    x,
    gate,
    weight,
    rows,
    gate_stride,
    eps,
    h: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    ids_r = program * ROWS + tl.arange(0, ROWS)
    ids_V = tl.arange(0, V_PAD)
    mask_rV = (ids_r < rows)[:, None] & (ids_V < V)[None, :]
    at_rV = ids_r[:, None] * V + ids_V[None, :]
    gate_at_rV = (ids_r // h)[:, None] * gate_stride + (ids_r % h)[:, None] * V + ids_V[None, :]
    grad_rV = tl.load(grad + at_rV, mask=mask_rV, other=0.0).to(tl.float32)
    x_rV = tl.load(x + at_rV, mask=mask_rV, other=0.0).to(tl.float32)
    sigmoid_rV = tl.sigmoid(tl.load(gate + gate_at_rV, mask=mask_rV, other=0.0).to(tl.float32))
    weight_V = tl.load(weight + ids_V, mask=ids_V < V, other=0.0).to(tl.float32)
    inverse_r = tl.rsqrt(tl.sum(x_rV * x_rV, axis=1) / V + eps)
    normed_rV = x_rV * inverse_r[:, None]
    through_rV = grad_rV * sigmoid_rV
    scaled_rV = through_rV * weight_V[None, :]
    gate_grad_rV = grad_rV * normed_rV * weight_V[None, :] * sigmoid_rV * (1.0 - sigmoid_rV)
    mean_r = tl.sum(scaled_rV * normed_rV, axis=1) / V
    x_grad_rV = inverse_r[:, None] * (scaled_rV - normed_rV * mean_r[:, None])
    tl.store(x_grad + at_rV, x_grad_rV.to(x_grad.dtype.element_ty), mask=mask_rV)
    tl.store(gate_grad + at_rV, gate_grad_rV.to(gate_grad.dtype.element_ty), mask=mask_rV)
    tl.store(weight_grads + program * V + ids_V, tl.sum(through_rV * normed_rV, axis=0), mask=ids_V < V)


def _norm_tile(x_ThV: Tensor) -> dict[str, int]:
    h, V = x_ThV.shape[1:]
    return {"h": h, "V": V, "V_PAD": triton.next_power_of_2(V), "ROWS": NORM_ROWS, "num_warps": 4}


def _heads_together(gate_ThV: Tensor) -> Tensor:
    """The gate with its heads' channels side by side; tokens may lie further apart."""
    in_place = gate_ThV.stride(2) == 1 and gate_ThV.stride(1) == gate_ThV.shape[2]
    return gate_ThV if in_place else gate_ThV.contiguous()


def gated_norm(x_ThV: Tensor, gate_ThV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """As kernels.reference.train.gated_norm."""
    x_ThV, gate_ThV, rows = x_ThV.contiguous(), _heads_together(gate_ThV), x_ThV.shape[0] * x_ThV.shape[1]
    out_ThV = torch.empty(x_ThV.shape, dtype=x_ThV.dtype, device=x_ThV.device)
    if rows:
        grid = (triton.cdiv(rows, NORM_ROWS),)
        _gated_norm[grid](out_ThV, x_ThV, gate_ThV, weight_V, rows, gate_ThV.stride(0), eps, **_norm_tile(x_ThV))
    return out_ThV


def gated_norm_grad(
    grad_ThV: Tensor, x_ThV: Tensor, gate_ThV: Tensor, weight_V: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As kernels.reference.train.gated_norm_grad."""
    grad_ThV, x_ThV, gate_ThV = grad_ThV.contiguous(), x_ThV.contiguous(), _heads_together(gate_ThV)
    rows = x_ThV.shape[0] * x_ThV.shape[1]
    programs = triton.cdiv(rows, NORM_ROWS)
    x_grad_ThV = torch.empty(x_ThV.shape, dtype=x_ThV.dtype, device=x_ThV.device)
    gate_grad_ThV = torch.empty(x_ThV.shape, dtype=gate_ThV.dtype, device=x_ThV.device)
    weight_grads = torch.empty(programs, weight_V.shape[0], dtype=torch.float32, device=x_ThV.device)
    if rows:
        _gated_norm_grad[(programs,)](
            x_grad_ThV,
            gate_grad_ThV,
            weight_grads,
            grad_ThV,
            x_ThV,
            gate_ThV,
            weight_V,
            rows,
            gate_ThV.stride(0),
            eps,
            **_norm_tile(x_ThV),
        )
    return x_grad_ThV, gate_grad_ThV, weight_grads.sum(0).to(weight_V.dtype)


@triton.jit
def _sum_choices(out, y, place, A, H, k: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    sum_H = tl.zeros([TILE], tl.float32)
    for choice in tl.static_range(k):
        row = tl.load(place + token * k + choice).to(tl.int64)
        sum_H += tl.load(y + row * H + ids, mask=(ids < H) & (row < A), other=0.0).to(tl.float32)
    tl.store(out + token * H + ids, sum_H.to(out.dtype.element_ty), mask=ids < H)


def sum_choices(y_AH: Tensor, place_Tk: Tensor) -> Tensor:
    """As kernels.reference.train.sum_choices."""
    y_AH, place_Tk = y_AH.contiguous(), place_Tk.contiguous()
    (T, k), (A, H) = place_Tk.shape, y_AH.shape
    out_TH = torch.empty(T, H, dtype=y_AH.dtype, device=y_AH.device)
    if T:
        tile = min(CHOICES_TILE, triton.next_power_of_2(H))
        grid = (T, triton.cdiv(H, tile))
        _sum_choices[grid](out_TH, y_AH, place_Tk, A, H, k=k, TILE=tile, num_warps=max(1, tile // 256))
    return out_TH
