"""Latent attention of a decode step but for the attention itself: three launches around it.

Shape legend: as kernels.reference.mla_step; m rows, c summed and u output channels of a tile, p = r / 2 pairs.

Source: Bailing V3 spec section 2.2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotated(x_mr, rope, position_m, positions, in_m, r: tl.constexpr, PAIRS: tl.constexpr):
    """Rows of adjacent pairs, turned by their positions, in fp32."""
    ids_1p = tl.arange(0, PAIRS)[None, :]
    rows_m1 = rope + tl.minimum(position_m, positions - 1)[:, None] * r
    mask_mp = in_m[:, None] & (ids_1p < r // 2)
    cos_mp = tl.load(rows_m1 + ids_1p, mask=mask_mp, other=0.0)
    sin_mp = tl.load(rows_m1 + r // 2 + ids_1p, mask=mask_mp, other=0.0)
    even_mp, odd_mp = tl.split(tl.reshape(x_mr.to(tl.float32), [x_mr.shape[0], PAIRS, 2]))
    turned = tl.join(even_mp * cos_mp - odd_mp * sin_mp, even_mp * sin_mp + odd_mp * cos_mp)
    return tl.reshape(turned, [x_mr.shape[0], 2 * PAIRS])


@triton.jit
def _normed(x, norm, eps, size: tl.constexpr, PAD: tl.constexpr):
    ids = tl.arange(0, PAD)
    value = tl.load(x + ids, mask=ids < size, other=0.0).to(tl.float32)
    weight = tl.load(norm + ids, mask=ids < size, other=0.0).to(tl.float32)
    return value * tl.rsqrt(tl.sum(value * value, axis=0) / size + eps) * weight


@triton.jit
def _cache_latents(
    q_out, latents, kv, kv_norm, q, q_norm, rope, block_table, position_n,
    kv_stride, q_stride, table_stride, table_blocks, scratch, positions, eps, S,
    C: tl.constexpr, r: tl.constexpr, Q: tl.constexpr, b: tl.constexpr,
    C_PAD: tl.constexpr, PAIRS: tl.constexpr, Q_PAD: tl.constexpr,
):  # fmt: skip
    """One token; its query by a program of its own."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        row = token // S
        position = tl.load(position_n + row).to(tl.int64) + token % S
        entry = position // b
        owned = entry < table_blocks
        block = tl.load(block_table + row * table_stride + entry, mask=owned, other=0).to(tl.int64)
        target = latents + (tl.where(owned, block, scratch) * b + position % b) * (C + r)
        ids_C, ids_1r = tl.arange(0, C_PAD), tl.arange(0, 2 * PAIRS)[None, :]
        latent_C = _normed(kv + token * kv_stride, kv_norm, eps, C, C_PAD)
        tl.store(target + ids_C, latent_C.to(latents.dtype.element_ty), mask=ids_C < C)
        k_1r = tl.load(kv + token * kv_stride + C + ids_1r, mask=ids_1r < r, other=0.0)
        one_1 = tl.full([1], 1, tl.int64)
        k_1r = _rotated(k_1r, rope, one_1 * position, positions, one_1 > 0, r, PAIRS)
        tl.store(target + C + ids_1r, k_1r.to(latents.dtype.element_ty), mask=ids_1r < r)
    else:
        ids_Q = tl.arange(0, Q_PAD)
        q_Q = _normed(q + token * q_stride, q_norm, eps, Q, Q_PAD)
        tl.store(q_out + token * Q + ids_Q, q_Q.to(q_out.dtype.element_ty), mask=ids_Q < Q)


def cache_latents(
    kv_Rx: Tensor,
    kv_norm_C: Tensor,
    q_RQ: Tensor | None,
    q_norm_Q: Tensor | None,
    eps: float,
    rope_P: Tensor,
    latents_Bbx: Tensor,
    block_table_nM: Tensor,
    position_n: Tensor,
) -> Tensor | None:
    """As kernels.reference.mla_step.cache_latents."""
    (R, x), n = kv_Rx.shape, position_n.shape[0]
    C, r, Q = kv_norm_C.shape[0], x - kv_norm_C.shape[0], 1 if q_RQ is None else q_RQ.shape[1]
    assert latents_Bbx.is_contiguous() and kv_Rx.stride(1) == 1 and block_table_nM.stride(1) == 1
    assert rope_P.is_contiguous() and rope_P.dtype == torch.float32 and rope_P.shape[1:] == (2, r // 2)
    q_out_RQ = None
    if q_RQ is not None:
        assert q_RQ.stride(1) == 1
        q_out_RQ = torch.empty(R, Q, dtype=q_RQ.dtype, device=q_RQ.device)
    if R:
        q_arguments = (kv_Rx, kv_norm_C) if q_RQ is None else (q_RQ, q_norm_Q)
        _cache_latents[(R, 1 if q_RQ is None else 2)](
            kv_Rx if q_out_RQ is None else q_out_RQ, latents_Bbx, kv_Rx, kv_norm_C, *q_arguments, rope_P,
            block_table_nM, position_n, kv_Rx.stride(0), q_arguments[0].stride(0), block_table_nM.stride(0),
            block_table_nM.shape[1], latents_Bbx.shape[0] - 1, rope_P.shape[0], eps, R // n,
            C=C, r=r, Q=Q, b=latents_Bbx.shape[1], C_PAD=triton.next_power_of_2(C),
            PAIRS=triton.next_power_of_2(r // 2), Q_PAD=triton.next_power_of_2(Q), num_warps=1 if C <= 256 else 4,
        )  # fmt: skip
    return q_out_RQ


@triton.jit
def _absorb(
    out, q, key_up, rope, position_n, q_stride, head_stride, R, S, positions,
    h: tl.constexpr, k: tl.constexpr, C: tl.constexpr, r: tl.constexpr,
    M_TILE: tl.constexpr, U_TILE: tl.constexpr, C_TILES: tl.constexpr, K_PAD: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A tile of latent channels of one head, or, after all of them, its rotary part."""
    head, x = tl.program_id(1), C + r
    ids_m = tl.program_id(2) * M_TILE + tl.arange(0, M_TILE)
    in_m = ids_m < R
    q_m1 = q + ids_m.to(tl.int64)[:, None] * q_stride + head * (k + r)
    out_m1 = out + (ids_m.to(tl.int64)[:, None] * h + head) * x
    if tl.program_id(0) < C_TILES:
        ids_k = tl.arange(0, K_PAD)
        ids_u = tl.program_id(0) * U_TILE + tl.arange(0, U_TILE)
        q_mk = tl.load(q_m1 + ids_k[None, :], mask=in_m[:, None] & (ids_k < k)[None, :], other=0.0)
        places_ku = key_up + head.to(tl.int64) * head_stride + ids_k[:, None] * C + ids_u[None, :]
        up_ku = tl.load(places_ku, mask=(ids_k < k)[:, None] & (ids_u < C)[None, :], other=0.0)
        out_mu = tl.dot(q_mk, up_ku, input_precision="ieee")
        mask_mu = in_m[:, None] & (ids_u < C)[None, :]
        tl.store(out_m1 + ids_u[None, :], out_mu.to(out.dtype.element_ty), mask=mask_mu)
    else:
        ids_1r = tl.arange(0, 2 * PAIRS)[None, :]
        mask_mr = in_m[:, None] & (ids_1r < r)
        q_mr = tl.load(q_m1 + k + ids_1r, mask=mask_mr, other=0.0)
        position_m = tl.load(position_n + ids_m // S, mask=in_m, other=0).to(tl.int64) + ids_m % S
        q_mr = _rotated(q_mr, rope, position_m, positions, in_m, r, PAIRS)
        tl.store(out_m1 + C + ids_1r, q_mr.to(out.dtype.element_ty), mask=mask_mr)


def absorb_queries(q_Rhd: Tensor, key_up_hkC: Tensor, rope_P: Tensor, position_n: Tensor) -> Tensor:
    """As kernels.reference.mla_step.absorb_queries."""
    (R, h, d), (k, C), n = q_Rhd.shape, key_up_hkC.shape[1:], position_n.shape[0]
    r, S = d - k, R // n
    assert q_Rhd.stride(2) == 1 and q_Rhd.stride(1) == d and q_Rhd.dtype == key_up_hkC.dtype
    assert key_up_hkC.stride(2) == 1 and key_up_hkC.stride(1) == C
    assert rope_P.is_contiguous() and rope_P.dtype == torch.float32 and rope_P.shape[1:] == (2, r // 2)
    out_nShx = torch.empty(n, S, h, C + r, dtype=q_Rhd.dtype, device=q_Rhd.device)
    m_tile, u_tile = 16 if R <= 32 else 64, 64 if q_Rhd.element_size() < 4 else 32
    tiles = triton.cdiv(C, u_tile)
    if R:
        _absorb[(tiles + 1, h, triton.cdiv(R, m_tile))](
            out_nShx, q_Rhd, key_up_hkC, rope_P, position_n, q_Rhd.stride(0), key_up_hkC.stride(0), R, S,
            rope_P.shape[0], h=h, k=k, C=C, r=r, M_TILE=m_tile, U_TILE=u_tile, C_TILES=tiles,
            K_PAD=max(16, triton.next_power_of_2(k)), PAIRS=triton.next_power_of_2(r // 2), num_warps=4,
        )  # fmt: skip
    return out_nShx


@triton.jit
def _gated_values(
    out, o, value_up, gate, head_stride, gate_stride, R,
    h: tl.constexpr, v: tl.constexpr, C: tl.constexpr,
    M_TILE: tl.constexpr, U_TILE: tl.constexpr, C_TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    ids_m = tl.program_id(2) * M_TILE + tl.arange(0, M_TILE)
    ids_u = tl.program_id(0) * U_TILE + tl.arange(0, U_TILE)
    ids_c = tl.arange(0, C_TILE)
    in_m, in_u = ids_m < R, ids_u < v
    rows_mc = o + (ids_m.to(tl.int64)[:, None] * h + head) * C + ids_c[None, :]
    columns_cu = value_up + head.to(tl.int64) * head_stride + ids_u[None, :] * C + ids_c[:, None]
    gate_m = tl.sigmoid(tl.load(gate + ids_m * gate_stride + head, mask=in_m, other=0.0).to(tl.float32))
    acc_mu = tl.zeros([M_TILE, U_TILE], tl.float32)
    for c in range(0, C, C_TILE):
        in_c = c + ids_c < C
        o_mc = tl.load(rows_mc + c, mask=in_m[:, None] & in_c[None, :], other=0.0)
        up_cu = tl.load(columns_cu + c, mask=in_c[:, None] & in_u[None, :], other=0.0)
        acc_mu = tl.dot(o_mc, up_cu, acc_mu, input_precision="ieee")
    target_mu = out + (ids_m.to(tl.int64)[:, None] * h + head) * v + ids_u[None, :]
    tl.store(target_mu, (acc_mu * gate_m[:, None]).to(out.dtype.element_ty), mask=in_m[:, None] & in_u[None, :])


def gated_values(o_nShC: Tensor, value_up_hvC: Tensor, gate_Rh: Tensor) -> Tensor:
    """As kernels.reference.mla_step.gated_values, rounded once."""
    (n, S, h, C), v = o_nShC.shape, value_up_hvC.shape[1]
    R, wide = n * S, o_nShC.element_size() == 4
    assert o_nShC.is_contiguous() and o_nShC.dtype == value_up_hvC.dtype and gate_Rh.stride(1) == 1
    assert value_up_hvC.stride(2) == 1 and value_up_hvC.stride(1) == C
    out = torch.empty(R, h * v, dtype=o_nShC.dtype, device=o_nShC.device)
    m_tile, u_tile, c_tile = (16, 16, 256) if R <= 32 else (64, 64, 64)
    if R:
        _gated_values[(triton.cdiv(v, u_tile), h, triton.cdiv(R, m_tile))](
            out, o_nShC, value_up_hvC, gate_Rh, value_up_hvC.stride(0), gate_Rh.stride(0), R, h=h, v=v, C=C,
            M_TILE=m_tile, U_TILE=u_tile, C_TILE=32 if wide else c_tile, num_warps=4, num_stages=2 if wide else 3,
        )  # fmt: skip
    return out
