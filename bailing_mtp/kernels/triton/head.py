"""What losses read off a chunk of logits: one pass over them each.

Shape legend: as kernels.reference.head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.reference.head import RowStats

TILE = 4096
GRAD_TILE = 2048
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _row_stats(
    max_out, sum_out, weighted_out, best_out, target_out, logits, target, v, stride, scale, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    max_l = tl.full([TILE], LOWEST, tl.float32)
    sum_l = tl.zeros([TILE], tl.float32)
    weighted_l = tl.zeros([TILE], tl.float32)
    best_l = lanes
    for start in range(0, v, TILE):
        ids = start + lanes
        x = tl.load(logits + row * stride + ids, mask=ids < v, other=float("-inf")) * scale
        higher = x > max_l
        new_l = tl.where(higher, x, max_l)
        fall = max_l - new_l
        kept = tl.exp(fall)
        gap = x - new_l
        added = tl.exp(gap)
        # Moving the reference by `fall` moves every weighted term with it.
        weighted_l = (weighted_l + sum_l * fall) * kept + tl.where(added == 0.0, 0.0, added * gap)
        sum_l = sum_l * kept + added
        best_l = tl.where(higher, ids, best_l)
        max_l = new_l
    max_x = tl.max(max_l, axis=0)
    fall = max_l - max_x
    kept = tl.exp(fall)
    tl.store(max_out + row, max_x)
    tl.store(sum_out + row, tl.sum(sum_l * kept, axis=0))
    moved = (weighted_l + sum_l * fall) * kept
    tl.store(weighted_out + row, tl.sum(tl.where(kept == 0.0, 0.0, moved), axis=0))
    tl.store(best_out + row, tl.min(tl.where(max_l == max_x, best_l, 2147483647), axis=0).to(tl.int64))
    place = tl.load(target + row)
    here = (place >= 0) & (place < v)
    tl.store(target_out + row, tl.load(logits + row * stride + place, mask=here, other=0.0) * scale)


def row_stats(logits_tv: Tensor, target_t: Tensor, scale: float) -> RowStats:
    """As kernels.reference.head.row_stats; of a row of -inf the maximum is the lowest float."""
    assert logits_tv.dtype == torch.float32 and logits_tv.stride(1) == 1
    (t, v), device = logits_tv.shape, logits_tv.device
    floats = [torch.empty(t, dtype=torch.float32, device=device) for _ in range(4)]
    best_t = torch.empty(t, dtype=torch.int64, device=device)
    stats = RowStats(*floats[:3], best_t, floats[3])
    if t:
        tile = min(TILE, triton.next_power_of_2(v))
        _row_stats[(t,)](
            *stats, logits_tv, target_t.contiguous(), v, logits_tv.stride(0), scale, TILE=tile, num_warps=8
        )
    return stats


@triton.jit
def _pair_stats(mass_out, cross_out, p, p_lse, p_rows, q, q_lse, v, p_stride, q_stride, scale, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p_row = tl.load(p_rows + row)
    lanes = tl.arange(0, TILE)
    p_shift, q_shift = tl.load(p_lse + p_row), tl.load(q_lse + row)
    mass_l = tl.zeros([TILE], tl.float32)
    cross_l = tl.zeros([TILE], tl.float32)
    for start in range(0, v, TILE):
        ids = start + lanes
        p_prob = tl.exp(tl.load(p + p_row * p_stride + ids, mask=ids < v, other=float("-inf")) * scale - p_shift)
        q_log = tl.load(q + row * q_stride + ids, mask=ids < v, other=float("-inf")) * scale - q_shift
        mass_l += tl.minimum(p_prob, tl.exp(q_log))
        cross_l += tl.where(p_prob == 0.0, 0.0, p_prob * q_log)
    tl.store(mass_out + row, tl.sum(mass_l, axis=0))
    tl.store(cross_out + row, tl.sum(cross_l, axis=0))


def pair_stats(
    p_rv: Tensor, p_lse_r: Tensor, p_rows_t: Tensor, q_tv: Tensor, q_lse_t: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """As kernels.reference.head.pair_stats."""
    assert p_rv.shape[1] == q_tv.shape[1] and p_rv.stride(1) == 1 and q_tv.stride(1) == 1
    t, v = q_tv.shape
    mass_t, cross_t = (torch.empty(t, dtype=torch.float32, device=q_tv.device) for _ in range(2))
    if t:
        tile = min(TILE, triton.next_power_of_2(v))
        places = p_lse_r.contiguous(), p_rows_t.contiguous()
        _pair_stats[(t,)](
            mass_t, cross_t, p_rv, *places, q_tv, q_lse_t.contiguous(), v, p_rv.stride(0), q_tv.stride(0), scale,
            TILE=tile, num_warps=8,
        )  # fmt: skip
    return mass_t, cross_t


@triton.jit
def _target_grad(out, logits, lse, target, grad, v, stride, scale, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    upstream = tl.load(grad + row) * scale
    x = tl.load(logits + row * stride + ids, mask=ids < v, other=float("-inf"))
    hit = tl.where(ids == tl.load(target + row), 1.0, 0.0)
    grad_v = (hit - tl.exp(x * scale - tl.load(lse + row))) * upstream
    tl.store(out + row * v + ids, grad_v.to(out.dtype.element_ty), mask=ids < v)


def target_grad(
    logits_tv: Tensor, lse_t: Tensor, target_t: Tensor, grad_t: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """As kernels.reference.head.target_grad."""
    t, v = logits_tv.shape
    out_tv = torch.empty(t, v, dtype=dtype, device=logits_tv.device)
    if t:
        _target_grad[(t, triton.cdiv(v, GRAD_TILE))](
            out_tv, logits_tv, lse_t.contiguous(), target_t.contiguous(), grad_t.contiguous(), v, logits_tv.stride(0),
            scale, TILE=GRAD_TILE, num_warps=4,
        )  # fmt: skip
    return out_tv


@triton.jit
def _soft_grad(out, q, q_lse, p, p_lse, p_rows, grad, v, q_stride, p_stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p_row = tl.load(p_rows + row)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    q_prob = tl.exp(tl.load(q + row * q_stride + ids, mask=ids < v, other=float("-inf")) - tl.load(q_lse + row))
    p_x = tl.load(p + p_row * p_stride + ids, mask=ids < v, other=float("-inf"))
    p_prob = tl.exp(p_x - tl.load(p_lse + p_row))
    grad_v = (q_prob - p_prob) * tl.load(grad + row)
    tl.store(out + row * v + ids, grad_v.to(out.dtype.element_ty), mask=ids < v)


def soft_grad(
    q_tv: Tensor, q_lse_t: Tensor, p_rv: Tensor, p_lse_r: Tensor, p_rows_t: Tensor, grad_t: Tensor, dtype: torch.dtype
) -> Tensor:
    """As kernels.reference.head.soft_grad."""
    t, v = q_tv.shape
    out_tv = torch.empty(t, v, dtype=dtype, device=q_tv.device)
    if t:
        _soft_grad[(t, triton.cdiv(v, GRAD_TILE))](
            out_tv, q_tv, q_lse_t.contiguous(), p_rv, p_lse_r.contiguous(), p_rows_t.contiguous(),
            grad_t.contiguous(), v, q_tv.stride(0), p_rv.stride(0), TILE=GRAD_TILE, num_warps=4,
        )  # fmt: skip
    return out_tv
