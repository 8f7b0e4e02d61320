"""Routed experts over the stacked weights in place, chosen by the number of rows.

A handful of rows: matrix-vector products (experts_few). More: assignments sorted by expert, then one program
per expert and tile of outputs, so that a touched expert's weights are read once. No sum depends on timing.

Shape legend: as kernels.reference.experts; m assignments, n outputs and c summed channels of a tile.

Source: Bailing V3 spec section 2.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.triton.experts_few import experts_of_few_rows
from bailing_mtp.kernels.triton.swiglu import act

FEW_ASSIGNMENTS = 32
"""Up to here most assignments touch an expert of their own."""


@triton.jit
def _sort(order_A, begin_e, count_e, ids, first_expert, A, n_local: tl.constexpr, A_TILE: tl.constexpr):
    """Program e lists the assignments of expert e, after those of all lower experts of this rank."""
    expert = tl.program_id(0)
    lower = 0
    for start in range(0, A, A_TILE):
        a = start + tl.arange(0, A_TILE)
        id_a = tl.load(ids + a, mask=a < A, other=-1).to(tl.int32) - first_expert
        lower += tl.sum(((a < A) & (id_a >= 0) & (id_a < expert)).to(tl.int32), axis=0)
    place = lower
    for start in range(0, A, A_TILE):
        a = start + tl.arange(0, A_TILE)
        id_a = tl.load(ids + a, mask=a < A, other=-1).to(tl.int32) - first_expert
        mine_a = (a < A) & (id_a == expert)
        rank_a = tl.cumsum(mine_a.to(tl.int32), axis=0)
        tl.store(order_A + place + rank_a - 1, a, mask=mine_a)
        place += tl.sum(mine_a.to(tl.int32), axis=0)
    tl.store(begin_e + expert, lower)
    tl.store(count_e + expert, place - lower)


@triton.jit
def _gate_up(
    act_Af,
    x,
    route_weights,
    gate_up,
    order_A,
    begin_e,
    count_e,
    start,
    f,
    limit,
    k: tl.constexpr,
    H: tl.constexpr,
    F: tl.constexpr,
    M_TILE: tl.constexpr,
    N_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
    LIMITED: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    ids_n = tl.program_id(0) * N_TILE + tl.arange(0, N_TILE)
    ids_c = tl.arange(0, C_TILE)
    in_n = ids_n < f
    begin, count = tl.load(begin_e + expert), tl.load(count_e + expert)
    columns_cn = gate_up + expert * (2 * F * H) + (start + ids_n)[None, :] * H + ids_c[:, None]
    for m in range(0, count, M_TILE):
        ids_m = m + tl.arange(0, M_TILE)
        in_m = ids_m < count
        a_m = tl.load(order_A + begin + ids_m, mask=in_m, other=0)
        rows_mc = x + (a_m // k).to(tl.int64)[:, None] * H + ids_c[None, :]
        gate_mn = tl.zeros([M_TILE, N_TILE], tl.float32)
        up_mn = tl.zeros([M_TILE, N_TILE], tl.float32)
        for c in range(0, H, C_TILE):
            in_c = c + ids_c < H
            x_mc = tl.load(rows_mc + c, mask=in_m[:, None] & in_c[None, :], other=0.0)
            mask_cn = in_c[:, None] & in_n[None, :]
            gate_cn = tl.load(columns_cn + c, mask=mask_cn, other=0.0)
            up_cn = tl.load(columns_cn + F * H + c, mask=mask_cn, other=0.0)
            gate_mn = tl.dot(x_mc, gate_cn, gate_mn, input_precision="ieee")
            up_mn = tl.dot(x_mc, up_cn, up_mn, input_precision="ieee")
        weight_m = tl.load(route_weights + a_m, mask=in_m, other=0.0)
        act_mn = act(gate_mn, up_mn, limit, LIMITED) * weight_m[:, None]
        target_mn = act_Af + (begin + ids_m).to(tl.int64)[:, None] * f + ids_n[None, :]
        tl.store(target_mn, act_mn.to(act_Af.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _down(
    y_AH,
    act_Af,
    down,
    order_A,
    begin_e,
    count_e,
    start,
    f,
    H: tl.constexpr,
    F: tl.constexpr,
    M_TILE: tl.constexpr,
    N_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
):
    """Sorted assignments in, results by assignment out."""
    expert = tl.program_id(1).to(tl.int64)
    ids_n = tl.program_id(0) * N_TILE + tl.arange(0, N_TILE)
    ids_c = tl.arange(0, C_TILE)
    in_n = ids_n < H
    begin, count = tl.load(begin_e + expert), tl.load(count_e + expert)
    columns_cn = down + expert * (H * F) + start + ids_n[None, :] * F + ids_c[:, None]
    for m in range(0, count, M_TILE):
        ids_m = m + tl.arange(0, M_TILE)
        in_m = ids_m < count
        rows_mc = act_Af + (begin + ids_m).to(tl.int64)[:, None] * f + ids_c[None, :]
        y_mn = tl.zeros([M_TILE, N_TILE], tl.float32)
        for c in range(0, f, C_TILE):
            in_c = c + ids_c < f
            act_mc = tl.load(rows_mc + c, mask=in_m[:, None] & in_c[None, :], other=0.0)
            down_cn = tl.load(columns_cn + c, mask=in_c[:, None] & in_n[None, :], other=0.0)
            y_mn = tl.dot(act_mc, down_cn, y_mn, input_precision="ieee")
        a_m = tl.load(order_A + begin + ids_m, mask=in_m, other=0).to(tl.int64)
        target_mn = y_AH + a_m[:, None] * H + ids_n[None, :]
        tl.store(target_mn, y_mn.to(y_AH.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _combine(
    out,
    y_AH,
    ids,
    first_expert,
    k: tl.constexpr,
    H: tl.constexpr,
    n_local: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids_n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    sum_n = tl.zeros([TILE], tl.float32)
    for j in tl.static_range(k):
        expert = tl.load(ids + row * k + j) - first_expert
        local = (expert >= 0) & (expert < n_local)
        sum_n += tl.load(y_AH + (row * k + j) * H + ids_n, mask=local & (ids_n < H), other=0.0).to(tl.float32)
    tl.store(out + row * H + ids_n, sum_n.to(out.dtype.element_ty), mask=ids_n < H)


def _tiles(per_expert: float, itemsize: int) -> tuple[dict[str, int], dict[str, int]]:
    """Launch settings of _gate_up and of _down for the mean number of assignments of an expert."""
    m_tile = next((tile for tile, most in ((16, 12), (32, 24), (64, 64)) if per_expert <= most), 128)
    if itemsize == 4:
        small = {"M_TILE": min(m_tile, 32), "N_TILE": 32, "C_TILE": 32, "num_warps": 4, "num_stages": 2}
        return small, small
    if m_tile == 16:
        gate_up = {"N_TILE": 32, "C_TILE": 128, "num_warps": 4, "num_stages": 4}
        down = {"N_TILE": 64, "C_TILE": 128, "num_warps": 4, "num_stages": 4}
    elif m_tile == 32:
        gate_up = {"N_TILE": 64, "C_TILE": 64, "num_warps": 4, "num_stages": 5}
        down = gate_up
    else:
        gate_up = {"N_TILE": 64, "C_TILE": 64, "num_warps": m_tile // 16, "num_stages": 4}
        down = {"N_TILE": 128, "C_TILE": 64, "num_warps": m_tile // 16, "num_stages": 4}
    return {"M_TILE": m_tile, **gate_up}, {"M_TILE": m_tile, **down}


def experts(
    x_RH: Tensor,
    ids_Rk: Tensor,
    weights_Rk: Tensor,
    gate_up_e2FH: Tensor,
    down_eHF: Tensor,
    first_expert: int,
    width_slice: tuple[int, int],
    limit: float | None,
) -> Tensor:
    """As kernels.reference.experts.experts."""
    assert all(x.is_contiguous() for x in (x_RH, ids_Rk, weights_Rk, gate_up_e2FH, down_eHF))
    assert x_RH.dtype == gate_up_e2FH.dtype == down_eHF.dtype and weights_Rk.dtype == torch.float32
    run = experts_of_few_rows if ids_Rk.numel() <= FEW_ASSIGNMENTS else _experts_of_many_rows
    if not x_RH.shape[0]:
        return torch.empty_like(x_RH)
    return run(x_RH, ids_Rk, weights_Rk, gate_up_e2FH, down_eHF, first_expert, width_slice, limit)


def _experts_of_many_rows(
    x_RH: Tensor,
    ids_Rk: Tensor,
    weights_Rk: Tensor,
    gate_up_e2FH: Tensor,
    down_eHF: Tensor,
    first_expert: int,
    width_slice: tuple[int, int],
    limit: float | None,
) -> Tensor:
    (R, k), (n_local, H, F), (start, stop) = ids_Rk.shape, down_eHF.shape, width_slice
    A, f, device = R * k, stop - start, x_RH.device
    order_A = torch.empty(A, dtype=torch.int32, device=device)
    begin_e = torch.empty(n_local, dtype=torch.int32, device=device)
    count_e = torch.empty(n_local, dtype=torch.int32, device=device)
    act_Af = torch.empty(A, f, dtype=x_RH.dtype, device=device)
    y_AH = torch.empty(A, H, dtype=x_RH.dtype, device=device)
    out_RH = torch.empty(R, H, dtype=x_RH.dtype, device=device)
    tile = min(1024, triton.next_power_of_2(A))
    _sort[(n_local,)](
        order_A, begin_e, count_e, ids_Rk, first_expert, A, n_local=n_local, A_TILE=tile, num_warps=4
    )
    for_gate_up, for_down = _tiles(A / n_local, x_RH.element_size())
    sizes = {"H": H, "F": F}
    lists = (order_A, begin_e, count_e, start, f)
    bound = 0.0 if limit is None else limit
    _gate_up[(triton.cdiv(f, for_gate_up["N_TILE"]), n_local)](
        act_Af, x_RH, weights_Rk, gate_up_e2FH, *lists, bound, k=k, LIMITED=limit is not None, **sizes, **for_gate_up
    )  # fmt: skip
    _down[(triton.cdiv(H, for_down["N_TILE"]), n_local)](y_AH, act_Af, down_eHF, *lists, **sizes, **for_down)
    tile = min(1024, triton.next_power_of_2(H))
    _combine[(R, triton.cdiv(H, tile))](
        out_RH, y_AH, ids_Rk, first_expert, k=k, H=H, n_local=n_local, TILE=tile, num_warps=4
    )
    return out_RH
