"""Routed experts over the stacked weights in place, chosen by the number of rows.

A handful of rows: matrix-vector products (experts_few). More: one program per expert and tile of outputs, so
that a touched expert's weights are read once; its assignments come from a list sorted by expert, or, where one
tile holds all rows, from the choices themselves. No sum depends on timing.

Shape legend: as kernels.reference.experts; m assignments, n outputs and c summed channels of a tile. Buffers
have B rows of w channels: A assignments, then R rows of the shared expert.

Source: Bailing V3 spec section 2.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.reference.experts import SharedExpert
from bailing_mtp.kernels.triton.experts_few import experts_of_few_rows
from bailing_mtp.kernels.triton.swiglu import act

FEW_ASSIGNMENTS = 32
"""Up to here most assignments touch an expert of their own."""


@triton.jit
def _sort(order_A, begin_e, count_e, ids, first_expert, A, A_TILE: tl.constexpr):
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
def _assigned(ids, begin_e, count_e, block, shared_blocks, first_expert, R, k: tl.constexpr,
              M_TILE: tl.constexpr, K_PAD: tl.constexpr, LISTED: tl.constexpr):  # fmt: skip
    """First place and number of a block's assignments; without lists, also each row's assignment (-1: none)."""
    begin, count = block * M_TILE, tl.minimum(R - block * M_TILE, M_TILE)
    a_m = tl.full([M_TILE], -1, tl.int32)
    if block >= shared_blocks:
        if LISTED:
            begin = tl.load(begin_e + block - shared_blocks)
            count = tl.load(count_e + block - shared_blocks)
        else:
            ids_m1, ids_1k = tl.arange(0, M_TILE)[:, None], tl.arange(0, K_PAD)[None, :]
            number_mk = ids_m1 * k + ids_1k
            id_mk = tl.load(ids + number_mk, mask=(ids_m1 < R) & (ids_1k < k), other=first_expert - 1)
            a_m = tl.max(tl.where(id_mk - first_expert == block - shared_blocks, number_mk, -1), axis=1)
            begin = block * 0
            count = tl.where(tl.max(a_m, axis=0) >= 0, R, 0)
    return begin, count, a_m


@triton.jit
def _tile(order_A, own_a_m, begin, count, m, routed, A, k: tl.constexpr, M_TILE: tl.constexpr,
          LISTED: tl.constexpr):  # fmt: skip
    """Rows of a tile, their places in the buffers (A + row for the shared expert), and which are real."""
    ids_m = m + tl.arange(0, M_TILE)
    in_m = ids_m < count
    if LISTED:
        a_m = tl.load(order_A + begin + ids_m, mask=in_m & routed, other=0)
    else:
        a_m = tl.where(routed, own_a_m, ids_m * k)
        in_m = in_m & (a_m >= 0)
        a_m = tl.maximum(a_m, 0)
    row_m = tl.where(routed, a_m // k, begin + ids_m)
    return row_m, tl.where(routed, a_m, A + row_m), in_m


@triton.jit
def _gate_up(
    act_Bw, x, route_weights, gate_up, shared_gate_up, ids, order_A, begin_e, count_e,
    first_expert, start, f, R, shared_blocks, shared_start, f_shared, limit, shared_limit,
    k: tl.constexpr, H: tl.constexpr, F: tl.constexpr, F_SHARED: tl.constexpr, WIDTH: tl.constexpr,
    M_TILE: tl.constexpr, N_TILE: tl.constexpr, C_TILE: tl.constexpr, K_PAD: tl.constexpr,
    LIMITED: tl.constexpr, LISTED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The shared expert takes part as `shared_blocks` experts of M_TILE rows each, which come first."""
    block = tl.program_id(1)
    expert = (block - shared_blocks).to(tl.int64)
    ids_n = tl.program_id(0) * N_TILE + tl.arange(0, N_TILE)
    ids_c = tl.arange(0, C_TILE)
    routed = block >= shared_blocks
    width, weights, up = f, gate_up + expert * (2 * F * H) + start * H, F * H
    if SHARED:
        width, up = tl.where(routed, f, f_shared), tl.where(routed, F * H, F_SHARED * H)
        weights = tl.where(routed, weights, shared_gate_up + shared_start * H)
    begin, count, own_a_m = _assigned(
        ids, begin_e, count_e, block, shared_blocks, first_expert, R, k, M_TILE, K_PAD, LISTED
    )
    count = tl.where(tl.program_id(0) * N_TILE < width, count, 0)
    in_n = ids_n < width
    columns_cn = weights + ids_n[None, :] * H + ids_c[:, None]
    for m in range(0, count, M_TILE):
        row_m, a_m, in_m = _tile(order_A, own_a_m, begin, count, m, routed, R * k, k, M_TILE, LISTED)
        rows_mc = x + row_m.to(tl.int64)[:, None] * H + ids_c[None, :]
        gate_mn = tl.zeros([M_TILE, N_TILE], tl.float32)
        up_mn = tl.zeros([M_TILE, N_TILE], tl.float32)
        for c in range(0, H, C_TILE):
            in_c = c + ids_c < H
            x_mc = tl.load(rows_mc + c, mask=in_m[:, None] & in_c[None, :], other=0.0)
            mask_cn = in_c[:, None] & in_n[None, :]
            gate_cn = tl.load(columns_cn + c, mask=mask_cn, other=0.0)
            up_cn = tl.load(columns_cn + up + c, mask=mask_cn, other=0.0)
            gate_mn = tl.dot(x_mc, gate_cn, gate_mn, input_precision="ieee")
            up_mn = tl.dot(x_mc, up_cn, up_mn, input_precision="ieee")
        weight_m = tl.load(route_weights + a_m, mask=in_m & (a_m < R * k), other=1.0)
        own_limit = tl.where(routed, limit, shared_limit)
        act_mn = act(gate_mn, up_mn, own_limit, LIMITED) * weight_m[:, None]
        target_mn = act_Bw + a_m.to(tl.int64)[:, None] * WIDTH + ids_n[None, :]
        tl.store(target_mn, act_mn.to(act_Bw.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _down(
    y_BH, act_Bw, down, shared_down, ids, order_A, begin_e, count_e,
    first_expert, start, f, R, shared_blocks, shared_start, f_shared,
    k: tl.constexpr, H: tl.constexpr, F: tl.constexpr, F_SHARED: tl.constexpr, WIDTH: tl.constexpr,
    M_TILE: tl.constexpr, N_TILE: tl.constexpr, C_TILE: tl.constexpr, K_PAD: tl.constexpr,
    LISTED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    expert = (block - shared_blocks).to(tl.int64)
    ids_n = tl.program_id(0) * N_TILE + tl.arange(0, N_TILE)
    ids_c = tl.arange(0, C_TILE)
    in_n = ids_n < H
    routed = block >= shared_blocks
    width, weights, stride = f, down + expert * (H * F) + start, F
    if SHARED:
        width, stride = tl.where(routed, f, f_shared), tl.where(routed, F, F_SHARED)
        weights = tl.where(routed, weights, shared_down + shared_start)
    begin, count, own_a_m = _assigned(
        ids, begin_e, count_e, block, shared_blocks, first_expert, R, k, M_TILE, K_PAD, LISTED
    )
    columns_cn = weights + ids_n[None, :] * stride + ids_c[:, None]
    for m in range(0, count, M_TILE):
        _, a_m, in_m = _tile(order_A, own_a_m, begin, count, m, routed, R * k, k, M_TILE, LISTED)
        a_m = a_m.to(tl.int64)
        rows_mc = act_Bw + a_m[:, None] * WIDTH + ids_c[None, :]
        y_mn = tl.zeros([M_TILE, N_TILE], tl.float32)
        for c in range(0, width, C_TILE):
            in_c = c + ids_c < width
            act_mc = tl.load(rows_mc + c, mask=in_m[:, None] & in_c[None, :], other=0.0)
            down_cn = tl.load(columns_cn + c, mask=in_c[:, None] & in_n[None, :], other=0.0)
            y_mn = tl.dot(act_mc, down_cn, y_mn, input_precision="ieee")
        target_mn = y_BH + a_m[:, None] * H + ids_n[None, :]
        tl.store(target_mn, y_mn.to(y_BH.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _combine(
    out,
    y_BH,
    ids,
    residual,
    first_expert,
    A,
    k: tl.constexpr,
    H: tl.constexpr,
    n_local: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids_n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_n = ids_n < H
    sum_n = tl.zeros([TILE], tl.float32)
    for j in tl.static_range(k):
        expert = tl.load(ids + row * k + j) - first_expert
        local = (expert >= 0) & (expert < n_local)
        sum_n += tl.load(y_BH + (row * k + j) * H + ids_n, mask=local & in_n, other=0.0).to(tl.float32)
    if SHARED:
        sum_n += tl.load(y_BH + (A + row) * H + ids_n, mask=in_n, other=0.0).to(tl.float32)
    if RESIDUAL:
        sum_n += tl.load(residual + row * H + ids_n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out + row * H + ids_n, sum_n.to(out.dtype.element_ty), mask=in_n)


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
    shared: SharedExpert | None = None,
    residual_RH: Tensor | None = None,
) -> Tensor:
    """As kernels.reference.experts.experts."""
    inputs = [x_RH, ids_Rk, weights_Rk, gate_up_e2FH, down_eHF]
    inputs += [] if shared is None else [shared.gate_up_2FH, shared.down_HF]
    inputs += [] if residual_RH is None else [residual_RH]
    assert all(x.is_contiguous() for x in inputs) and weights_Rk.dtype == torch.float32
    assert all(x.dtype == x_RH.dtype for x in inputs[3:]) and x_RH.shape[0] == ids_Rk.shape[0]
    run = experts_of_few_rows if ids_Rk.numel() <= FEW_ASSIGNMENTS else _experts_of_many_rows
    if not x_RH.shape[0]:
        return torch.empty_like(x_RH)
    weights = (gate_up_e2FH, down_eHF, first_expert, width_slice, limit)
    return run(x_RH, ids_Rk, weights_Rk, *weights, shared, residual_RH)


def _experts_of_many_rows(
    x_RH: Tensor,
    ids_Rk: Tensor,
    weights_Rk: Tensor,
    gate_up_e2FH: Tensor,
    down_eHF: Tensor,
    first_expert: int,
    width_slice: tuple[int, int],
    limit: float | None,
    shared: SharedExpert | None,
    residual_RH: Tensor | None,
) -> Tensor:
    (R, k), (n_local, H, F), (start, stop) = ids_Rk.shape, down_eHF.shape, width_slice
    shared_start, shared_stop = (0, 0) if shared is None else shared.channels
    A, f, f_shared = R * k, stop - start, shared_stop - shared_start
    width, rows, device = max(f, f_shared), A if shared is None else A + R, x_RH.device
    act_Bw = torch.empty(rows, width, dtype=x_RH.dtype, device=device)
    y_BH = torch.empty(rows, H, dtype=x_RH.dtype, device=device)
    for_gate_up, for_down = _tiles(A / n_local, x_RH.element_size())
    m_tile, listed = for_gate_up["M_TILE"], for_gate_up["M_TILE"] < R
    lists = _lists(ids_Rk, first_expert, n_local) if listed else (ids_Rk, ids_Rk, ids_Rk)
    shared_blocks = 0 if shared is None else triton.cdiv(R, m_tile)
    where = (ids_Rk, *lists, first_expert, start, f, R, shared_blocks, shared_start, f_shared)
    sizes = {
        "k": k,
        "H": H,
        "F": F,
        "F_SHARED": 0 if shared is None else shared.down_HF.shape[1],
        "WIDTH": width,
        "K_PAD": triton.next_power_of_2(k),
        "LISTED": listed,
        "SHARED": shared is not None,
    }
    shared_limit = None if shared is None else shared.limit
    limits = [float("inf") if x is None else x for x in (limit, shared_limit)]
    gate_up, down = (gate_up_e2FH, down_eHF) if shared is None else (shared.gate_up_2FH, shared.down_HF)
    _gate_up[(triton.cdiv(width, for_gate_up["N_TILE"]), n_local + shared_blocks)](
        act_Bw, x_RH, weights_Rk, gate_up_e2FH, gate_up, *where, *limits,
        LIMITED=limit is not None or shared_limit is not None, **sizes, **for_gate_up,
    )  # fmt: skip
    _down[(triton.cdiv(H, for_down["N_TILE"]), n_local + shared_blocks)](
        y_BH, act_Bw, down_eHF, down, *where, **sizes, **for_down
    )
    return _combined(y_BH, x_RH, ids_Rk, first_expert, n_local, shared is not None, residual_RH)


def _lists(ids_Rk: Tensor, first_expert: int, n_local: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assignments in the order of their experts; where each expert's begin, and how many it has."""
    A, device = ids_Rk.numel(), ids_Rk.device
    order_A = torch.empty(A, dtype=torch.int32, device=device)
    begin_e, count_e = (torch.empty(n_local, dtype=torch.int32, device=device) for _ in range(2))
    tile = min(1024, triton.next_power_of_2(A))
    _sort[(n_local,)](order_A, begin_e, count_e, ids_Rk, first_expert, A, A_TILE=tile, num_warps=4)
    return order_A, begin_e, count_e


def _combined(
    y_BH: Tensor,
    x_RH: Tensor,
    ids_Rk: Tensor,
    first_expert: int,
    n_local: int,
    has_shared: bool,
    residual_RH: Tensor | None,
) -> Tensor:
    (R, H), tile = x_RH.shape, min(1024, triton.next_power_of_2(x_RH.shape[1]))
    out_RH = torch.empty(R, H, dtype=x_RH.dtype, device=x_RH.device)
    _combine[(R, triton.cdiv(H, tile))](
        out_RH,
        y_BH,
        ids_Rk,
        out_RH if residual_RH is None else residual_RH,
        first_expert,
        ids_Rk.numel(),
        k=ids_Rk.shape[1],
        H=H,
        n_local=n_local,
        TILE=tile,
        SHARED=has_shared,
        RESIDUAL=residual_RH is not None,
        num_warps=4,
    )
    return out_RH
