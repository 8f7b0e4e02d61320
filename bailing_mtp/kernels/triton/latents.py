"""Small kernels around latent attention: rotation by position, and writing the paged cache.

Shape legend: T tokens, h heads, r rotary size, x values of a cached row, B blocks and one scratch block,
b tokens of a block, M blocks of a table.

Source: Bailing V3 spec section 2.2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    out,
    x,
    table,
    token_stride,
    head_stride,
    h: tl.constexpr,
    r: tl.constexpr,
    H_PAD: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    ids_h1, ids_1r = tl.arange(0, H_PAD)[:, None], tl.arange(0, 2 * PAIRS)[None, :]
    ids_1p = tl.arange(0, PAIRS)[None, :]
    mask_hr = (ids_h1 < h) & (ids_1r < r)
    cos_1p = tl.load(table + token * r + ids_1p, mask=ids_1p < r // 2, other=0.0)
    sin_1p = tl.load(table + token * r + r // 2 + ids_1p, mask=ids_1p < r // 2, other=0.0)
    x_hr = tl.load(x + token * token_stride + ids_h1 * head_stride + ids_1r, mask=mask_hr, other=0.0)
    even_hp, odd_hp = tl.split(tl.reshape(x_hr.to(tl.float32), [H_PAD, PAIRS, 2]))
    turned = tl.join(even_hp * cos_1p - odd_hp * sin_1p, even_hp * sin_1p + odd_hp * cos_1p)
    turned_hr = tl.reshape(turned, [H_PAD, 2 * PAIRS]).to(out.dtype.element_ty)
    tl.store(out + (token * h + ids_h1) * r + ids_1r, turned_hr, mask=mask_hr)


def apply_rope(x_Thr: Tensor, table: Tensor) -> Tensor:
    """As kernels.reference.mla_verify.apply_rope."""
    T, h, r = x_Thr.shape
    assert x_Thr.stride(2) == 1 and table.is_contiguous() and table.dtype == torch.float32
    out_Thr = torch.empty(T, h, r, dtype=x_Thr.dtype, device=x_Thr.device)
    if T:
        _rotate[(T,)](
            out_Thr,
            x_Thr,
            table,
            x_Thr.stride(0),
            x_Thr.stride(1),
            h=h,
            r=r,
            H_PAD=triton.next_power_of_2(h),
            PAIRS=triton.next_power_of_2(r // 2),
            num_warps=1 if h * r <= 256 else 2,
        )
    return out_Thr


@triton.jit
def _write(
    latents,
    rows,
    block_table,
    position_T,
    row_stride,
    table_stride,
    table_blocks,
    scratch,
    b: tl.constexpr,
    x: tl.constexpr,
    X_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    ids_x = tl.arange(0, X_PAD)
    position = tl.load(position_T + token).to(tl.int64)
    entry = position // b
    owned = entry < table_blocks
    block = tl.load(block_table + token * table_stride + entry, mask=owned, other=0).to(tl.int64)
    block = tl.where(owned, block, scratch)
    row_x = tl.load(rows + token * row_stride + ids_x, mask=ids_x < x)
    target = latents + (block * b + position % b) * x + ids_x
    tl.store(target, row_x.to(latents.dtype.element_ty), mask=ids_x < x)


def write_latents(rows_Tx: Tensor, latents_Bbx: Tensor, block_table_TM: Tensor, position_T: Tensor) -> None:
    """As kernels.reference.mla_verify.write_latents."""
    T, x = rows_Tx.shape
    assert latents_Bbx.is_contiguous() and rows_Tx.stride(1) == 1 and block_table_TM.stride(1) == 1
    if T:
        _write[(T,)](
            latents_Bbx,
            rows_Tx,
            block_table_TM,
            position_T,
            rows_Tx.stride(0),
            block_table_TM.stride(0),
            block_table_TM.shape[1],
            latents_Bbx.shape[0] - 1,
            b=latents_Bbx.shape[1],
            x=x,
            X_PAD=triton.next_power_of_2(x),
            num_warps=1 if x <= 256 else 4,
        )
