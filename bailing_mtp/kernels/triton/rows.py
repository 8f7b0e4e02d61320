"""What a pass of a decode step begins with: embeddings, and where its rows stand.

Shape legend: as kernels.reference.rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embed(out, ids, embedding, first_id, v, H: tl.constexpr, H_PAD: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    ids_H = tl.arange(0, H_PAD)
    row = tl.load(ids + token).to(tl.int64) - first_id
    here = (row >= 0) & (row < v)
    x_H = tl.load(embedding + tl.where(here, row, 0) * H + ids_H, mask=here & (ids_H < H), other=0.0)
    tl.store(out + token * H + ids_H, x_H, mask=ids_H < H)


def embed(ids_R: Tensor, embedding_vH: Tensor, first_id: int) -> Tensor:
    """As kernels.reference.rows.embed."""
    (v, H), ids_R = embedding_vH.shape, ids_R.contiguous()
    assert embedding_vH.is_contiguous()
    out_RH = torch.empty(ids_R.shape[0], H, dtype=embedding_vH.dtype, device=embedding_vH.device)
    if ids_R.shape[0]:
        h_pad = triton.next_power_of_2(H)
        _embed[(ids_R.shape[0],)](
            out_RH, ids_R, embedding_vH, first_id, v, H=H, H_PAD=h_pad, num_warps=max(1, min(8, h_pad // 256))
        )
    return out_RH


@triton.jit
def _norm_pair(
    out, left, left_norm, right, right_norm, left_stride, right_stride, eps, H: tl.constexpr, H_PAD: tl.constexpr
):
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids_H = tl.arange(0, H_PAD)
    in_H = ids_H < H
    source = tl.where(side == 0, left + row * left_stride, right + row * right_stride)
    x_H = tl.load(source + ids_H, mask=in_H, other=0.0).to(tl.float32)
    weight_H = tl.load(tl.where(side == 0, left_norm, right_norm) + ids_H, mask=in_H, other=0.0).to(tl.float32)
    normed_H = x_H * tl.rsqrt(tl.sum(x_H * x_H, axis=0) / H + eps) * weight_H
    tl.store(out + row * (2 * H) + side * H + ids_H, normed_H.to(out.dtype.element_ty), mask=in_H)


def norm_pair(left_RH: Tensor, left_norm_H: Tensor, right_RH: Tensor, right_norm_H: Tensor, eps: float) -> Tensor:
    """As kernels.reference.rows.norm_pair."""
    (R, H), h_pad = left_RH.shape, triton.next_power_of_2(left_RH.shape[1])
    assert left_RH.shape == right_RH.shape and left_RH.dtype == right_RH.dtype
    assert left_norm_H.dtype == right_norm_H.dtype and left_RH.stride(1) == right_RH.stride(1) == 1
    out = torch.empty(R, 2 * H, dtype=left_RH.dtype, device=left_RH.device)
    if R:
        strides, warps = (left_RH.stride(0), right_RH.stride(0)), max(1, min(8, h_pad // 256))
        _norm_pair[(R, 2)](
            out, left_RH, left_norm_H, right_RH, right_norm_H, *strides, eps, H=H, H_PAD=h_pad, num_warps=warps
        )
    return out


@triton.jit
def _step_rows(
    position_n, table_nM, position_N, table_NM, slots_n, offset, table_stride, M, M_TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_n + row).to(tl.int64)
    position = tl.load(position_N + slot).to(tl.int64) + offset
    tl.store(position_n + row, tl.maximum(position, 0))
    for m in range(0, M, M_TILE):
        ids_M = m + tl.arange(0, M_TILE)
        block_M = tl.load(table_NM + slot * table_stride + ids_M, mask=ids_M < M, other=0)
        tl.store(table_nM + row * M + ids_M, block_M, mask=ids_M < M)


def step_rows(
    position_N: Tensor, block_table_NM: Tensor, slots_n: Tensor, offset: int
) -> tuple[Tensor, Tensor]:
    """As kernels.reference.rows.step_rows."""
    n, M, device = slots_n.shape[0], block_table_NM.shape[1], slots_n.device
    assert position_N.is_contiguous() and slots_n.is_contiguous() and block_table_NM.stride(1) == 1
    position_n = torch.empty(n, dtype=torch.int64, device=device)
    table_nM = torch.empty(n, M, dtype=block_table_NM.dtype, device=device)
    if n:
        _step_rows[(n,)](
            position_n,
            table_nM,
            position_N,
            block_table_NM,
            slots_n,
            offset,
            block_table_NM.stride(0),
            M,
            M_TILE=max(1, min(1024, triton.next_power_of_2(M))),
            num_warps=1,
        )
    return position_n, table_nM
