"""Absorbed latent attention over a paged cache: the tokens and heads of a row are one tile of queries.

A row's cached positions are split among programs when rows are few; a second launch then joins their parts by
log-sum-exp. The split follows each row's own length, read on the device.

Shape legend: as kernels.reference.mla_verify; m queries of a tile (S * h of a row at most), l cached positions
of a block of work, P parts of a row.

Source: Bailing V3 spec section 2.2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264
"""Enough to fill a large GPU twice; more rows than that are not split."""
MAX_PARTS = 16
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    out,
    part_lse,
    q,
    latents,
    block_table,
    position_n,
    scale,
    table_stride,
    table_tokens,
    queries: tl.constexpr,
    h: tl.constexpr,
    C: tl.constexpr,
    r: tl.constexpr,
    b: tl.constexpr,
    M_TILE: tl.constexpr,
    L_TILE: tl.constexpr,
    C_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(2)
    x: tl.constexpr = C + r
    ids_m = tl.program_id(1) * M_TILE + tl.arange(0, M_TILE)
    ids_C, ids_r, ids_l = tl.arange(0, C_PAD), tl.arange(0, R_PAD), tl.arange(0, L_TILE)
    in_m = ids_m < queries
    position = tl.load(position_n + row).to(tl.int32)
    last_m = position + ids_m // h
    # A row past the context limit has no more blocks than its table holds.
    length = tl.minimum(position + queries // h, table_tokens)
    span = tl.cdiv(tl.cdiv(length, PARTS), L_TILE) * L_TILE
    begin = part * span
    end = tl.minimum(begin + span, length)

    q += row * queries * x
    mask_mC = in_m[:, None] & (ids_C < C)[None, :]
    q_mC = tl.load(q + ids_m[:, None] * x + ids_C[None, :], mask=mask_mC, other=0.0)
    q_mr = tl.load(
        q + ids_m[:, None] * x + C + ids_r[None, :], mask=in_m[:, None] & (ids_r < r)[None, :], other=0.0
    )
    best_m = tl.full([M_TILE], float("-inf"), tl.float32)
    total_m = tl.zeros([M_TILE], tl.float32)
    acc_mC = tl.zeros([M_TILE, C_PAD], tl.float32)
    for start in range(begin, end, L_TILE):
        at_l = start + ids_l
        in_l = at_l < end
        block_l = tl.load(block_table + row * table_stride + at_l // b, mask=in_l, other=0).to(tl.int64)
        cached = latents + (block_l * b + at_l % b)[:, None] * x
        c_lC = tl.load(cached + ids_C[None, :], mask=in_l[:, None] & (ids_C < C)[None, :], other=0.0)
        k_lr = tl.load(cached + C + ids_r[None, :], mask=in_l[:, None] & (ids_r < r)[None, :], other=0.0)
        score_ml = tl.dot(q_mC, tl.trans(c_lC), input_precision="ieee")
        score_ml = tl.dot(q_mr, tl.trans(k_lr), score_ml, input_precision="ieee")
        seen_ml = in_l[None, :] & (at_l[None, :] <= last_m[:, None])
        score_ml = tl.where(seen_ml, score_ml * (scale * LOG2E), float("-inf"))
        new_m = tl.maximum(best_m, tl.max(score_ml, axis=1))
        # A query that has seen nothing yet: keep -inf - -inf out of the exponent.
        base_m = tl.where(new_m == float("-inf"), 0.0, new_m)
        weight_ml = tl.exp2(score_ml - base_m[:, None])
        rescale_m = tl.exp2(best_m - base_m)
        total_m = total_m * rescale_m + tl.sum(weight_ml, axis=1)
        acc_mC = acc_mC * rescale_m[:, None]
        acc_mC = tl.dot(weight_ml.to(c_lC.dtype), c_lC, acc_mC, input_precision="ieee")
        best_m = new_m

    o_mC = acc_mC / tl.where(total_m > 0, total_m, 1.0)[:, None]
    if PARTS == 1:
        place = row * queries + ids_m
    else:
        place = (row * PARTS + part) * queries + ids_m
        lse_m = tl.where(total_m > 0, best_m + tl.log2(tl.where(total_m > 0, total_m, 1.0)), float("-inf"))
        tl.store(part_lse + place, lse_m, mask=in_m)
    if begin < end:
        tl.store(out + place[:, None] * C + ids_C[None, :], o_mC.to(out.dtype.element_ty), mask=mask_mC)


@triton.jit
def _join(
    out,
    part_o,
    part_lse,
    queries: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    P_PAD: tl.constexpr,
):
    row = (tl.program_id(0) // queries).to(tl.int64)
    query = tl.program_id(0) % queries
    ids_P, ids_C = tl.arange(0, P_PAD), tl.arange(0, C_PAD)
    place_P = (row * PARTS + ids_P) * queries + query
    lse_P = tl.load(part_lse + place_P, mask=ids_P < PARTS, other=float("-inf"))
    weight_P = tl.exp2(lse_P - tl.max(lse_P, axis=0))
    weight_P = weight_P / tl.sum(weight_P, axis=0)
    mask_PC = (lse_P > float("-inf"))[:, None] & (ids_C < C)[None, :]
    o_PC = tl.load(part_o + place_P[:, None] * C + ids_C[None, :], mask=mask_PC, other=0.0)
    o_C = tl.sum(o_PC * weight_P[:, None], axis=0)
    tl.store(out + (row * queries + query) * C + ids_C, o_C.to(out.dtype.element_ty), mask=ids_C < C)


def _tiles(itemsize: int) -> tuple[int, int, int, int]:
    """Queries of a tile, cached positions of a tile, warps, pipeline stages."""
    # More queries to a tile would read the cache less often, but leave a multiprocessor one program.
    return (16, 16, 4, 1) if itemsize == 4 else (16, 32, 4, 2)


def _parts(programs: int, context_tokens: int, tile_tokens: int) -> int:
    wanted = -(-PROGRAMS // programs)
    return max(1, min(wanted, MAX_PARTS, -(-context_tokens // tile_tokens)))


def mla_verify(
    q_nShx: Tensor,
    latents_Bbx: Tensor,
    block_table_nM: Tensor,
    position_n: Tensor,
    scale: float,
    latent_rank: int,
) -> Tensor:
    """As kernels.reference.mla_verify.mla_verify."""
    n, S, h, x = q_nShx.shape
    queries, block_tokens = S * h, latents_Bbx.shape[1]
    assert latents_Bbx.is_contiguous() and block_table_nM.stride(1) == 1
    assert latents_Bbx.dtype == q_nShx.dtype
    m_tile, l_tile, warps, stages = _tiles(q_nShx.element_size())
    m_tiles = triton.cdiv(queries, m_tile)
    table_tokens = block_table_nM.shape[1] * block_tokens
    parts = _parts(n * m_tiles, table_tokens, l_tile)
    device, c_pad = q_nShx.device, max(16, triton.next_power_of_2(latent_rank))
    out_nShC = torch.empty(n, S, h, latent_rank, dtype=q_nShx.dtype, device=device)
    attended = out_nShC
    if parts > 1:
        attended = torch.empty(n, parts, queries, latent_rank, dtype=torch.float32, device=device)
    part_lse = torch.empty(n, parts, queries, dtype=torch.float32, device=device)
    _attend[(n, m_tiles, parts)](
        attended,
        part_lse,
        q_nShx.contiguous(),
        latents_Bbx,
        block_table_nM,
        position_n,
        scale,
        block_table_nM.stride(0),
        table_tokens,
        queries=queries,
        h=h,
        C=latent_rank,
        r=x - latent_rank,
        b=block_tokens,
        M_TILE=m_tile,
        L_TILE=l_tile,
        C_PAD=c_pad,
        R_PAD=max(16, triton.next_power_of_2(x - latent_rank)),
        PARTS=parts,
        num_warps=warps,
        num_stages=stages,
    )
    if parts > 1:
        p_pad = triton.next_power_of_2(parts)
        _join[(n * queries,)](
            out_nShC,
            attended,
            part_lse,
            queries=queries,
            C=latent_rank,
            C_PAD=c_pad,
            PARTS=parts,
            P_PAD=p_pad,
        )
    return out_nShC
