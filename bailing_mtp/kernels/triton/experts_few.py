"""Experts of a handful of rows: two launches of matrix-vector products, bound by the experts' bytes.

Shape legend: as kernels.reference.experts; n outputs and c summed channels of a tile. Rows A .. A + R - 1 of
the activations are the shared expert's.

Source: Bailing V3 spec section 2.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.reference.experts import SharedExpert
from bailing_mtp.kernels.triton.swiglu import act


@triton.jit
def _gate_up(
    act_Bw,
    x,
    ids,
    route_weights,
    gate_up,
    shared_gate_up,
    first_expert,
    start,
    f,
    shared_start,
    f_shared,
    limit,
    shared_limit,
    A,
    k: tl.constexpr,
    H: tl.constexpr,
    F: tl.constexpr,
    F_SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    n_local: tl.constexpr,
    N_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
    LIMITED: tl.constexpr,
):
    a = tl.program_id(0)
    shared = a >= A
    ids_n = tl.program_id(1) * N_TILE + tl.arange(0, N_TILE)
    expert = tl.load(ids + a, mask=a < A, other=first_expert) - first_expert
    if (expert >= 0) & (expert < n_local):
        row = tl.where(shared, a - A, a // k).to(tl.int64)
        in_n = ids_n < tl.where(shared, f_shared, f)
        weights = tl.where(shared, shared_gate_up, gate_up + expert.to(tl.int64) * (2 * F * H))
        rows_n1 = weights + (tl.where(shared, shared_start, start) + ids_n).to(tl.int64)[:, None] * H
        up_rows_n1 = rows_n1 + tl.where(shared, F_SHARED * H, F * H)
        gate_n = tl.zeros([N_TILE], tl.float32)
        up_n = tl.zeros([N_TILE], tl.float32)
        for c in tl.static_range(0, H, C_TILE):
            ids_c = c + tl.arange(0, C_TILE)
            mask_nc = in_n[:, None] & (ids_c < H)[None, :]
            x_c = tl.load(x + row * H + ids_c, mask=ids_c < H, other=0.0).to(tl.float32)
            gate_nc = tl.load(rows_n1 + ids_c[None, :], mask=mask_nc, other=0.0)
            up_nc = tl.load(up_rows_n1 + ids_c[None, :], mask=mask_nc, other=0.0)
            gate_n += tl.sum(gate_nc.to(tl.float32) * x_c[None, :], axis=1)
            up_n += tl.sum(up_nc.to(tl.float32) * x_c[None, :], axis=1)
        weight = tl.load(route_weights + a, mask=a < A, other=1.0)
        act_n = act(gate_n, up_n, tl.where(shared, shared_limit, limit), LIMITED) * weight
        tl.store(act_Bw + a.to(tl.int64) * WIDTH + ids_n, act_n.to(act_Bw.dtype.element_ty), mask=in_n)


@triton.jit
def _down(
    out,
    act_Bw,
    ids,
    down,
    shared_down,
    residual,
    first_expert,
    start,
    f,
    shared_start,
    f_shared,
    A,
    k: tl.constexpr,
    H: tl.constexpr,
    F: tl.constexpr,
    F_SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    n_local: tl.constexpr,
    N_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
    SHARED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids_n = tl.program_id(1) * N_TILE + tl.arange(0, N_TILE)
    ids_c = tl.arange(0, C_TILE)
    in_n = ids_n < H
    mask_nc = in_n[:, None] & (ids_c < f)[None, :]
    places_nc = start + ids_n[:, None] * F + ids_c[None, :]
    y_n = tl.zeros([N_TILE], tl.float32)
    # No branch on whose expert it is, so that the loads of all k are in flight together.
    for j in tl.static_range(k):
        expert = tl.load(ids + row * k + j) - first_expert
        local = (expert >= 0) & (expert < n_local)
        expert = tl.where(local, expert, 0).to(tl.int64)
        act_c = tl.load(act_Bw + (row * k + j) * WIDTH + ids_c, mask=local & (ids_c < f), other=0.0)
        down_nc = tl.load(down + expert * (H * F) + places_nc, mask=local & mask_nc, other=0.0)
        y_n += tl.sum(down_nc.to(tl.float32) * act_c.to(tl.float32)[None, :], axis=1)
    if SHARED:
        in_c = ids_c < f_shared
        act_c = tl.load(act_Bw + (A + row) * WIDTH + ids_c, mask=in_c, other=0.0)
        places_nc = shared_start + ids_n[:, None] * F_SHARED + ids_c[None, :]
        down_nc = tl.load(shared_down + places_nc, mask=in_n[:, None] & in_c[None, :], other=0.0)
        y_n += tl.sum(down_nc.to(tl.float32) * act_c.to(tl.float32)[None, :], axis=1)
    if RESIDUAL:
        y_n += tl.load(residual + row * H + ids_n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out + row * H + ids_n, y_n.to(out.dtype.element_ty), mask=in_n)


def _options(assignments: int, H: int, width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tiles and warps of _gate_up and of _down: smaller ones while there are programs to spare."""
    halves = 2 if assignments <= 24 else 1
    gate_up = {"N_TILE": 16 // halves, "C_TILE": min(512, triton.next_power_of_2(H)), "num_warps": 4}
    n_tile, c_tile = 8 // halves, triton.next_power_of_2(width)
    # Eight values a thread: of a smaller tile two warps would hold, and exchange, the same sums.
    return gate_up, {"N_TILE": n_tile, "C_TILE": c_tile, "num_warps": max(1, min(4, n_tile * c_tile // 256))}


def experts_of_few_rows(
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
    """As kernels.reference.experts.experts; each assignment reads its expert for itself."""
    (R, k), (n_local, H, F), (start, stop) = ids_Rk.shape, down_eHF.shape, width_slice
    shared_start, shared_stop = (0, 0) if shared is None else shared.channels
    A, f, f_shared = R * k, stop - start, shared_stop - shared_start
    width, rows = max(f, f_shared), A if shared is None else A + R
    act_Bw = torch.empty(rows, width, dtype=x_RH.dtype, device=x_RH.device)
    out_RH = torch.empty(R, H, dtype=x_RH.dtype, device=x_RH.device)
    shared_width = 0 if shared is None else shared.down_HF.shape[1]
    sizes = {"k": k, "H": H, "F": F, "F_SHARED": shared_width, "WIDTH": width, "n_local": n_local}
    where = (first_expert, start, f, shared_start, f_shared)
    for_gate_up, for_down = _options(A, H, width)
    shared_limit = None if shared is None else shared.limit
    _gate_up[(rows, triton.cdiv(width, for_gate_up["N_TILE"]))](
        act_Bw,
        x_RH,
        ids_Rk,
        weights_Rk,
        gate_up_e2FH,
        gate_up_e2FH if shared is None else shared.gate_up_2FH,
        *where,
        float("inf") if limit is None else limit,
        float("inf") if shared_limit is None else shared_limit,
        A,
        LIMITED=limit is not None or shared_limit is not None,
        **sizes,
        **for_gate_up,
    )
    _down[(R, triton.cdiv(H, for_down["N_TILE"]))](
        out_RH,
        act_Bw,
        ids_Rk,
        down_eHF,
        down_eHF if shared is None else shared.down_HF,
        out_RH if residual_RH is None else residual_RH,
        *where,
        A,
        SHARED=shared is not None,
        RESIDUAL=residual_RH is not None,
        **sizes,
        **for_down,
    )
    return out_RH
